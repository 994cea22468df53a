"""Suite budget: the time of each class of kernels in one step, against its floor on this GPU, in us a step.

    python -m benchmarks.budget gpt2_small/8x512 resnet50/64
    python -m benchmarks.budget gpt2_small/8x512 --plan plan.json --kernels 40

By default the step is the strongest that plain torch has in one graph: bf16 autocast, compiled, one fused update. Each
launch is timed alone, so that nothing is hidden behind anything else. `floor`: see `kitsune explain`. `--kernels`: also
that many kernels by name, those that take most of the step.
"""

import argparse
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from benchmarks import results_file
from benchmarks.cases import CASES, Case
from benchmarks.results_file import Figure
from benchmarks.training_step import DEVICE, workload_of
from kitsune.device.backend import make_current
from kitsune.knobs import Choice
from kitsune.plan import Plan
from kitsune.timeline import Timeline
from tuner.child.stream_forecast import rehearse

SUITE: Final = "budget"
STOCK: Final[Mapping[str, Choice]] = {"precision": "bf16", "compile": "default", "update": "fused", "capture": "step"}


def stock_of(case: Case) -> dict[str, Choice]:
    return {**STOCK, "layout": "channels_last"} if case.channels_last else dict(STOCK)


def figures(case: Case, knobs: Mapping[str, Choice], kernels: int) -> Iterator[Figure]:
    found = rehearse(workload_of(case), knobs, 1)
    for each in found.classes:
        yield f"{case.name}: {each.name}", each.total_us, "us", each.launches
        yield f"{case.name}: {each.name}, floor", each.floor_us, "us", each.launches
    launches = sum(each.launches for each in found.classes)
    yield f"{case.name}: sum", sum(each.total_us for each in found.classes), "us", launches
    for name, total_us, count in longest_kernels(found.finest.timeline(), kernels):
        yield f"{case.name}: kernel {name}", total_us, "us", count
    for knob, reason in found.report.declined.items():
        print(f"{case.name}: declined {knob}: {reason}")


def longest_kernels(timeline: Timeline, most: int) -> list[tuple[str, float, int]]:
    """(name, us of all launches of this name, how many) of the kernels that take most time."""
    times_us: dict[str, list[float]] = defaultdict(list)
    for launch in timeline.launches:
        times_us[timeline.names[launch.name]].append(launch.end_us - launch.begin_us)
    longest = sorted(times_us.items(), key=lambda item: -sum(item[1]))[:most]
    return [(name, sum(own), len(own)) for name, own in longest]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="+", choices=CASES, metavar="CASE")
    parser.add_argument("--plan", type=Path, help="a plan that kitsune tune has written")
    parser.add_argument("--kernels", type=int, default=0, metavar="N", help="also the N kernels that take longest")
    parser.add_argument("--out", type=Path, help="result file to write; a new one under benchmarks/results otherwise")
    arguments = parser.parse_args()
    make_current(DEVICE)
    plan = Plan.load(arguments.plan).knobs if arguments.plan else None
    cases = [CASES[name] for name in arguments.cases]
    found = (
        figure
        for case in cases
        for figure in figures(case, stock_of(case) if plan is None else plan, arguments.kernels)
    )
    results_file.write_figures(arguments.out or results_file.free_path(SUITE), SUITE, found)


if __name__ == "__main__":
    main()
