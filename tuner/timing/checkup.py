"""`kitsune doctor --measure`: tests whether verdicts on this machine are right. Does not import torch.

It compares a step with itself and with known slowdowns of it. Rounds, watches and decision are those of a confirmation,
in fresh processes.
"""

import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from pydantic import Field, ValidationError

from kitsune.base.base_record import Record
from kitsune.base.compile_cache import compiled_folder
from kitsune.cli import output
from kitsune.cli.exit_codes import ExitCode
from kitsune.errors import MeasureError, UnfitError
from kitsune.plan import Environment, Interval
from tuner.measuring.bytecode import bytecode_variables
from tuner.measuring.protocol import one_line
from tuner.records import Measurement, Verdict
from tuner.statistics.block_statistics import SAME_WITHIN, THRESHOLD
from tuner.statistics.plan_evidence import CERTAIN, judged, too_noisy, undisturbed
from tuner.statistics.process_statistics import PROCESSES, ROUNDS
from tuner.statistics.student_t import quantile

TIMEOUT_S: Final = 180.0
USUAL: Final = "about a minute, on a busy machine longer"
STEP: Final = "step"
#: Name of an arm -> how much longer its step takes; 0.01 is 1 %.
PLANTED: Final = {"again": 0.0, "1 % slower": 0.01, "3 % slower": 0.03}

Measure = Callable[[str | None, int], Measurement]


class Claim(Record):
    """The verdict on an arm that is slower than the step by `planted`; 0.01 is 1 %."""

    planted: float = Field(ge=0)
    verdict: Verdict
    speedup: Interval
    prediction: Interval
    process_spread: float = Field(description="standard deviation of ln(speedup) between processes")
    note: str = ""

    @property
    def is_right(self) -> bool:
        """A planted slowdown must be claimed as one; where nothing is planted, no difference may be claimed."""
        return self.verdict is Verdict.SLOWER if self.planted else self.verdict not in CERTAIN

    @property
    def is_wrong(self) -> bool:
        """Whether the claim is false, not only missing. SAME is true up to a slowdown of 1 %."""
        is_same = self.verdict is Verdict.SAME and self.planted > SAME_WITHIN
        return is_same or (self.verdict in CERTAIN and not self.is_right)


class Checkup(Record):
    """The claims made on this machine, and the smallest gain that can be detected here."""

    environment: Environment
    processes: int
    rounds: int
    took_s: float
    smallest_gain: float = Field(description="about; 0.01 is 1 %")
    claims: tuple[Claim, ...]
    notes: tuple[str, ...]


def tell(device: str | None, *, as_json: bool) -> int:
    """Measures, prints, and returns the exit code. Raises like `told`."""
    output.note(f"Timing a step with slowdowns planted in {PROCESSES} fresh processes: {USUAL} ...")
    found = checkup(device)
    if as_json:
        output.emit(found.model_dump(mode="json"))
    else:
        for part in checkup_screen(found):
            output.stdout().print(part, soft_wrap=isinstance(part, str))
    return ExitCode.UNFIT if any(claim.is_wrong for claim in found.claims) else ExitCode.OK


def measure(device: str | None, seed: int) -> Measurement:
    """Measures in one fresh process. Raises like `told`."""
    return told(started(device, seed))


def started(device: str | None, seed: int) -> subprocess.Popen[str]:
    """Starts a process that imports torch and then waits, without using the device, until `told` lets it measure."""
    command = [sys.executable, "-P", "-m", "tuner.timing.planted_slowdown", device or "", str(seed)]
    environment = {**os.environ, **bytecode_variables(compiled_folder(), is_confined=False)}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment)


def told(process: subprocess.Popen[str]) -> Measurement:
    """Lets a started process measure, and returns the result.

    Raises UnfitError when it fails or takes longer than TIMEOUT_S, MeasureError when its answer is invalid.
    """
    with process:
        try:
            out, err = process.communicate("\n", TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            process.kill()
            raise UnfitError(f"a measuring process took longer than {TIMEOUT_S:g} s; stop other programs") from error
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        last = (err.strip().splitlines() or ["no message"])[-1]
        raise UnfitError(f"a measuring process ended with code {process.returncode}: {one_line(last)}")
    try:
        return Measurement.model_validate_json(out)
    except ValidationError as error:
        raise MeasureError("the answer of a measuring process cannot be read; run it again") from error


def checkup(device: str | None, measure: Measure = measure) -> Checkup:
    """Runs one confirmation, in PROCESSES processes. Raises like `told`."""
    begin_s = time.monotonic()
    processes = [measure(device, seed) for seed in range(PROCESSES)]
    claims = tuple(claims_of(processes))
    return Checkup(
        environment=processes[0].environment,
        processes=len(processes),
        rounds=ROUNDS,
        took_s=time.monotonic() - begin_s,
        smallest_gain=smallest_gain(max(claim.process_spread for claim in claims), len(processes)),
        claims=claims,
        notes=tuple(dict.fromkeys(note for found in processes for note in found.notes)),
    )


def claims_of(processes: Sequence[Measurement]) -> Iterator[Claim]:
    """One claim for each of PLANTED."""
    used = undisturbed(processes)
    for name, planted in PLANTED.items():
        found, noise = judged(used, STEP, name)
        assert found.prediction is not None
        yield Claim(
            planted=planted,
            verdict=found.comparison.verdict,
            speedup=found.comparison.speedup,
            prediction=found.prediction,
            process_spread=found.spread.deviation,
            note=too_noisy(noise, used) if noise else "",
        )


def smallest_gain(deviation: float, processes: int) -> float:
    """The smallest gain whose interval lies above the threshold and whose p-value is below 0.01.

    `deviation`: standard deviation of ln(speedup) between processes.
    """
    error, degrees = deviation / math.sqrt(processes), processes - 1
    return max(THRESHOLD + quantile(degrees) * error, quantile(degrees, 0.99) * error)


def checkup_screen(found: Checkup) -> list[Any]:
    """What to print, as arguments of `Console.print`."""
    columns = ("planted", "claimed", "", "times as fast", "95 %", "in one more process")
    how = f"{found.processes} processes of {found.rounds} rounds, {found.took_s:.0f} s"
    apart = max(claim.process_spread for claim in found.claims)
    parts: list[Any] = [
        f"{output.machine(found.environment)}: {how}.",
        output.table(*columns, rows=map(_row, found.claims)),
        f"Processes lie {apart:.2%} apart (standard deviation): detects gains from about {found.smallest_gain:.1%}.",
    ]
    parts += [f"Too noisy to tell: {note}." for note in dict.fromkeys(claim.note for claim in found.claims) if note]
    return [*parts, *found.notes]


def _row(claim: Claim) -> tuple[str, ...]:
    return (
        f"{claim.planted:.0%} slower" if claim.planted else "nothing",
        claim.verdict.value.replace("_", " "),
        "right" if claim.is_right else "WRONG" if claim.is_wrong else "not found",
        f"{claim.speedup.median:.4f}",
        f"{claim.speedup.low:.4f} to {claim.speedup.high:.4f}",
        f"{claim.prediction.low:.4f} to {claim.prediction.high:.4f}",
    )
