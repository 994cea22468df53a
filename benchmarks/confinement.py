"""What it costs to keep a measuring process from the network: to start it, and at every call and step.

    python -m benchmarks.confinement --rounds 30 [--device cuda:0]

Processes without confinement, in a namespace of their own, and with a filter, one after the other in random order. Each
starts, calls the kernel a hundred thousand times, and trains a small MLP. Means that do not work on the machine are
told of on stderr and left out. One line of samples a case and means.
"""

import argparse
import json
import random
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from statistics import median

from benchmarks import results_file
from tuner.sandbox.confinement import Confinement, Means, problem_of

SUITE = "confinement"
CALLS = 100_000
WORK = f"""
import json, os, sys, time
import torch
begin = time.perf_counter()
for _ in range({CALLS}):
    os.getppid()
calls_ns = (time.perf_counter() - begin) / {CALLS} * 1e9
device = torch.device(sys.argv[1])
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
x, y = torch.randn(64, 64, device=device), torch.randint(10, (64,), device=device)
def steps(count):
    for _ in range(count):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    return loss.item()
steps(50)
begin = time.perf_counter()
steps(200)
print(json.dumps([calls_ns, (time.perf_counter() - begin) / 200 * 1e3]))
"""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--device", default="cpu")
    asked = parser.parse_args(arguments)
    path = results_file.free_path(SUITE)
    command = results_file.command_line()
    results_file.append(path, results_file.environment_line(command))
    for (case, unit, means), samples in sampled(asked.rounds, asked.device).items():
        line = {"kind": "samples", "suite": SUITE, "case": case, "arm": means, "unit": unit, "samples": samples}
        results_file.append(path, {**line, "n": len(samples), "command": command})
        print(f"{case} {means}: median {median(samples):.4g} {unit} of {len(samples)}")


def sampled(rounds: int, device: str) -> dict[tuple[str, str, str], list[float]]:
    """(case, unit, means) -> a value for each round."""
    arms = [Confinement(Means.NOTHING)]
    for means in (Means.NAMESPACES, Means.FILTER):
        begin = time.perf_counter()
        problem = problem_of(Confinement(means), device)
        if problem is None:
            arms.append(Confinement(means))
            print(f"{means}: its self-test took {time.perf_counter() - begin:.2f} s", file=sys.stderr)
        else:
            print(f"{means} is left out: {problem}", file=sys.stderr)
    found: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for _ in range(rounds):
        for arm in random.sample(arms, len(arms)):
            found["start", "ms", arm.means].append(started_ms(arm))
            calls_ns, step_ms = worked(arm, device)
            found["call", "ns", arm.means].append(calls_ns)
            found["step", "ms", arm.means].append(step_ms)
    return found


def started_ms(arm: Confinement) -> float:
    """Until a Python that does nothing has ended."""
    begin = time.perf_counter()
    subprocess.run(arm.command([sys.executable, "-I", "-S", "-c", "pass"]), check=True)
    return (time.perf_counter() - begin) * 1e3


def worked(arm: Confinement, device: str) -> tuple[float, float]:
    """(ns a call of the kernel, ms a training step) in a process of its own."""
    told = subprocess.run(arm.command([sys.executable, "-c", WORK, device]), check=True, capture_output=True, text=True)
    calls_ns, step_ms = json.loads(told.stdout)
    return calls_ns, step_ms


if __name__ == "__main__":
    main()
