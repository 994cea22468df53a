"""Suite plans: all plans of launches for a case, also those that need too much memory to race, side by side, with what
was predicted for each.

    python -m benchmarks.plans --case bert_base/2x128 --streams 8

One process, all plans interleaved with `graph`, the plain graph of the same step. How many of a graph's branches the
driver keeps apart is up to CUDA_DEVICE_MAX_CONNECTIONS, which the notes tell. `predicted_us` in the notes is as if
launches side by side did not slow each other; `shared_us` is by the model of benchmarks.contention.
"""

import argparse
import json
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from benchmarks.cases import Case
from benchmarks.contention import shared_us, shares
from benchmarks.engine import ENGINE_CASES, WARM_STEPS, facts, graph_step, step_of
from benchmarks.rivals import Step
from benchmarks.training_step import DEVICE, Build, interleave, prepare, write
from kitsune.device.backend import side_stream
from kitsune.device.cuda_graph import Recorder
from kitsune.launches.model.recording import Recording
from kitsune.launches.pipeline import Planner
from kitsune.launches.plans import Planned, plans
from kitsune.launches.recording.recorder import record
from kitsune.workload import Workload

ANY_BYTES = 2**50


def recording_of(workload: Workload, step: Step) -> Recording:
    """Of the step once it is warm; the gradients that it leaves are cleared, since graphs have their own."""
    with side_stream(DEVICE):
        for _ in range(WARM_STEPS):
            step()
        recorded = record(step, DEVICE)
    workload.optimizer.zero_grad()
    if recorded.recording is None:
        raise SystemExit(recorded.refusal)
    return recorded.recording


def builds(case: Case, streams: int) -> dict[str, Build]:
    """Every plan, to be captured. They share the state of one step: a race, not a training."""
    workload, step = step_of(case, streams)
    found = plans(recording_of(workload, step), streams, ANY_BYTES)
    planner = Planner(Recorder(DEVICE), streams)
    shares_of = cache_by_recording()
    return {plan.name: partial(replayed, plan, planner, step, shares_of(plan.recording)) for plan in found}


def cache_by_recording() -> Callable[[Recording], list[float]]:
    """The parts of the GPU that launches take, measured once for each split of the updates."""
    known: dict[int, list[float]] = {}

    def shares_of(recording: Recording) -> list[float]:
        if id(recording) not in known:
            known[id(recording)] = shares(recording)
        return known[id(recording)]

    return shares_of


def replayed(plan: Planned, planner: Planner, step: Step, parts: Sequence[float]) -> tuple[Step, Callable[[], str]]:
    replay = planner.race.tried(plan).replay
    replay.__dict__["alive"] = step
    connections = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "as the driver has it")
    shared = round(shared_us(plan.schedule, plan.costs_us, parts, plan.priorities), 1)
    return replay, lambda: json.dumps(facts(plan, 0.0) | {"shared_us": shared, "connections": connections})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", required=True, choices=ENGINE_CASES)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", type=Path, help="result file to add to; a new one under benchmarks/results otherwise")
    arguments = parser.parse_args()
    case = ENGINE_CASES[arguments.case]
    torch.cuda.set_device(DEVICE)
    arms = [prepare("graph", partial(graph_step, case))]
    arms += [prepare(name, build) for name, build in builds(case, arguments.streams).items()]
    interleave(arms, arguments.rounds)
    write("plans", case, arms, "", arguments.out)


if __name__ == "__main__":
    main()
