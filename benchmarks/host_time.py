"""Times the host in a call of a step of ours, the device idle before each; raw us of the calls to a result file.

python -m benchmarks.host_time --case mlp/64 --plan plan.json
"""

import argparse
import statistics
import time
from pathlib import Path

import torch

from benchmarks import results_file
from benchmarks.cases import CASES
from benchmarks.rivals import Step
from benchmarks.training_step import DEVICE, OURS, step_of
from kitsune.plan import Plan

SETTLING_STEPS = 50
CALLS = 3000
KEPT = 50
"""One sample of so many is written, the figures are of all."""


def host_us(step: Step) -> list[float]:
    """Of each of CALLS calls, in order."""
    for _ in range(SETTLING_STEPS):
        step()
    samples_us = []
    for _ in range(CALLS):
        torch.cuda.synchronize()
        begin_ns = time.perf_counter_ns()
        step()
        samples_us.append((time.perf_counter_ns() - begin_ns) / 1000)
    return samples_us


def line(case: str, arm: str, samples_us: list[float]) -> dict[str, object]:
    parts = statistics.quantiles(samples_us, n=20)
    median_us = statistics.median(samples_us)
    notes = f"of all {CALLS} calls the median {median_us:.2f} us, 5 % below {parts[0]:.2f}, 5 % above {parts[-1]:.2f}"
    print(f"{case:20} {arm:16} {notes}")
    return {"kind": "case", "suite": "commits", "case": case, "arm": arm, "us": samples_us[::KEPT], "notes": notes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", required=True, choices=CASES)
    parser.add_argument("--plan", type=Path, required=True, help="the plan that kitsune tune has written")
    parser.add_argument("--out", type=Path, help="result file to add to; a new one under benchmarks/results otherwise")
    arguments = parser.parse_args()
    torch.cuda.set_device(DEVICE)
    path = arguments.out or results_file.free_path("commits")
    if not path.exists():
        results_file.append(path, results_file.environment_line(results_file.command_line()))
    for arm in OURS:
        step, _ = step_of(arm, CASES[arguments.case], Plan.load(arguments.plan))
        results_file.append(path, line(arguments.case, arm, host_us(step)))


if __name__ == "__main__":
    main()
