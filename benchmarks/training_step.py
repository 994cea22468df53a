"""Suite training_step: one case a process, all arms interleaved; raw ms of every block to a result file.

    python -m benchmarks.training_step --case resnet18/128 --plan plan.json --out results.jsonl

Arms as in benchmarks/README.md. Every arm has its own model, drawn from the same seed. Those of Kitsune are planned by
a process before: torch.profiler, which times launches where they are not known, slows down what the host launches in
the rest of its process, the rivals too (docs/decisions/0091).
"""

import argparse
import gc
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
from torch.autograd.profiler import profile

from benchmarks import results_file
from benchmarks.cases import CASES, Case
from benchmarks.rivals import COMPILED, Step, at_its_best, compiled_step, eager_step, graphed
from kitsune import KitsuneOptimizer, Plan, TrainStep, Workload
from kitsune.device.backend import graph_pool_bytes
from kitsune.workload import call_model, loss_of
from tuner.workloads.loader import load_workload

Build = Callable[[], tuple[Step, Callable[[], str]]]

OURS = ("kitsune_dropin", "kitsune")
ARMS = ("eager_fp32", "eager_bf16", *COMPILED, "graph", *OURS)
DEVICE = torch.device("cuda", 0)
SETTLING_STEPS = 8
SECOND_OF_A_POOL = "max_autotune"
BLOCK_MS = 60.0


@dataclass
class Arm:
    name: str
    step: Step
    first_step_s: float
    peak_bytes: int | None
    notes: str = ""
    steps_per_block: int = 1
    step_ms: list[float] = field(default_factory=list)


def workload_of(case: Case) -> Workload:
    return load_workload(case.spec, str(DEVICE), 0)


def kitsune_step(case: Case, plan: Plan) -> tuple[Step, Callable[[], str]]:
    workload = workload_of(case)
    step = TrainStep(workload.model, workload.loss_fn, workload.optimizer, plan)
    return lambda: step(*workload.batch), lambda: str(step.report)


def dropin_step(case: Case, plan: Plan) -> tuple[Step, Callable[[], str]]:
    """The user's own loop, line by line, with the optimizer wrapped."""
    workload = workload_of(case)
    optimizer = KitsuneOptimizer(workload.optimizer, plan=plan)
    model, loss_fn, (x, y) = workload.model, workload.loss_fn, workload.batch
    held: list[torch.Tensor] = []

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(call_model(model, x), loss_fn, y)
        loss.backward()
        optimizer.step()
        held[:] = [loss]  # as the variable of a loop holds it into the next iteration
        return loss.detach()

    return step, lambda: f"{optimizer.report}"


def step_of(name: str, case: Case, plan: Plan) -> tuple[Step, Callable[[], str]]:
    if name == "kitsune":
        return kitsune_step(case, plan)
    if name == "kitsune_dropin":
        return dropin_step(case, plan)
    if name in ("eager_fp32", "eager_bf16"):
        return eager_step(workload_of(case), bf16=name == "eager_bf16"), str
    best = at_its_best(workload_of(case), channels_last=case.channels_last, capturable=name == "graph")
    return (graphed(compiled_step(best, None)) if name == "graph" else compiled_step(best, COMPILED[name])), str


def prepare(name: str, build: Build) -> Arm:
    """Builds and settles an arm. Its peak: bytes in tensors at the worst moment of a settled step, its graphs' pools
    included, over what was there before it."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()  # each arm pays for its own
    torch.cuda.empty_cache()
    before_bytes = torch.cuda.memory_allocated() + graph_pool_bytes(DEVICE)
    begin = time.perf_counter()
    step, notes = build()
    step()
    torch.cuda.synchronize()
    first_step_s = time.perf_counter() - begin
    for _ in range(SETTLING_STEPS):
        step()
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    peak_bytes = torch.cuda.max_memory_allocated() + graph_pool_bytes(DEVICE) - before_bytes
    arm = Arm(name, step, first_step_s, peak_bytes, notes())
    if name == SECOND_OF_A_POOL:
        arm.peak_bytes, arm.notes = None, "memory not told apart: Inductor gives it the pool of reduce_overhead"
    arm.steps_per_block = max(2, min(2000, round(BLOCK_MS / block_ms(arm, 3))))
    return arm


def block_ms(arm: Arm, steps: int) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(steps):
        arm.step()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / steps


def interleave(arms: list[Arm], rounds: int) -> None:
    chance = random.Random(0)
    for arm in arms:
        block_ms(arm, arm.steps_per_block)
    for _ in range(rounds):
        for arm in chance.sample(arms, len(arms)):
            arm.step_ms.append(block_ms(arm, arm.steps_per_block))


def plan_ahead(case: Case, plan: Path, arms: Iterable[str]) -> None:
    """What these arms compile and time is on disk when it returns."""
    words = ["--case", case.name, "--plan", str(plan), "--arms", *arms, "--only-prepare"]
    subprocess.run([sys.executable, "-m", "benchmarks.training_step", *words], check=True)


def race(builds: Mapping[str, Build], rounds: int) -> list[Arm]:
    """All of them prepared, and then timed in turn."""
    arms = [prepare(name, build) for name, build in builds.items()]
    interleave(arms, rounds)
    return arms


def lines(suite: str, case: Case, arms: list[Arm], note: str) -> Iterator[dict[str, object]]:
    for arm in arms:
        yield {
            "kind": "case",
            "suite": suite,
            "case": case.name,
            "arm": arm.name,
            "step_ms": arm.step_ms,
            "peak_bytes": arm.peak_bytes,
            "first_step_s": arm.first_step_s,
            "notes": "; ".join(part for part in (arm.notes.replace("\n", "; "), note) if part),
        }


def write(suite: str, case: Case, arms: list[Arm], note: str, out: Path | None) -> None:
    path = out or results_file.free_path(suite)
    if not path.exists():
        results_file.append(path, results_file.environment_line(results_file.command_line()))
    for line in lines(suite, case, arms, note):
        results_file.append(path, line)
    for arm in arms:
        memory = "" if arm.peak_bytes is None else f"{arm.peak_bytes >> 20:6} MiB"
        print(f"{case.name:20} {arm.name:16} {statistics.median(arm.step_ms):9.4f} ms {memory}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", required=True, choices=CASES)
    parser.add_argument("--plan", type=Path, required=True, help="the plan that kitsune tune has written")
    parser.add_argument("--out", type=Path, help="result file to add to; a new one under benchmarks/results otherwise")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--arms", nargs="*", default=ARMS, choices=ARMS)
    parser.add_argument("--only-prepare", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    case, plan = CASES[arguments.case], Plan.load(arguments.plan)
    builds = {name: partial(step_of, name, case, plan) for name in arguments.arms}
    ours = [name for name in arguments.arms if name in OURS]
    if ours and not arguments.only_prepare:
        plan_ahead(case, arguments.plan, ours)
    torch.cuda.set_device(DEVICE)
    if arguments.only_prepare:
        for name, build in builds.items():
            prepare(name, build)
        return
    looks = []
    with patch("kitsune.launches.execution.kernel_trace.profile", lambda **named: looks.append(1) or profile(**named)):
        arms = race(builds, arguments.rounds)
    note = f"plan {plan.plan_id[:16]}" + (f"; torch.profiler looked {len(looks)} times" if looks else "")
    write("training_step", case, arms, note, arguments.out)


if __name__ == "__main__":
    main()
