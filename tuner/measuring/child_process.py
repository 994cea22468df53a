"""Child processes that are not trusted: started in a group of their own, bounded in time and output, killed, reaped.

A Job goes in on the child's stdin as one line, messages come back on a pipe of their own, so that what user code prints
does not disturb them. Before it times anything a child waits for its turn, a second line. Whatever the child does
becomes a value. No torch here.
"""

import contextlib
import errno
import math
import os
import selectors
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from kitsune.base.compile_cache import usual_folder
from kitsune.errors import MeasureError
from tuner.measuring import fault_injection
from tuner.measuring.bytecode import bytecode_variables
from tuner.measuring.protocol import GO, Job, Limits, LineReader, Message, Outcome, one_line
from tuner.measuring.scratch import scratch_beside
from tuner.records import Failure, FailureKind, Phase, Spent
from tuner.sandbox.confinement import confinement_of, environment_of, runs_code

#: Asked every TICK_S while a child runs. What it raises kills the child and propagates.
Check = Callable[[], None]

GRACE_S = 10.0  # for a child that has answered to leave by itself: a CUDA context takes up to seconds to go
HOST_THREADS = "8"  # beside a GPU
HANG_UP_S = 2.0  # from the end of its results to its exit, for a child that is going down
KILL_S = 30.0
TICK_S = 0.1
CHUNK_BYTES = 64 * 1024
CHUNKS = 64  # that are read of one child before others have their turn
TAIL_BYTES = 8 * 1024
# -P: a folder of the user's named tuner/ or torch/ beside their script must not be imported instead of ours.
# It asks to die with its parent before it loads torch for seconds. Loading makes no garbage, and looking for it there
# takes 0.4 s of 4.4.
START = (
    "import gc, sys; gc.disable(); from tuner.sandbox.lockdown import die_with; die_with(int(sys.argv[2]));"
    "from tuner.child.main import start; start()"
)
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
NO_FOLDER = "No usable temporary directory"  # by Python, of disks that are full, too
COMMAND = (sys.executable, "-P", "-c", START)


def go_on() -> None:
    """The Check that never objects."""


