"""Times a step against itself, alone and beside children that compile: what a crew does to what it times.

    python -m benchmarks.neighbours bert_base/16x128 --minutes 8 --out neighbours.jsonl

While one child is timed, the tuner stops the others (tuner/measuring/crew.py). Every other measurement here has three
such neighbours, which compile with cold caches all the time. Each is one fresh process that times the step twice, as
two arms. Called again with the same file it goes on; the figures are of all of it.
"""

import argparse
import math
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any, Final

from benchmarks import results_file
from benchmarks.cases import CASES
from benchmarks.results_file import Figure
from kitsune.device.backend import pick_device
from tuner.measuring.child_process import go_on
from tuner.measuring.crew import Children, Crew
from tuner.measuring.protocol import ArmSpec, Job, Limits
from tuner.records import Measurement
from tuner.statistics.block_statistics import log_ratios

SUITE: Final = "neighbours"
NEIGHBOURS: Final = 3
ROUNDS: Final = 10
APART: Final = 0.005  # from here on a difference would be worth a claim
#: Nothing of it is compiled, so that it is soon ready; on a GPU the one is bound by the host, the other by the GPU.
TIMED: Final = ({}, {"precision": "bf16", "capture": "step"})
COMPILED: Final = {"precision": "bf16", "compile": "default"}
SETTLE_S: Final = 15.0  # until the neighbours compile


class Measurer:
    """Measures alone, or beside neighbours that it keeps at work: after `settle_s`, where there were none before."""

    def __init__(self, crew: Crew, workload: str, device: str, settle_s: float = SETTLE_S) -> None:
        self._crew = crew
        self._settle_s = settle_s
        self._given = {"workload": workload, "device": device, "rounds": ROUNDS, "numerics": False}
        self._neighbours: set[int] = set()

    def measured(self, knobs: dict[str, Any], neighbours: int) -> Measurement | None:
        """One process that times these choices against themselves; None when it failed."""
        if not neighbours:
            self._crew.drop()
            self._neighbours.clear()
        elif not self._neighbours:
            self._refill(neighbours)
            time.sleep(self._settle_s)
        ticket = self._begin(ArmSpec(name="step", knobs=knobs), ArmSpec(name="again", knobs=knobs))
        while (done := self._crew.finished(go_on)).ticket != ticket:
            self._neighbours.discard(done.ticket)
            self._refill(neighbours)
        return done.outcome if isinstance(done.outcome, Measurement) else None

    def _begin(self, *arms: ArmSpec) -> int:
        return self._crew.begin(Job.model_validate({**self._given, "arms": arms}), Limits())

    def _refill(self, count: int) -> None:
        while len(self._neighbours) < count:
            self._neighbours.add(self._begin(ArmSpec(name="eager"), ArmSpec(name="neighbour", knobs=COMPILED)))


def line_of(knobs: dict[str, Any], neighbours: int, found: Measurement) -> dict[str, Any]:
    step, again = (arm.step_ms for arm in found.arms)
    causes = sorted({cause.seen for cause in found.causes})
    told = {"kind": "measurement", "suite": SUITE, "knobs": knobs, "neighbours": neighbours}
    return {**told, "step_ms": step, "again_ms": again, "dropped_rounds": found.dropped_rounds, "causes": causes}


def figures(lines: Sequence[dict[str, Any]]) -> Iterator[Figure]:
    for knobs in TIMED:
        name = ", ".join(f"{knob}={choice}" for knob, choice in knobs.items()) or "eager"
        of_step = [line for line in lines if line["knobs"] == knobs]
        alone, beside = ([line for line in of_step if bool(line["neighbours"]) is each] for each in (False, True))
        if not (alone and beside):
            continue
        for where, some in (("alone", alone), ("beside others", beside)):
            ratios = [median(log_ratios(line["step_ms"], line["again_ms"])) for line in some]
            apart = math.sqrt(fmean(ratio**2 for ratio in ratios))
            yield f"{name}, {where}: a step differs from itself by", 100 * apart, "%", len(some)
            far = sum(abs(ratio) > math.log1p(APART) for ratio in ratios)
            yield f"{name}, {where}: by more than 0.5 %", 100 * far / len(some), "%", len(some)
        slower = median([median(line["step_ms"]) for line in beside]) / median(
            [median(line["step_ms"]) for line in alone]
        )
        yield f"{name}: slower beside others by", 100 * (slower - 1), "%", len(of_step)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", help="a case of benchmarks.cases, or any workload that kitsune tune takes")
    parser.add_argument("--minutes", type=float, default=8.0, help="no measurement is begun after these")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    workload = CASES[given.case].spec if given.case in CASES else given.case
    device, end_s = str(pick_device()), time.monotonic() + 60 * given.minutes
    os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"  # the children inherit it: neighbours compile anew each time
    command = results_file.command_line()
    results_file.append(given.out, results_file.environment_line(command))
    steps = TIMED if device.startswith("cuda") else TIMED[:1]
    with Children(workload, device, spares=1) as crew:
        measurer = Measurer(crew, workload, device)
        number = len(results_file.lines_of(given.out, "measurement"))
        while time.monotonic() < end_s:
            # two measurements of each kind in a row, as neighbours need a while until they compile
            knobs, neighbours = steps[number % len(steps)], NEIGHBOURS * (number // (2 * len(steps)) % 2)
            found = measurer.measured(knobs, neighbours)
            number += 1
            if found is not None:
                results_file.append(given.out, line_of(knobs, neighbours, found))
    for figure in figures(results_file.lines_of(given.out, "measurement")):
        results_file.append(given.out, results_file.figure_line(SUITE, figure, command))
        print(figure, flush=True)


if __name__ == "__main__":
    main()
