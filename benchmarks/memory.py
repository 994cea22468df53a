"""Suite memory: the peak of plans of growing thrift on the same batch, against the step as given; figures to a file.

    python -m benchmarks.memory --case resnet18/128 --out results.jsonl

A peak is the most memory in tensors during settled steps, weights, optimizer and the pools of graphs included.
"""

import argparse
import gc
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from benchmarks import results_file
from benchmarks.cases import CASES, Case, by_name
from benchmarks.memory_table import GIVEN
from benchmarks.results_file import Figure, figure_line
from benchmarks.rivals import Step, eager_step
from benchmarks.training_step import DEVICE, Build, prepare, workload_of
from kitsune import Plan, TrainStep, Workload
from kitsune.knobs import Choice
from tuner.zoo.mlp import MLP

#: Batches so large that what a step makes outweighs its weights.
MEMORY_CASES = by_name(
    (
        Case("mlp-wide/16384", "benchmarks/memory.py:make_mlp_wide"),
        Case("lenet5/16384", "zoo:lenet5?batch=16384"),
        CASES["resnet18/128"],
        CASES["bert_base/16x128"],
        CASES["gpt2_small/8x512"],
    )
)
#: Of all plans of launches the one that needs the least, since none fits into so little.
LEAST_POOL = 2**24


@dataclass(frozen=True, slots=True)
class Thrift:
    """Knobs of a plan, and into how many parts the batch is split."""

    knobs: Mapping[str, Choice] = field(default_factory=dict)
    parts: int = 1

    @property
    def plan(self) -> Plan:
        return Plan.by_hand(**self.knobs)


HALF: Mapping[str, Choice] = {"precision": "bf16"}
COMPILED: Mapping[str, Choice] = {**HALF, "compile": "default"}
POOLED: Mapping[str, Choice] = {**COMPILED, "capture": "step", "streams": 2, "pool_bytes": LEAST_POOL}
ARMS = {
    "bf16": Thrift(HALF),
    "bf16, compile": Thrift(COMPILED),
    "bf16, compile, channels_last": Thrift({**COMPILED, "layout": "channels_last"}),
    "bf16, compile, 4 parts": Thrift(COMPILED, parts=4),
    "bf16, compile, one graph, least pool": Thrift(POOLED),
    "bf16, compile, 4 parts, one graph, least pool": Thrift(POOLED, parts=4),
}


def make_mlp_wide() -> Workload:
    """784-4096-4096-4096-10 on 16384 images of 28 x 28."""
    model = MLP((784, 4096, 4096, 4096, 10))
    batch = torch.randn(16384, 1, 28, 28), torch.randint(10, (16384,))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return Workload(model, torch.nn.functional.cross_entropy, optimizer, batch)


def given_step(case: Case) -> tuple[Step, type[str]]:
    return eager_step(workload_of(case), bf16=False), str


def thrifty_step(case: Case, thrift: Thrift) -> tuple[Step, Callable[[], str]]:
    workload = workload_of(case)
    step = TrainStep(workload.model, workload.loss_fn, workload.optimizer, thrift.plan, accumulation_steps=thrift.parts)
    return lambda: step(*workload.batch), lambda: str(step.report)


def builds_of(case: Case) -> dict[str, Build]:
    return {GIVEN: partial(given_step, case)} | {arm: partial(thrifty_step, case, each) for arm, each in ARMS.items()}


def measured(builds: Mapping[str, Build]) -> Iterator[tuple[str, int, str]]:
    """(arm, its peak in bytes, its notes), one arm at a time on the GPU."""
    for name, build in builds.items():
        arm = prepare(name, build)
        yield name, arm.peak_bytes or 0, arm.notes.replace("\n", "; ")
        del arm
        gc.collect()


def figures_of(case: str, arm: str, peak_bytes: int, given_bytes: int) -> Iterator[Figure]:
    """The peak, and what share of the given step's it is."""
    yield f"{case} {arm}", peak_bytes, "bytes", 1
    if arm != GIVEN:
        yield f"{case} {arm} / {GIVEN}", peak_bytes / given_bytes, "ratio", 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", required=True, choices=MEMORY_CASES)
    parser.add_argument("--out", type=Path, help="result file to add to; a new one under benchmarks/results otherwise")
    arguments = parser.parse_args()
    case, command = MEMORY_CASES[arguments.case], results_file.command_line()
    torch.cuda.set_device(DEVICE)
    path = arguments.out or results_file.free_path("memory")
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        results_file.append(path, results_file.environment_line(command))
    given_bytes = 0
    for arm, peak_bytes, notes in measured(builds_of(case)):
        given_bytes = given_bytes or peak_bytes
        for figure in figures_of(case.name, arm, peak_bytes, given_bytes):
            line = {**figure_line("memory", figure, command), "notes": notes}
            results_file.append(path, line)
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
