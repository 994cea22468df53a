"""Suite profiled: what a step takes before and after torch.profiler has looked at one kernel in its process.

    python -m benchmarks.profiled --case bert_base/16x128
    python -m benchmarks.profiled --case bert_base/16x128 --teardown --looks 3

The arms are launched by the host but for the `graph`. With `--teardown` Kineto is told to finalize CUPTI when a look
has ended (TEARDOWN_CUPTI=1); torch may see no kernels in the next look then, which is told in the notes.
"""

import argparse
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from benchmarks.cases import CASES
from benchmarks.training_step import DEVICE, Arm, interleave, race, step_of, write
from kitsune import Plan
from kitsune.errors import CaptureError
from kitsune.launches.execution.kernel_trace import kernels_of

ARMS = ("eager_bf16", "compile", "reduce_overhead", "graph")


def look() -> str:
    """What was seen."""
    ones = torch.ones(1024, device=DEVICE)
    try:
        return f"{kernels_of(lambda: ones + 1).total()} kernels seen"
    except CaptureError as error:
        return str(error)


def timed(arms: Sequence[Arm], when: str, seen: str, rounds: int) -> list[Arm]:
    """The same arms timed once more, under another name."""
    again = [replace(arm, name=f"{arm.name}, {when}", notes=seen, step_ms=[]) for arm in arms]
    interleave(again, rounds)
    return again


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", required=True, choices=CASES)
    parser.add_argument("--arms", nargs="*", default=ARMS, choices=ARMS)
    parser.add_argument("--looks", type=int, default=1, help="one after the other")
    parser.add_argument("--teardown", action="store_true")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", type=Path, help="result file to add to; a new one under benchmarks/results otherwise")
    given = parser.parse_args()
    case = CASES[given.case]
    torch.cuda.set_device(DEVICE)
    if given.teardown:
        os.environ["TEARDOWN_CUPTI"] = "1"
    arms = race({name: partial(step_of, name, case, Plan()) for name in given.arms}, given.rounds)
    found = [*arms, *timed(arms, "once more", "", given.rounds)]
    seen = "; ".join(look() for _ in range(given.looks))
    found += timed(arms, "after a look", seen, given.rounds)
    write("profiled", case, found, "CUPTI is finalized" if given.teardown else "", given.out)


if __name__ == "__main__":
    main()