class Child:
    """One measuring process: idle until it is given a job, and then what it has said so far."""

    def __init__(self, process: subprocess.Popen[bytes], results: int, orders: int) -> None:
        assert process.stderr is not None
        self._process = process
        self._orders = orders
        self._reader = LineReader()
        self._tail: deque[int] = deque(maxlen=TAIL_BYTES)
        self._selector = selectors.DefaultSelector()
        for descriptor, sink in ((results, self._hear), (process.stderr.fileno(), self._tail.extend)):
            os.set_blocking(descriptor, False)
            self._selector.register(descriptor, selectors.EVENT_READ, sink)
        os.set_blocking(orders, False)
        self._results = results
        self._hung_up_at: float | None = None
        self._limits = Limits()
        self._total_s = self._end = self._deadline = math.inf
        self._halted_at: float | None = None
        self._entered: dict[Phase, float] = {}
        self._gone_at: float | None = None
        self._answered_at: float | None = None
        self._queued_s: Mapping[Phase, float] = {}
        self.phase = Phase.START
        self.hang: Failure | None = None
        self._answer: Outcome | None = None

    def give(self, job: Job, limits: Limits) -> None:
        """Once. Seconds are counted from here, so that an idle child has no deadline."""
        now = time.monotonic()
        self._limits = limits
        self._total_s = math.inf if limits.total_s is None else limits.total_s
        self._end = now + self._total_s
        self._deadline = now + limits.of(Phase.START)
        self._entered[Phase.START] = now
        self._order(job.model_dump_json().encode() + b"\n")

    def go(self) -> None:
        """The child's turn to time, or leave to do so whenever it is ready; the limit of timing counts from both."""
        self._gone_at = time.monotonic()
        if self.phase is Phase.TIMING:
            self._deadline = min(self._end, self._gone_at + self._limits.of(Phase.TIMING))
        self._order(GO)

    def halt(self) -> None:
        """Stops the process group where it is; neither the clock of its phase nor anything else of it goes on."""
        if self._halted_at is None and not self.has_exited():
            self._halted_at = time.monotonic()
            self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        if self._halted_at is not None:
            self._deadline = min(self._end, self._deadline + time.monotonic() - self._halted_at)
            self._halted_at = None
            self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """Ends the process group; it is reaped where the child is closed."""
        if not self.has_exited():
            self._signal(signal.SIGKILL)

    @property
    def is_ready(self) -> bool:
        """Whether it waits for its turn to time."""
        return self.phase is Phase.TIMING and self._gone_at is None and not self.has_answered

    @property
    def has_answered(self) -> bool:
        return self._answer is not None

    def look(self, timeout_s: float) -> Outcome | None:
        """What the child came to; None as long as it is at work, or leaves after it has answered.

        An exited child that said nothing, one that went beyond a limit and one that sent garbage are Failures.
        """
        was_running = not self.has_exited()
        try:
            heard = self._drain(timeout_s)
        except MeasureError as error:
            return self._failure(FailureKind.CRASHED, str(error))
        if self._answer is not None:
            return self._answer if self._has_left() else None
        now = time.monotonic()
        if now > (self._deadline if self._halted_at is None else self._end):
            return self._timed_out()
        if not (was_running or heard):
            return self._died()
        if self._hung_up_at is not None and now > self._hung_up_at + HANG_UP_S:
            return self._failure(FailureKind.CRASHED, "the measuring process closed its results without one")
        return None

    def spent(self) -> Spent:
        """Seconds since it was given its job, by what they went to."""
        end = self._answered_at or time.monotonic()
        begins = sorted((at, phase) for phase, at in self._entered.items())
        ends = [at for at, _ in begins[1:]] + [end]
        took = dict.fromkeys(Phase, 0.0) | {phase: until - at for (at, phase), until in zip(begins, ends, strict=True)}
        waited = 0.0
        if Phase.TIMING in self._entered:
            waited = max(0.0, (self._gone_at or end) - self._entered[Phase.TIMING])
        queued = {phase: min(took[phase], self._queued_s.get(phase, 0.0)) for phase in (Phase.NUMERICS, Phase.WARMUP)}
        return Spent(
            start_s=took[Phase.START],
            build_s=took[Phase.BUILD],
            numerics_s=took[Phase.NUMERICS] - queued[Phase.NUMERICS],
            warmup_s=took[Phase.WARMUP] - queued[Phase.WARMUP],
            queued_s=sum(queued.values()),
            waited_s=waited,
            timing_s=took[Phase.TIMING] - waited,
        )

    def has_exited(self) -> bool:
        """Without reaping: as long as the leader is a zombie, the number of its process group cannot be reused."""
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return self._process.returncode is not None or os.waitid(os.P_PID, self._process.pid, flags) is not None

    def close(self, *, is_dead: bool) -> None:
        self._selector.close()
        if not is_dead:
            self.hang = self._failure(FailureKind.CRASHED, "the measuring process cannot be killed: the GPU hangs")

    def _has_left(self) -> bool:
        assert self._answered_at is not None
        return self.has_exited() or time.monotonic() > self._answered_at + GRACE_S

    def _order(self, line: bytes) -> None:
        """A child that never reads its stdin cannot block us: a pipe holds 64 KiB, and a line is a few of them."""
        with contextlib.suppress(BrokenPipeError):  # what became of it is found out by looking
            if os.write(self._orders, line) != len(line):
                raise MeasureError(f"a job of {len(line)} bytes is too long")

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    def _drain(self, timeout_s: float) -> bool:
        """Reads what is there, of a child that writes without end a part; False when there was nothing."""
        heard = self._listen(timeout_s)
        reads = 1
        while heard and reads < CHUNKS and self._listen(0):
            reads += 1
        return heard

    def _listen(self, timeout_s: float) -> bool:
        """Reads what is there; False when there was nothing."""
        heard = False
        if not self._selector.get_map():
            time.sleep(timeout_s)
            return False
        for key, _ in self._selector.select(timeout_s):
            data = _read(key.fd)
            if data is None:
                self._selector.unregister(key.fd)
                if key.fd == self._results:
                    self._hung_up_at = time.monotonic()
                continue
            heard = True
            key.data(data)
        return heard

    def _hear(self, data: bytes) -> None:
        for message in self._reader.feed(data):
            if self._answer is not None:
                raise MeasureError("the measuring process went on talking after its answer")
            self._take(message)

    def _take(self, message: Message) -> None:
        now = time.monotonic()
        if message.phase is None:
            self._answer, self._answered_at, self._queued_s = message.outcome, now, message.queued_s
            return
        order = list(Phase)
        # only forward: a child must not be able to renew its deadline for ever
        if order.index(message.phase) <= order.index(self.phase):
            raise MeasureError(f"the measuring process went from {self.phase.value} back to {message.phase.value}")
        self.phase = message.phase
        for name, number in (("child-kill", signal.SIGKILL), ("child-stop", signal.SIGSTOP)):
            if fault_injection.struck(name, self.phase.value):
                os.killpg(self._process.pid, number)
        self._entered[message.phase] = now
        # one that waits for its turn waits as long as it takes
        limit_s = math.inf if self.is_ready else self._limits.of(message.phase)
        self._deadline = min(self._end, now + limit_s)

    def _timed_out(self) -> Failure:
        what, limit_s = self.phase.value, self._limits.of(self.phase)
        if time.monotonic() > self._end:
            what, limit_s = f"all up to {self.phase.value}", self._total_s
        reason = f"{what} took longer than its limit of {limit_s:g} s; the process was killed"
        return self._failure(FailureKind.TIMEOUT, reason)

    def _died(self) -> Failure:
        status = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        assert status is not None
        if status.si_code == os.CLD_EXITED:
            how = f"exited with code {status.si_status} without a result"
        else:
            how = f"was killed by {_signal_name(status.si_status)}"
        last = self._last_words()
        reason = f"the measuring process {how}" + (f"; last words: {last}" if last else "")
        return self._failure(FailureKind.CRASHED, reason)

    def _last_words(self) -> str:
        lines = bytes(self._tail).decode(errors="replace").splitlines()
        return one_line(next((line for line in reversed(lines) if line.strip()), ""), 500)

    def _failure(self, kind: FailureKind, reason: str) -> Failure:
        return Failure(kind=kind, phase=self.phase, reason=one_line(reason))


