"""What a failure says of the machine: words of a process that died in, whether the GPU still works out. No torch.

A sticky CUDA error ends the process that met it and nothing else, unless the GPU itself is broken: a process that only
asks the driver to write memory and read it back tells these apart.
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

from tuner.measuring import fault_injection
from tuner.records import Failure, FailureKind, Phase, Trial
from tuner.sandbox.confinement import SELF_TEST, SELF_TEST_S, is_harmless

#: So many workers in a row vanished before they stored a trial of a run: what was under way is given up as a trial.
DEATHS_OF_A_TRIAL: Final = 3
#: What was under way when a worker vanished may be why it did.
GIVEN_UP: Final = Failure(
    kind=FailureKind.CRASHED, phase=Phase.BUILD, reason="the worker vanished while this was measured"
)


KILL_S: Final = 5.0
#: Nothing is left to be tried where so many trials in a row found no space on the disk.
STARVED: Final = 3
_NO_SPACE: Final = re.compile(r"no space left|disk quota exceeded|no usable temporary directory", re.IGNORECASE)


class Blame(StrEnum):
    """Whom a failure points at."""

    CANDIDATE = "candidate"  #: the next process begins afresh
    CONTEXT = "context"  #: a sticky error: the process is lost, and perhaps the GPU
    GPU = "gpu"  #: broken for every process, until somebody resets it


#: The words of CUDA's runtime and driver, of NVML and of the kernel's log that tell of each; the worst first.
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
    """By the words of a failure or a crash."""
    for found, signs in SIGNS.items():
        if any(re.search(sign, text, re.IGNORECASE) for sign in signs):
            return found
    return Blame.CANDIDATE


def is_starved(trials: Sequence[Trial]) -> bool:
    """Whether the last ones failed since a disk is full: each takes no time, so a budget of it would hold thousands."""
    last = trials[-STARVED:]
    return len(last) == STARVED and all(trial.failure and _NO_SPACE.search(trial.failure.reason) for trial in last)


@dataclass(frozen=True, slots=True)
class Fitness:
    """Of one device. `command` asks whether it works and is given its name."""

    device: str
    command: Sequence[str] = (sys.executable, "-I", str(SELF_TEST))
    patience_s: float = SELF_TEST_S

    def why_unfit(self, reason: str) -> str | None:
        """After a failure with this reason: why no run is to be measured on the device, None where nothing is wrong."""
        found = blame(reason)
        if not self.device.startswith("cuda") or found is Blame.CANDIDATE:
            return None
        trouble = f"it answered: {reason:.200}" if found is Blame.GPU else self.trouble()
        if trouble is None:
            return None
        return f"{self.device} is quarantined: {trouble}. Look at `nvidia-smi -q` and at the kernel's log, and reset it"

    def trouble(self) -> str | None:
        """Why the device does not work, asked in a process of its own that is left alone when it hangs."""
        if fault_injection.struck("gpu-sick"):
            return "its self-test fails: planted"
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
            return None  # which says nothing of the device
        try:
            answer, _ = process.communicate(timeout=self.patience_s)
        except subprocess.TimeoutExpired:
            _abandon(process)
            return f"its self-test took longer than {self.patience_s:g} s"
        return _trouble(process.returncode, answer)


def _abandon(process: subprocess.Popen[bytes]) -> None:
    """Killed, but not waited for without end: one that hangs in the driver does not die."""
    process.kill()
    assert process.stdout is not None
    process.stdout.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(KILL_S)


def _trouble(code: int, answer: bytes) -> str | None:
    try:
        broken = json.loads(answer)["broken"] if code == 0 else [f"it ended with {code}"]
    except (ValueError, LookupError, TypeError):
        broken = ["it said nothing that can be read"]
    return f"its self-test fails: {'; '.join(map(str, broken))}" if broken else None
