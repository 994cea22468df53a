"""A child process that is not trusted: started in a group of its own, bounded in time and output, killed, reaped.

A Job goes in on the child's stdin, messages come back on a pipe of their own, so that what user code prints does not
disturb them. Whatever the child does becomes a value. No torch here.
"""

import contextlib
import errno
import fcntl
import getpass
import math
import os
import re
import selectors
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from kitsune.errors import MeasureError
from tuner import faults
from tuner.confinement import confinement_of, environment_of
from tuner.protocol import Inspection, Job, Limits, LineReader, Message, one_line
from tuner.records import Failure, FailureKind, Measurement, Phase

Outcome = Inspection | Measurement | Failure
#: Asked every TICK_S while a child runs. What it raises kills the child and propagates.
Check = Callable[[], None]

GRACE_S = 10.0  # for a child that has answered to leave by itself: a CUDA context takes up to seconds to go
HOST_THREADS = "8"  # beside a GPU
HANG_UP_S = 2.0  # from the end of its results to its exit, for a child that is going down
KILL_S = 30.0
TICK_S = 0.1
CHUNK_BYTES = 64 * 1024
TAIL_BYTES = 8 * 1024
# -P: a folder of the user's named tuner/ or torch/ beside their script must not be imported instead of ours.
# It asks to die with its parent before it loads torch for seconds. Loading makes no garbage, and looking for it there
# takes 0.4 s of 4.4.
START = (
    "import gc, sys; gc.disable(); from tuner.lockdown import die_with; die_with(int(sys.argv[2]));"
    "from tuner.child import start; start()"
)
COMMAND = (sys.executable, "-P", "-c", START)
SCRATCH = "kitsune-"
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
NO_FOLDER = "No usable temporary directory"  # by Python, of disks that are full, too
OWNER = "owner"  # in the folder of a child: the file that the living process it belongs to keeps locked


def go_on() -> None:
    """The Check that never objects."""


class Child:
    """One measuring process and what it has said so far."""

    def __init__(
        self, process: subprocess.Popen[bytes], results: int, limits: Limits, reader: LineReader, check: Check
    ) -> None:
        assert process.stderr is not None
        self._process = process
        self._check = check
        self._limits = limits
        self._reader = reader
        self._tail: deque[int] = deque(maxlen=TAIL_BYTES)
        self._selector = selectors.DefaultSelector()
        for descriptor, sink in ((results, self._hear), (process.stderr.fileno(), self._tail.extend)):
            os.set_blocking(descriptor, False)
            self._selector.register(descriptor, selectors.EVENT_READ, sink)
        self._results = results
        self._hung_up_at: float | None = None
        self.phase = Phase.BUILD
        self._total_s = math.inf if limits.total_s is None else limits.total_s
        self._end = time.monotonic() + self._total_s
        self._deadline = time.monotonic() + limits.of(Phase.BUILD)
        self.outcome: Outcome | None = None

    def wait(self) -> Outcome:
        """The child's answer, or the Failure that it is."""
        try:
            while self.outcome is None and not self.has_exited():
                self._check()
                if time.monotonic() > self._deadline:
                    return self._timed_out()
                if self._hung_up_at is not None and time.monotonic() > self._hung_up_at + HANG_UP_S:
                    return self._failure(FailureKind.CRASHED, "the measuring process closed its results without one")
                self._listen(TICK_S)
            while self._listen(0) and time.monotonic() < self._deadline:
                pass
        except MeasureError as error:
            return self._failure(FailureKind.CRASHED, str(error))
        return self.outcome or self._died()

    def linger(self) -> None:
        """Lets a child that has answered leave by itself, and keeps its pipes from filling up."""
        end = time.monotonic() + GRACE_S
        while not self.has_exited() and time.monotonic() < end:
            self._check()
            with contextlib.suppress(MeasureError):
                self._listen(TICK_S)

    def has_exited(self) -> bool:
        """Without reaping: as long as the leader is a zombie, the number of its process group cannot be reused."""
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return self._process.returncode is not None or os.waitid(os.P_PID, self._process.pid, flags) is not None

    def close(self) -> None:
        self._selector.close()

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
            if self.outcome is not None:
                raise MeasureError("the measuring process went on talking after its answer")
            self._take(message)

    def _take(self, message: Message) -> None:
        self.outcome = message.outcome
        if message.phase is None:
            return
        order = list(Phase)
        # only forward: a child must not be able to renew its deadline for ever
        if order.index(message.phase) <= order.index(self.phase):
            raise MeasureError(f"the measuring process went from {self.phase.value} back to {message.phase.value}")
        self.phase = message.phase
        for name, number in (("child-kill", signal.SIGKILL), ("child-stop", signal.SIGSTOP)):
            if faults.struck(name, self.phase.value):
                os.killpg(self._process.pid, number)
        self._deadline = min(self._end, time.monotonic() + self._limits.of(message.phase))

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
        outcome = _supervised(job, limits, command, check)
    except OSError as error:
        if error.errno not in NO_SPACE and NO_FOLDER not in str(error):
            raise
        reason = f"{error}; free space there, or name another folder for temporary files with TMPDIR"
        return Failure(kind=FailureKind.CRASHED, phase=Phase.BUILD, reason=one_line(reason))
    if faults.struck("gpu-lost"):
        return Failure(kind=FailureKind.CRASHED, phase=Phase.TIMING, reason="CUDA error: device-side assert triggered")
    return outcome


