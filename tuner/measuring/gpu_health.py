"""Decides after a failure whether the candidate, the CUDA context or the GPU itself is to blame. Does not import torch.

A sticky CUDA error ends only the process that hit it, unless the GPU itself is broken. A self-test process, which
writes GPU memory and reads it back through the driver, tells the two apart.
"""

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from tuner import fault_injection
from tuner.records import Failure, FailureKind, Phase, Trial
from tuner.sandbox.confinement import SELF_TEST, SELF_TEST_S, is_harmless

#: After so many workers in a row died before they stored a trial of a run, the trial in progress is given up.
DEATHS_OF_A_TRIAL: Final = 3
#: The result of such a trial: what was measured when the worker died may be the cause.
GIVEN_UP: Final = Failure(
    kind=FailureKind.CRASHED, phase=Phase.BUILD, reason="the worker vanished while this was measured"
)


KILL_S: Final = 5.0
#: The search ends after so many trials in a row that failed for want of disk space.
STARVED: Final = 3
_NO_SPACE: Final = re.compile(r"no space left|disk quota exceeded|no usable temporary directory", re.IGNORECASE)


class Blame(StrEnum):
    """What a failure is attributed to."""

    CANDIDATE = "candidate"  #: the next process is not affected
    CONTEXT = "context"  #: a sticky error: the process is lost, and perhaps the GPU
    GPU = "gpu"  #: broken for every process, until it is reset


#: Patterns in messages of CUDA's runtime and driver, NVML and the kernel log; the most severe first.
SIGNS: Final[Mapping[Blame, Sequence[str]]] = {
    Blame.GPU: (
        r"uncorrectable (NVLink|ECC)",
        r"double.?bit ECC",
        r"cudaErrorECCUncorrectable",
        r"GPU is lost",
        r"has fallen off the bus",
        r"GPU requires reset",
        r"cudaErrorDevicesUnavailable",
        r"CUDA-capable device\(s\) is/are busy or unavailable",
        r"hardware stack error",
        r"cannot be killed: the GPU hangs",
        r"NVRM: Xid .*: (48|63|64|79|92|94|95|119|120)\b",
    ),
    Blame.CONTEXT: (
        r"device-side assert",
        r"illegal (memory access|address|instruction)",
        r"misaligned address",
        r"unspecified launch failure",
        r"invalid program counter",
        r"operation not supported on global/shared address space",
        r"no CUDA-capable device",
        r"driver shutting down",
        r"CUDA error: unknown error",
        r"cudaError(Assert|IllegalAddress|LaunchFailure|IllegalInstruction|MisalignedAddress|InvalidPc|NoDevice)",
        r"CUDA_ERROR_(ASSERT|ILLEGAL_ADDRESS|LAUNCH_FAILED|ILLEGAL_INSTRUCTION|MISALIGNED_ADDRESS|NO_DEVICE)",
    ),
}


def blame(text: str) -> Blame:
    """Classifies a failure or crash by its message."""
    for found, signs in SIGNS.items():
        if any(re.search(sign, text, re.IGNORECASE) for sign in signs):
            return found
    return Blame.CANDIDATE


def is_starved(trials: Sequence[Trial]) -> bool:
    """Whether the last STARVED trials failed for a full disk. They take no time, so a time budget does not end them."""
    last = trials[-STARVED:]
    return len(last) == STARVED and all(trial.failure and _NO_SPACE.search(trial.failure.reason) for trial in last)


@dataclass(frozen=True, slots=True)
class Fitness:
    """Tests whether a device works. `command` is the self-test; the device's name is appended to it."""

    device: str
    command: Sequence[str] = (sys.executable, "-I", str(SELF_TEST))
    patience_s: float = SELF_TEST_S

    def why_unfit(self, reason: str) -> str | None:
        """After a failure with this reason: why the device must not be used any more, or None where it works."""
        found = blame(reason)
        if not self.device.startswith("cuda") or found is Blame.CANDIDATE:
            return None
        trouble = f"it answered: {reason:.200}" if found is Blame.GPU else self.trouble()
        if trouble is None:
            return None
        return f"{self.device} is quarantined: {trouble}. Look at `nvidia-smi -q` and at the kernel's log, and reset it"

    def trouble(self) -> str | None:
        """Runs the self-test in a process of its own, which is abandoned if it hangs; why the device fails, or None."""
        if fault_injection.struck("gpu-sick"):
            return "its self-test fails: planted fault"
        environment = {name: value for name, value in os.environ.items() if is_harmless(name)}
        try:
            process = subprocess.Popen(
                [*self.command, self.device],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,
            )
        except OSError:
            return None  # the self-test could not start, which says nothing about the device
        try:
            answer, _ = process.communicate(timeout=self.patience_s)
        except subprocess.TimeoutExpired:
            _abandon(process)
            return f"its self-test took longer than {self.patience_s:g} s"
        return _trouble(process.returncode, answer)


def _abandon(process: subprocess.Popen[bytes]) -> None:
    """Kills the process and waits at most KILL_S: one that hangs in the driver does not die."""
    process.kill()
    assert process.stdout is not None
    process.stdout.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(KILL_S)


def _trouble(code: int, answer: bytes) -> str | None:
    try:
        broken = json.loads(answer)["broken"] if code == 0 else [f"it ended with {code}"]
    except (ValueError, LookupError, TypeError):
        broken = ["its answer cannot be read"]
    return f"its self-test fails: {'; '.join(map(str, broken))}" if broken else None
