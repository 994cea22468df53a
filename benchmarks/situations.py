"""Suite situations: public threads in which torch.compile made a step slower or wrong, and what Kitsune makes of each.

    python -m benchmarks.situations nnue_small/16384 accumulated_mlp/32 --budget 3m --out situations.jsonl

A situation is a training step, built anew at the sizes of its thread. It is tuned as a user does it, and the plan is
timed beside the step as given and torch.compile's modes, by benchmarks.tuned. For the two threads about gradients that
are added up, a loop that the drop-in runs is compared with the same loop in eager. With `--home` a situation that has a
plan there is only timed. The exit code is 1 when the plan is slower than the step as given by more than 1 %, when the
gradients differ, or when a situation could not be measured.
"""

import argparse
import math
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import results_file, training_step
from benchmarks.cases import CASES, Case, by_name
from benchmarks.results_file import Figure
from benchmarks.rivals import COMPILED
from benchmarks.tuned import PLAN, raced, report, tuned
from kitsune import KitsuneOptimizer, Workload
from kitsune.device.backend import pick_device
from kitsune.workload import loss_of
from tuner.workloads.loader import load_workload

SUITE = "situations"
GIVEN, GIVEN_IN_BF16 = "eager_fp32", "eager_bf16"
ARMS = (GIVEN, GIVEN_IN_BF16, *COMPILED)
RIVALS = tuple(arm for arm in training_step.ARMS if arm != PLAN)
DROPIN, GRAPH_TREES = "kitsune_dropin", "reduce_overhead"
PARTS, UPDATES = 4, 8

#: Case -> the thread that it is built after: tuned, and timed.
TIMED = {
    "gqa_rms_norm/32x1024": "pytorch#179423",
    "bf16_rms_norm/8x1024": "pytorch#188955",
    "ddpm_unet/128": "pytorch#190796",
    "tv-densenet121/16": "pytorch#161764",
    "nnue_small/16384": "nnue-pytorch#325",
    "nnue_large/16384": "nnue-pytorch#325",
    "hf-deberta_v3_base/1x512": "pytorch#98441",
    "iresnet50/16": "pytorch#111182",
    "spiking/8": "spikingjelly#740",
    "spiking/96": "spikingjelly#740",
}
#: The same of those whose gradients are added up and compared.
CHECKED = {"accumulated_mlp/32": "pytorch#96693", "accumulated_linear/1": "pytorch#169545"}
THREADS = TIMED | CHECKED
CHECKED_CASES = by_name(
    (
        Case("accumulated_mlp/32", "benchmarks/workloads/accumulated_mlp.py:make_workload"),
        Case("accumulated_linear/1", "benchmarks/workloads/accumulated_linear.py:make_workload"),
    )
)

PLAN_TO_GIVEN = f"{PLAN} / {GIVEN}"
DIFFERENCE = f"{DROPIN} differs from eager"
#: What a figure may be at most; other figures have no bound.
BOUNDS = {PLAN_TO_GIVEN: 1.01, DIFFERENCE: 1e-5}


# --- Tuned and timed


def ratios(name: str, ms: Mapping[str, float], blocks: int) -> Iterator[Figure]:
    """Of medians of the arms, in ms a step: the plan to the step as given, to the best mode, and each mode to eager."""
    modes = {arm: ms[arm] for arm in COMPILED if arm in ms}
    if GIVEN in ms:
        yield f"{name} {PLAN_TO_GIVEN}", round(ms[PLAN] / ms[GIVEN], 4), "ratio", blocks
    if modes:
        yield f"{name} {PLAN} / best mode", round(ms[PLAN] / min(modes.values()), 4), "ratio", blocks
    if GIVEN_IN_BF16 in ms:
        for mode, mode_ms in modes.items():
            yield f"{name} {mode} / {GIVEN_IN_BF16}", round(mode_ms / ms[GIVEN_IN_BF16], 4), "ratio", blocks


def timed(name: str, budget: str, home: Path, out: Path, arms: Sequence[str]) -> list[Figure]:
    """Tunes the case unless its plan is in `home` already, and times the plan beside the arms."""
    own = home / name.replace("/", "-")
    own.mkdir(parents=True, exist_ok=True)
    plan = own / "plan.json"
    if not plan.exists():
        found = tuned(CASES[name], budget, own, plan)
        report(name, found)
        told = {"kind": "tuning", "suite": SUITE, "case": name, "thread": THREADS[name], "budget": budget}
        results_file.append(out, {**told, **found})
    if not arms:
        return []
    ms = raced(CASES[name], plan, own, out, [*arms, PLAN])
    line = results_file.lines_of(out, "case")[-1]
    return list(ratios(name, ms, len(line["step_ms"])))


# --- Gradients that are added up

Wrap = Callable[[Workload], tuple[Any, Any]]


def in_eager(workload: Workload) -> tuple[Any, Any]:
    return workload.model, workload.optimizer


def by_dropin(workload: Workload) -> tuple[Any, Any]:
    return workload.model, KitsuneOptimizer(workload.optimizer)


def by_graph_trees(workload: Workload) -> tuple[Any, Any]:
    torch.compiler.reset()  # of graphs that an earlier loop has left when it raised
    return torch.compile(workload.model, mode="reduce-overhead"), workload.optimizer


