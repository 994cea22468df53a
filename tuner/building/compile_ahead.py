"""Compiles the timed code in a second process while the numerics gate runs with dropout switched off.

Switching off dropout changes the code, so a candidate with dropout is compiled twice. One after the other, the two
compilations of GoogLeNet take 130 and 105 s on an H100, those of BERT-base 40 s each. After compiling ahead, the second
one is found in torch's caches.
"""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Final

from tuner.building.arms import LiveArm, prepare
from tuner.measuring.compile_lock import is_due, sharing
from tuner.measuring.protocol import Job
from tuner.records import Phase
from tuner.sandbox.confinement import leave_no_core
from tuner.sandbox.lockdown import go_first

#: In the process group of its parent, so that both are stopped, resumed and killed together.
START: Final = (
    "import sys; from tuner.sandbox.lockdown import die_with; die_with(int(sys.argv[1]));"
    "from tuner.building.compile_ahead import main; main()"
)


@contextlib.contextmanager
def compiled_ahead(job: Job) -> Iterator[None]:
    """Compiles the job's candidate in a second process while the block runs, and waits for that process at the end.

    It is killed when the block raises. No process is started if the job does not ask for it, or if another child has
    compiled the same code or is compiling it.
    """
    if not (job.ahead and is_due(job.arms[-1].knobs, randomness=True)):
        yield
        return
    with _started(job) as process:
        try:
            yield
            process.wait()
        finally:
            process.kill()


def _started(job: Job) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", START, str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdin is not None
    with process.stdin as stdin, contextlib.suppress(BrokenPipeError):
        stdin.write(job.model_dump_json().encode() + b"\n")
    return process


def main() -> None:
    """The second process: runs one step. An error ends it; the first process will then hit the same error itself."""
    go_first()
    leave_no_core()
    job = Job.model_validate_json(sys.stdin.buffer.readline())
    prepare(job)
    with sharing(job.folder, lambda: Phase.NUMERICS):
        arm = LiveArm(job, job.arms[-1])
        arm(*arm.workload.batch)
