"""Simulates confirmations under every noise model and counts what would have been claimed: no device is measured.

    python -m benchmarks.verdicts
    python -m benchmarks.verdicts --runs 200 --noise "iid 1 %"

Each confirmation is five processes of ten rounds, as `kitsune tune` makes them, or two of them with what an earlier
one found. For each noise: how often nothing is called faster, how often the interval holds the truth and the
prediction what one more process gives, how often a gain of so much is found, and how often it is called the same.
The exit code is 1 when a bound is broken by more than chance does.
"""

import argparse
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

from benchmarks import results_file
from benchmarks.results_file import Figure
from tests.unit.tuner.noise import MODELS, Noise, process, processes
from tuner.records import Verdict
from tuner.statistics.block_statistics import log_ratios
from tuner.statistics.process_statistics import PROCESSES, ROUNDS, ConfirmedComparison, Prior, confirm

GAINS = (1.005, 1.01, 1.02, 1.05, 1.3)
#: What must hold, in %, by the end of a case: (is it a most?, bound).
BOUNDS = {
    "false faster": (True, 1.0),
    "interval holds": (False, 93.0),
    "prediction holds": (False, 90.0),
    "a gain of 30 % called the same": (True, 0.0),
}
Confirm = Callable[[Noise, random.Random, float], ConfirmedComparison]


def by_five(noise: Noise, rng: random.Random, speedup: float) -> ConfirmedComparison:
    return confirm(*processes(noise, rng, speedup, ROUNDS, PROCESSES))


def by_two_and_a_proof(noise: Noise, rng: random.Random, speedup: float) -> ConfirmedComparison:
    """The earlier proof was of an equal speedup on an equal machine; its processes are others."""
    known = by_five(noise, rng, speedup).spread
    return confirm(*processes(noise, rng, speedup, ROUNDS, 2), Prior(known.deviation, known.degrees, "eager"))


MEANS: dict[str, Confirm] = {"five processes": by_five, "two and an earlier proof": by_two_and_a_proof}


def figures(name: str, means: str, runs: int) -> Iterator[Figure]:
    """Of one noise model, in %."""
    noise, confirmed, case = MODELS[name], MEANS[means], f"{name}, {means}"
    rng = random.Random(f"{name} {means}")
    false = held = foreseen = 0
    for _ in range(runs):
        found = confirmed(noise, rng, 1.0)
        assert found.prediction is not None
        false += found.comparison.verdict is Verdict.FASTER
        held += found.comparison.speedup.low <= 1 <= found.comparison.speedup.high
        again = math.exp(median(log_ratios(*process(noise, rng, 1.0, ROUNDS))))
        foreseen += found.prediction.low <= again <= found.prediction.high
    yield f"{case}: false faster", 100 * false / runs, "%", runs
    yield f"{case}: interval holds", 100 * held / runs, "%", runs
    yield f"{case}: prediction holds", 100 * foreseen / runs, "%", runs
    for gain in GAINS:
        said = [confirmed(noise, rng, gain).comparison.verdict for _ in range(runs)]
        told = f"{case}: a gain of {100 * (gain - 1):g} %"
        yield f"{told} found", 100 * said.count(Verdict.FASTER) / runs, "%", runs
        yield f"{told} called the same", 100 * said.count(Verdict.SAME) / runs, "%", runs


def is_broken(figure: Figure) -> bool:
    """By more than chance does once in a thousand times."""
    case, value, _, runs = figure
    is_most, bound = BOUNDS.get(case.rpartition(": ")[2], (True, 100.0))
    share = bound / 100
    slack = 100 * 3.1 * math.sqrt(share * (1 - share) / runs)
    return value > bound + slack if is_most else value < bound - slack


def bound_of(figure: Figure) -> float | None:
    """Of what should never be and never was (the rule of three), in %."""
    case, value, _, runs = figure
    should_not_be = case.endswith(("false faster", "called the same"))
    return 100 * 3 / runs if should_not_be and value == 0 else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=2000, help="confirmations a row")
    parser.add_argument("--noise", action="append", choices=list(MODELS), help="only this model")
    parser.add_argument("--out", type=Path, help="the file of the results; a new one of this day and machine otherwise")
    asked = parser.parse_args()
    found = [figure for name in asked.noise or MODELS for means in MEANS for figure in figures(name, means, asked.runs)]
    results_file.write_figures(asked.out or results_file.free_path("verdicts"), "verdicts", found, bound_of)
    return int(any(map(is_broken, found)))


if __name__ == "__main__":
    raise SystemExit(main())