def _supervised(job: Job, limits: Limits, command: Sequence[str], check: Check) -> Outcome:
    compiled = _compiled()
    confined = confinement_of(job.workload, job.device).command(command)
    with _scratch(compiled) as scratch, _pipe() as (results, child_end), _stdin(job, scratch) as stdin:
        environment = {**_habits(job.device), **_environment(os.environ, job.workload, scratch, compiled)}
        process = None
        try:
            process = _start(confined, stdin, child_end.fileno(), environment)
            child_end.close()
            outcome, phase = _attend(process, results.fileno(), limits, check)
        finally:
            is_dead = process is None or _kill(process)
            _kill_strays(scratch)  # the child, too, when Ctrl-C came while it started
    if not is_dead:
        return Failure(
            kind=FailureKind.CRASHED, phase=phase, reason="the measuring process cannot be killed: the GPU hangs"
        )
    return outcome


def _attend(process: subprocess.Popen[bytes], results: int, limits: Limits, check: Check) -> tuple[Outcome, Phase]:
    child = Child(process, results, limits, LineReader(), check)
    try:
        outcome = child.wait()
        if child.outcome is outcome:
            child.linger()
        return outcome, child.phase
    finally:
        child.close()


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
    paths = [str(Path(__file__).resolve().parents[1]), *filter(None, [given.get("PYTHONPATH")])]
    shared = {"TORCHINDUCTOR_CACHE_DIR": str(compiled)}
    return {**shared, **kept, "TMPDIR": str(scratch), "PYTHONPATH": os.pathsep.join(paths)}


@contextlib.contextmanager
def _scratch(compiled: Path) -> Iterator[Path]:
    """A folder for temporary files. Inductor keeps precompiled C++ headers, 5 s of work, among them: those stay."""
    path = Path(tempfile.mkdtemp(prefix=SCRATCH))
    try:
        faults.no_space("scratch-full", path)
        with _owned(path):
            faults.no_space("cache-full", compiled)
            compiled.mkdir(parents=True, exist_ok=True)
            (path / compiled.name).symlink_to(compiled.resolve(), target_is_directory=True)
            yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def _owned(folder: Path) -> Iterator[None]:
    """Marks the folder as that of a living process.

    By a lock, which ends with the process however it ends: a number may be used again, and in another container it
    means another process. Under its name the file is locked from the first moment.
    """
    fresh = folder / f"{OWNER}.new"
    with fresh.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        fresh.rename(folder / OWNER)
        yield


def sweep() -> None:
    """Removes what processes of this user have left that had no time to: the folders whose owner is gone."""
    for folder in Path(tempfile.gettempdir()).glob(f"{SCRATCH}*"):
        with contextlib.suppress(OSError):  # another process sweeps too, or the folder is not ours
            _sweep(folder)


def _sweep(folder: Path) -> None:
    """Raises OSError when the folder is in use, or none of ours."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        return
    descriptor = os.open(folder / OWNER, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb+", buffering=0) as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder)


def _compiled() -> Path:
    """Where torch keeps compiled code by default: training by the plan finds there what its tuning has compiled.

    What autotuning picked lies there too: 60 s of work for BERT-base on an H200, and picked anew it may be otherwise.
    """
    return Path(tempfile.gettempdir()) / f"torchinductor_{_user()}"


def _user() -> str:
    """The user's name as Inductor writes it into file names."""
    try:
        name = getpass.getuser()
    except (KeyError, OSError):
        name = f"uid_{os.getuid()}"
    return re.sub(r'[\\/:*?"<>|]', "_", name)


@contextlib.contextmanager
def _pipe() -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """(reading end, writing end)."""
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb", buffering=0) as source, os.fdopen(writing, "wb", buffering=0) as sink:
        yield source, sink


@contextlib.contextmanager
def _stdin(job: Job, scratch: Path) -> Iterator[IO[bytes]]:
    """The job in a file: a child that never reads its stdin cannot block us."""
    path = scratch / "job.json"
    path.write_bytes(job.model_dump_json().encode())
    with path.open("rb") as file:
        yield file


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
