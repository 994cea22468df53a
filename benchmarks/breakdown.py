"""Suite breakdown: what each optimisation adds to those before it; raw ms of every block to a result file.

    python -m benchmarks.breakdown --case resnet18/128 --out results.jsonl

The arms are plans written by hand, each with one knob more than the one before, all interleaved in one process. Layout
and update stay as given: this is no tuned plan.
"""

import argparse
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch

from benchmarks.cases import CASES, Case
from benchmarks.rivals import Step, eager_step
from benchmarks.training_step import DEVICE, Build, kitsune_step, race, workload_of, write
from kitsune import Plan
from kitsune.knobs import Choice

BREAKDOWN_CASES = ("resnet18/128", "bert_base/2x128", "bert_base/16x128", "gpt2_small/8x512")
BASELINE = "baseline"
#: Only what is captured can be put on several streams, and only what is on several streams has a pool.
ORDER = "graphs come before streams and pool, which cannot be without them"
#: The limit is beyond what these steps need: what is measured is a pool that holds no launch back.
ADDED: Mapping[str, Mapping[str, Choice]] = {
    "+ graphs": {"capture": "step"},
    "+ streams": {"streams": 4},
    "+ pool": {"pool_bytes": 2**34},
    "+ fusion": {"compile": "default"},
    "+ kernels": {"fusion": "kitsune"},
    "+ amp": {"precision": "bf16"},
}


def plans() -> dict[str, Plan]:
    """Arm -> plan, each with the knobs of all before it."""
    found: dict[str, Plan] = {}
    knobs: dict[str, Choice] = {}
    for arm, added in ADDED.items():
        knobs |= added
        found[arm] = Plan.by_hand(**knobs)
    return found


def baseline_step(case: Case) -> tuple[Step, type[str]]:
    return eager_step(workload_of(case), bf16=False), str


def builds_of(case: Case) -> dict[str, Build]:
    return {BASELINE: partial(baseline_step, case)} | {
        arm: partial(kitsune_step, case, plan) for arm, plan in plans().items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", required=True, choices=BREAKDOWN_CASES)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, help="result file to add to; a new one under benchmarks/results otherwise")
    arguments = parser.parse_args()
    case = CASES[arguments.case]
    torch.cuda.set_device(DEVICE)
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arms = race(builds_of(case), arguments.rounds)
    write("breakdown", case, arms, ORDER, arguments.out)


if __name__ == "__main__":
    main()
