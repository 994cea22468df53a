"""Suite engine: the same compiled step, or forward, as one plain CUDA graph and as planned launches on several streams.

    python -m benchmarks.engine --case resnet18/128 --out results.jsonl
    python -m benchmarks.engine --case googlenet/1-forward --out results.jsonl

All arms interleaved in one process, each with its own model, drawn from the same seed; `graph` has its best single
fused update. For several streams the step is compiled as Kitsune compiles it then, each result in memory of its own;
`graph_apart` is a plain graph of that.
"""

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.cases import CASES, FORWARDS, Case
from benchmarks.rivals import Step, at_its_best, compiled_forward, compiled_step, graphed
from benchmarks.training_step import DEVICE, race, workload_of, write
from kitsune.device.backend import side_stream
from kitsune.device.cuda_graph import Recorder
from kitsune.launches.pipeline import Planner
from kitsune.launches.planning.analysis import waits_of
from kitsune.launches.planning.schedule import critical_path_us
from kitsune.launches.planning.trace_export import idle_shares
from kitsune.launches.plans import Planned
from kitsune.techniques.streams import APART
from kitsune.workload import Workload, batch_tensors

ENGINE_CASES = CASES | FORWARDS
MOST_STREAMS = 8
STREAMS = {"k1": 1, "k2": 2, "k4": 4, "k8": MOST_STREAMS}
WARM_STEPS = 4
MIB = 1024**2


def step_of(case: Case, streams: int) -> tuple[Workload, Step]:
    """What is measured, compiled as for so many streams, with its static batch."""
    best = at_its_best(workload_of(case), channels_last=case.channels_last, capturable=True)
    options = APART if streams > 1 else None
    return best, compiled_forward(best, options) if case.is_forward else compiled_step(best, None, options)


def graph_step(case: Case, streams: int = 1) -> tuple[Step, Callable[[], str]]:
    _, step = step_of(case, streams)
    return graphed(step), str


def planned_step(
    case: Case, streams: int, traces: Path | None, pool_bytes: int | None = None
) -> tuple[Step, Callable[[], str]]:
    workload, step = step_of(case, streams)
    with side_stream(DEVICE):
        for _ in range(WARM_STEPS):
            step()
        planner = Planner(Recorder(DEVICE), streams, pool_bytes)
        began = time.perf_counter()
        graph, result = planner.capture(step, batch_tensors(workload.batch))
    planning_s = time.perf_counter() - began
    workload.optimizer.zero_grad()  # those of the recorded step: the graph has its own
    if graph is None or planner.plan is None:
        raise SystemExit(f"{case.name}: {planner.refusal}")
    plan = planner.plan
    if traces is not None:
        plan.save_trace(traces / f"{case.name.replace('/', '-')}-k{streams}.json")

    def replay() -> torch.Tensor:
        graph.replay()
        return result

    replay.__dict__["alive"] = step, planner
    return replay, lambda: json.dumps(facts(plan, planning_s))


def facts(plan: Planned, planning_s: float) -> dict[str, Any]:
    return {
        "plan": plan.name,
        "streams": plan.schedule.streams,
        "priorities": plan.priorities,
        "launches": len(plan.recording.calls),
        "sum_us": round(sum(plan.costs_us), 1),
        "idle": [round(share, 3) for share in idle_shares(plan.schedule)],
        "critical_us": round(critical_path_us(plan.recording.graph, plan.costs_us), 1),
        "predicted_us": round(plan.schedule.makespan_us, 1),
        "waits": waits_of(plan.schedule),
        "pool_bytes": plan.memory.peak_bytes,
        "naive_bytes": plan.memory.naive_bytes,
        "planning_s": round(planning_s, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", required=True, choices=ENGINE_CASES)
    graphs = ["graph", "graph_apart"]
    parser.add_argument("--arms", nargs="*", default=[*graphs, *STREAMS], choices=[*graphs, *STREAMS])
    parser.add_argument(
        "--pools", nargs="*", default=[], type=int, metavar="MIB", help="k8 in pools of these sizes too"
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, help="result file to add to; a new one under benchmarks/results otherwise")
    parser.add_argument("--traces", type=Path, metavar="FOLDER", help="where to put a trace of every schedule")
    arguments = parser.parse_args()
    case = ENGINE_CASES[arguments.case]
    torch.cuda.set_device(DEVICE)
    builds = {"graph": partial(graph_step, case), "graph_apart": partial(graph_step, case, MOST_STREAMS)} | {
        name: partial(planned_step, case, streams, arguments.traces) for name, streams in STREAMS.items()
    }
    pools = {f"k8-{mib}MiB": partial(planned_step, case, MOST_STREAMS, None, mib * MIB) for mib in arguments.pools}
    builds = {name: builds[name] for name in arguments.arms} | pools
    arms = race(builds, arguments.rounds)
    write("pools" if pools else "engine", case, arms, "", arguments.out)


if __name__ == "__main__":
    main()