def supervise(job: Job, limits: Limits, command: Sequence[str] = COMMAND, check: Check = go_on) -> Outcome:
    """Runs one job in a process of its own, and leaves nothing behind: no process, no descriptor, no file.

    A full disk is a Failure. The numbers of the result descriptor and of this process are added to `command`. Compiled
    code is kept where torch keeps it for this user. KeyboardInterrupt, and what `check` raises, kills the child and
    propagates. Raises SettingsError for a KITSUNE_CONFINE that makes no sense.
    """
    try:
        with started(job.workload, job.device, command) as child:
            child.give(job, limits)
            child.go()  # nobody else is timed
            while (outcome := child.look(TICK_S)) is None:
                check()
    except OSError as error:
        return no_room(error)
    return child.hang or outcome


def no_room(error: OSError) -> Failure:
    """The failure that a full disk is. Raises the error itself when it is another one."""
    if error.errno not in NO_SPACE and NO_FOLDER not in str(error):
        raise error
    reason = f"{error}; free space there, or name another folder for temporary files with TMPDIR"
    return Failure(kind=FailureKind.CRASHED, phase=Phase.START, reason=one_line(reason))


@contextlib.contextmanager
def started(workload: str, device: str, command: Sequence[str] = COMMAND) -> Iterator[Child]:
    """An idle child that will measure this workload; in the end it is dead, and whatever it has started.

    Where it could not be killed, `hang` says so. Raises SettingsError for a KITSUNE_CONFINE that makes no sense.
    """
    compiled = usual_folder()
    confined = confinement_of(workload, device).command(command)
    with scratch_beside(compiled) as scratch, _pipe() as (results, child_end), _pipe() as (child_in, orders):
        environment = {**_habits(device), **_environment(os.environ, workload, scratch, compiled)}
        process = child = None
        try:
            process = _start(confined, child_in, child_end.fileno(), environment)
            child_end.close()
            child_in.close()
            child = Child(process, results.fileno(), orders.fileno())
            yield child
        finally:
            is_dead = process is None or _kill(process)
            _kill_strays(scratch)  # the child, too, when Ctrl-C came while it started
            if child is not None:
                child.close(is_dead=is_dead)


def _start(
    command: Sequence[str], stdin: IO[bytes], results: int, environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [*command, str(results), str(os.getpid())],
        stdin=stdin,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        pass_fds=(results,),
        start_new_session=True,
        env=dict(environment),
    )


def _kill(process: subprocess.Popen[bytes]) -> bool:
    """SIGKILL to the whole group, then reap the leader; False when it does not die.

    Nothing gentler: a process that hangs in a GPU call does not hear it. One that hangs in the driver hears nothing.
    """
    assert process.stderr is not None
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.stderr.close()
    try:
        process.wait(KILL_S)
    except subprocess.TimeoutExpired:
        return False
    return True


def _kill_strays(scratch: Path) -> None:
    """Processes that have left the group, by setsid, are known by the child's own folder in their environment."""
    mark = f"TMPDIR={scratch}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (process / "environ").read_bytes().split(b"\0"):
                os.kill(int(process.name), signal.SIGKILL)


def _habits(device: str) -> dict[str, str]:
    """Variables that the user's own override.

    A step on a GPU needs few threads of the host. With one for each of 128 cores, eight tuners on a host of eight GPUs
    waited for each other's threads: 500 s for a trial of ResNet-50 that takes 40 s.
    """
    return {"OMP_NUM_THREADS": HOST_THREADS} if device.startswith("cuda") else {}


def _environment(given: Mapping[str, str], workload: str, scratch: Path, compiled: Path) -> dict[str, str]:
    kept = environment_of(given, workload)
    paths = [str(Path(__file__).resolve().parents[2]), *filter(None, [given.get("PYTHONPATH")])]
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(compiled)} | kept
    bytecode = bytecode_variables(Path(cache["TORCHINDUCTOR_CACHE_DIR"]), is_confined=not runs_code(workload))
    return {**cache, "TMPDIR": str(scratch), "PYTHONPATH": os.pathsep.join(paths), **bytecode}


@contextlib.contextmanager
def _pipe() -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """(reading end, writing end)."""
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb", buffering=0) as source, os.fdopen(writing, "wb", buffering=0) as sink:
        yield source, sink


def _read(descriptor: int) -> bytes | None:
    """What is there to read; None at the end."""
    try:
        return os.read(descriptor, CHUNK_BYTES) or None
    except BlockingIOError:
        return b""


def _signal_name(number: int) -> str:
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    return f"{name} (the system does that when memory runs out)" if number == signal.SIGKILL else name
