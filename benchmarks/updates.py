"""Suite updates: the same plan with every implementation of the optimizer's update, side by side in one process.

    python -m benchmarks.updates --case resnet18/128

bf16, Inductor and one CUDA graph for the whole step, on one stream (`fused`) and on four (`fused on 4`).
"""

import argparse
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch

from benchmarks.cases import CASES, Case
from benchmarks.training_step import DEVICE, Build, kitsune_step, race, write
from kitsune import Plan

UPDATES = ("foreach", "fused", "kitsune")
SEVERAL = 4


def builds_of(case: Case) -> Mapping[str, Build]:
    base = partial(Plan.by_hand, precision="bf16", compile="default", capture="step")
    alone = {update: base(update=update) for update in UPDATES}
    beside = {f"{update} on {SEVERAL}": base(update=update, streams=SEVERAL) for update in UPDATES}
    return {name: partial(kitsune_step, case, plan) for name, plan in (alone | beside).items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", required=True, choices=CASES)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, help="result file to add to; a new one under benchmarks/results otherwise")
    arguments = parser.parse_args()
    case = CASES[arguments.case]
    torch.cuda.set_device(DEVICE)
    arms = race(builds_of(case), arguments.rounds)
    write("updates", case, arms, "", arguments.out)


if __name__ == "__main__":
    main()