@dataclass(frozen=True, slots=True)
class Accumulation:
    """The gradients before each update and the weights after the last one; of the drop-in also what it says of itself,
    and how many of the 32 forwards were replays of a graph."""

    tensors: list[torch.Tensor]
    captured: int = 0
    notes: str = ""


def accumulated(case: Case, device: torch.device, wrap: Wrap) -> Accumulation:
    """A loop as a user writes it, of 8 updates by 4 backwards each, always from the same weights on the same data."""
    workload = load_workload(case.spec, str(device), 0)
    model, optimizer = wrap(workload)
    parameters, found = list(workload.model.parameters()), []
    for part, x in enumerate(inputs_like(workload.batch[0]), start=1):
        loss = loss_of(model(x), workload.loss_fn, None) / PARTS
        loss.backward()
        if part % PARTS == 0:
            found += [parameter.grad.clone() for parameter in parameters if parameter.grad is not None]
            optimizer.step()
            optimizer.zero_grad()
    weights = [parameter.detach().clone() for parameter in parameters]
    if not isinstance(optimizer, KitsuneOptimizer):
        return Accumulation([*found, *weights])
    captured, notes = optimizer.counts.get("captured", 0), str(optimizer.report).replace("\n", "; ")
    optimizer.close()
    return Accumulation([*found, *weights], captured, notes)


def inputs_like(x: torch.Tensor) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(PARTS * UPDATES):
        yield torch.randn(x.shape, generator=generator).to(x.device)


def largest_difference(found: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> float:
    """Relative to the largest value of its tensor; infinite where a value is not finite, or a tensor is missing."""
    if len(found) != len(right):
        return math.inf
    largest = 0.0
    for one, other in zip(found, right, strict=True):
        difference = ((one - other).abs().max() / other.abs().max()).item()
        largest = max(largest, difference if math.isfinite(difference) else math.inf)
    return largest


def compared(case: Case, arm: str, wrap: Wrap, device: torch.device, right: Accumulation) -> dict[str, Any]:
    """The line of an arm. Its loop may raise, as torch's does in one of the threads."""
    line = {"kind": "check", "suite": SUITE, "case": case.name, "thread": THREADS[case.name], "arm": arm}
    try:
        found = accumulated(case, device, wrap)
    except RuntimeError as error:
        return {**line, "difference": math.inf, "captured": 0, "notes": f"it raises: {str(error)[:500]}"}
    difference = largest_difference(found.tensors, right.tensors)
    return {**line, "difference": difference, "captured": found.captured, "notes": found.notes}


def checked(name: str, out: Path) -> list[Figure]:
    """The drop-in beside eager, and what CUDA graph trees make of the same loop, where there is a GPU."""
    case, device = CHECKED_CASES[name], pick_device()
    right = accumulated(case, device, in_eager)
    rivals: dict[str, Wrap] = {GRAPH_TREES: by_graph_trees} if device.type == "cuda" else {}
    ours = compared(case, DROPIN, by_dropin, device, right)
    for line in (ours, *(compared(case, arm, wrap, device, right) for arm, wrap in rivals.items())):
        results_file.append(out, line)
        print(line, flush=True)
    forwards = PARTS * UPDATES
    captured = (f"{name} {DROPIN} captured", float(ours["captured"]), "forwards", forwards)
    return [(f"{name} {DIFFERENCE}", ours["difference"], "relative", forwards), captured]


# --- All of them


def is_kept(figure: Figure) -> bool:
    case, value, *_ = figure
    return value <= BOUNDS.get(case.partition(" ")[2], math.inf)


def figures_of(name: str, given: argparse.Namespace, home: Path, out: Path) -> list[Figure] | None:
    """None when it could not be measured; the others are measured all the same."""
    try:
        return checked(name, out) if name in CHECKED else timed(name, given.budget, home, out, given.arms)
    except (SystemExit, subprocess.CalledProcessError) as error:
        line = {"kind": "failure", "suite": SUITE, "case": name, "thread": THREADS[name], "reason": str(error)[:2000]}
        results_file.append(out, line)
        print(line, flush=True)
        return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", choices=THREADS, metavar="NAME", help=", ".join(THREADS))
    parser.add_argument("--budget", default="3m", help="of each kitsune tune")
    parser.add_argument("--arms", nargs="*", default=ARMS, choices=RIVALS, help="beside the plan; none: tune only")
    parser.add_argument("--home", type=Path, help="a folder that keeps stores, caches and plans; a new one otherwise")
    parser.add_argument("--out", type=Path, help="result file to add to; a new one under benchmarks/results otherwise")
    given = parser.parse_args()
    command, out = results_file.command_line(), given.out or results_file.free_path(SUITE)
    if not out.exists():
        results_file.append(out, results_file.environment_line(command))
    is_fine = True
    with tempfile.TemporaryDirectory() as folder:
        for name in given.names:
            figures = figures_of(name, given, (given.home or Path(folder)).absolute(), out)
            for figure in figures or []:
                results_file.append(out, results_file.figure_line(SUITE, figure, command))
                print(*figure, "" if is_kept(figure) else "NOT KEPT", flush=True)
            is_fine = is_fine and figures is not None and all(map(is_kept, figures))
    return 0 if is_fine else 1


if __name__ == "__main__":
    raise SystemExit(main())
