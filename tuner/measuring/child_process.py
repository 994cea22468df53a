"""Runs measuring processes, which are not trusted: each has its own process group and limits on time and output.

The child reads a Job from its stdin as one line and answers on a separate pipe, so that output of user code cannot
corrupt the messages. Before it times anything it waits for a second line, its turn. Whatever the child does becomes a
value, never an exception. Does not import torch.
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
from tuner import fault_injection
from tuner.measuring.bytecode import bytecode_variables
from tuner.measuring.protocol import GO, Job, Limits, LineReader, Message, Outcome, one_line
from tuner.measuring.scratch import scratch_beside
from tuner.records import Failure, FailureKind, Phase, Spent
from tuner.sandbox.confinement import confinement_of, environment_of, runs_code

#: Called again and again while children run. What it raises propagates.
Check = Callable[[], None]

GRACE_S = 10.0  # for a child that has answered to exit by itself: destroying a CUDA context can take seconds
HOST_THREADS = "8"  # OMP_NUM_THREADS for a step on a GPU
HANG_UP_S = 2.0  # from the end of its results pipe to its exit
KILL_S = 30.0
CHUNK_BYTES = 64 * 1024
CHUNKS = 64  # read from one child before the next one is looked at
TAIL_BYTES = 8 * 1024
# -P: a folder named tuner/ or torch/ beside the user's script must not shadow the installed package.
# die_with comes before the import of torch, which takes seconds. Importing makes no garbage, and the collector would
# take 0.4 of the 4.4 s.
START = (
    "import gc, sys; gc.disable(); from tuner.sandbox.lockdown import die_with; die_with(int(sys.argv[2]));"
    "from tuner.child.main import start; start()"
)
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
NO_FOLDER = "No usable temporary directory"  # Python says this when the disk is full, too
COMMAND = (sys.executable, "-P", "-c", START)


def go_on() -> None:
    """The Check that does nothing."""


class Child:
    """One measuring process: idle until it is given a job, then running it. Keeps the messages received so far."""

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
        """Sends the job; call it once. Limits count from here, so that an idle child has no deadline."""
        now = time.monotonic()
        self._limits = limits
        self._total_s = math.inf if limits.total_s is None else limits.total_s
        self._end = now + self._total_s
        self._deadline = now + limits.of(Phase.START)
        self._entered[Phase.START] = now
        self._order(job.model_dump_json().encode() + b"\n")

    def go(self) -> None:
        """Lets the child time, now or as soon as it is ready. The timing limit counts from the later of the two."""
        self._gone_at = time.monotonic()
        if self.phase is Phase.TIMING:
            self._deadline = min(self._end, self._gone_at + self._limits.of(Phase.TIMING))
        self._order(GO)

    def halt(self) -> None:
        """Stops the process group (SIGSTOP). The deadline of its phase is moved by as long as it was stopped."""
        if self._halted_at is None and not self.has_exited():
            self._halted_at = time.monotonic()
            self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        if self._halted_at is not None:
            self._deadline = min(self._end, self._deadline + time.monotonic() - self._halted_at)
            self._halted_at = None
            self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kills the process group; `started` reaps it."""
        if not self.has_exited():
            self._signal(signal.SIGKILL)

    @property
    def is_ready(self) -> bool:
        """Whether it is waiting for its turn to time."""
        return self.phase is Phase.TIMING and self._gone_at is None and not self.has_answered

    @property
    def has_answered(self) -> bool:
        return self._answer is not None

    def look(self) -> Outcome | None:
        """Reads new messages; returns the outcome, or None while the child works, or is exiting after its answer.

        Does not wait. A child that exits without an answer, exceeds a limit or sends garbage is a Failure.
        """
        was_running = not self.has_exited()
        try:
            heard = self._drain()
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
        """Seconds since it was given its job, split by phase."""
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
        """Does not reap the process: while the leader is a zombie, its process group id cannot be reused."""
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
        """Cannot block on a child that never reads its stdin: a pipe holds 64 KiB, and a line is a few KiB."""
        with contextlib.suppress(BrokenPipeError):  # `look` finds out why the child has gone
            if os.write(self._orders, line) != len(line):
                raise MeasureError(f"a job of {len(line)} bytes is too long")

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    def _drain(self) -> bool:
        """Reads the available output, at most CHUNKS times; False when there was nothing."""
        reads = 0
        while reads < CHUNKS and self._listen():
            reads += 1
        return reads > 0

    def _listen(self) -> bool:
        """Reads the available output once; False when there was nothing."""
        heard = False
        for key, _ in self._selector.select(0):
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
                raise MeasureError("the measuring process sent a message after its answer")
            self._take(message)

    def _take(self, message: Message) -> None:
        now = time.monotonic()
        if message.phase is None:
            self._answer, self._answered_at, self._queued_s = message.outcome, now, message.queued_s
            return
        order = list(Phase)
        # only forward: a child must not be able to renew its deadline again and again
        if order.index(message.phase) <= order.index(self.phase):
            raise MeasureError(f"the measuring process went from {self.phase.value} back to {message.phase.value}")
        self.phase = message.phase
        for name, number in (("child-kill", signal.SIGKILL), ("child-stop", signal.SIGSTOP)):
            if fault_injection.struck(name, self.phase.value):
                os.killpg(self._process.pid, number)
        self._entered[message.phase] = now
        # waiting for its turn has no limit
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


def disk_full(error: OSError) -> Failure:
    """The Failure for a full disk. Raises the error itself when it is any other error."""
    if error.errno not in NO_SPACE and NO_FOLDER not in str(error):
        raise error
    reason = f"{error}; free space there, or name another folder for temporary files with TMPDIR"
    return Failure(kind=FailureKind.CRASHED, phase=Phase.START, reason=one_line(reason))


@contextlib.contextmanager
def started(workload: str, device: str, command: Sequence[str] = COMMAND) -> Iterator[Child]:
    """An idle child for this workload. At the end of the block it is killed with all processes that it has started.

    If it cannot be killed, `Child.hang` is set. The result descriptor and the PID of this process are appended to
    `command`. Compiled code is kept in torch's usual cache of this user. Raises SettingsError for an invalid
    KITSUNE_CONFINE.
    """
    compiled = usual_folder()
    confined = confinement_of(workload, device).command(command)
    with scratch_beside(compiled) as scratch, _pipe() as (results, child_end), _pipe() as (child_in, orders):
        environment = {**_default_variables(device), **_environment(os.environ, workload, scratch, compiled)}
        process = child = None
        try:
            process = _start(confined, child_in, child_end.fileno(), environment)
            child_end.close()
            child_in.close()
            child = Child(process, results.fileno(), orders.fileno())
            yield child
        finally:
            is_dead = process is None or _kill(process)
            _kill_strays(scratch)  # also the child itself, when Ctrl-C came while it started
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
    """Sends SIGKILL to the whole group and reaps the leader; False when it does not die.

    A process that hangs in a GPU call ignores SIGTERM. One that hangs in the driver ignores SIGKILL, too.
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
    """Kills processes that have left the group by setsid. They have the child's own TMPDIR in their environment."""
    mark = f"TMPDIR={scratch}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (process / "environ").read_bytes().split(b"\0"):
                os.kill(int(process.name), signal.SIGKILL)


def _default_variables(device: str) -> dict[str, str]:
    """Environment variables that the user's own override.

    A step on a GPU needs few host threads. With one thread for each of 128 cores, eight tuners on a host of eight GPUs
    waited for each other's threads: a trial of ResNet-50 took 500 s instead of 40 s.
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
    """The available bytes; None at the end of the stream."""
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
