"""Suite gate_seeds: how often the winner's gate refuses a candidate that is right, over many seeds.

    python -m benchmarks.gate_seeds --seeds 200

Every seed draws other weights, batches and perturbations. On a CPU: small steps, each by choices that change how it
rounds. On a GPU: models of ordinary size, compiled, one process each. Called again with the same file it goes on.
"""

import argparse
import multiprocessing
import os
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks import results_file
from benchmarks.cases import CASES
from kitsune.device.backend import pick_device
from kitsune.knobs import Choice
from tuner.building.probe import probe_workload
from tuner.measuring.protocol import ArmSpec, Job
from tuner.numerics.long_gate import prove_long
from tuner.records import Failure

SUITE: Final = "gate_seeds"
BUDGET_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class Candidate:
    name: str
    workload: str
    knobs: Mapping[str, Choice]


SMALL: Final = (
    Candidate("cnn fp32 channels_last", "zoo:lenet5?size=tiny&batch=32", {"layout": "channels_last"}),
    Candidate(
        "cnn bf16 channels_last", "zoo:lenet5?size=tiny&batch=32", {"layout": "channels_last", "precision": "bf16"}
    ),
    Candidate("resnet fp32 channels_last", "zoo:resnet18?size=tiny&batch=8", {"layout": "channels_last"}),
    Candidate("mlp bf16 fused", "zoo:mlp?size=tiny&batch=32", {"precision": "bf16", "update": "fused"}),
    Candidate("bert fp32 fused", "zoo:bert_base?size=tiny&batch=4&seq=16", {"update": "fused"}),
    Candidate("bert bf16 fused", "zoo:bert_base?size=tiny&batch=4&seq=16", {"precision": "bf16", "update": "fused"}),
)


COMPILED: Final[Mapping[str, Mapping[str, Choice]]] = {
    "reduce-overhead": {"precision": "bf16", "compile": "reduce-overhead", "update": "fused"},
    "captured": {"precision": "bf16", "compile": "default", "update": "kitsune", "capture": "step"},
}
#: What the tuner finds for transformers: weights and the residual stream are rounded to bf16, products are fused.
ROUNDED: Final[Mapping[str, Choice]] = {
    **COMPILED["captured"],
    "weights": "bf16_copies",
    "activations": "bf16",
    "fusion": "products",
}
TRANSFORMERS: Final = ("nanogpt/12x1024", "bert_base/16x128", "gpt2_small/8x512", "vit_b16/64")
LARGE: Final = (
    *(
        Candidate(f"{case} {name}", CASES[case].spec, knobs)
        for case in (*TRANSFORMERS, "resnet50/64")
        for name, knobs in COMPILED.items()
    ),
    *(Candidate(f"{case} rounded", CASES[case].spec, ROUNDED) for case in TRANSFORMERS),
)


def refusal(candidate: Candidate, device: str, seed: int, budget_s: float) -> str:
    """Why the gate refuses it, or nothing."""
    torch.set_num_threads(1)
    arms = (ArmSpec(name="baseline"), ArmSpec(name="candidate", knobs=candidate.knobs))
    job = Job(workload=candidate.workload, device=device, seed=seed, arms=arms, budget_s=budget_s)
    probe = probe_workload(job)
    found = probe if isinstance(probe, Failure) else prove_long(job, probe)
    return f"{found.kind.value}: {found.reason}" if isinstance(found, Failure) else ""


def looked(
    candidates: Sequence[Candidate], device: str, seeds: Iterable[int], budget_s: float, processes: int
) -> Iterator[dict[str, Any]]:
    """A line for each seed, in turn; on a GPU each has a process of its own, as in a run."""
    context = multiprocessing.get_context("spawn")
    begun: deque[tuple[str, int, Future[str]]] = deque()

    def oldest() -> dict[str, Any]:
        name, seed, found = begun.popleft()
        return {"kind": "seed", "suite": SUITE, "candidate": name, "seed": seed, "refused": found.result()}

    with ProcessPoolExecutor(processes, context, max_tasks_per_child=1 if device == "cuda" else None) as pool:
        for seed in seeds:
            candidate = candidates[seed % len(candidates)]
            begun.append((candidate.name, seed, pool.submit(refusal, candidate, device, seed, budget_s)))
            if len(begun) == processes:
                yield oldest()
        while begun:
            yield oldest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=200, help="of all candidates together")
    parser.add_argument("--only", default="", metavar="WORDS", help="of candidates whose name has these words")
    parser.add_argument("--budget", type=float, default=BUDGET_S, help="seconds of each proof")
    parser.add_argument("--minutes", type=float, default=60.0, help="none is begun after these")
    parser.add_argument("--processes", type=int, help="at a time; one on a GPU, otherwise one a core")
    parser.add_argument("--out", type=Path, help="the file to go on with; a new one otherwise")
    given = parser.parse_args()
    device, end_s = pick_device().type, time.monotonic() + 60 * given.minutes
    path, command = given.out or results_file.free_path(SUITE), results_file.command_line()
    done = len(results_file.lines_of(path, "seed"))
    if done >= given.seeds:
        parser.error(f"{path} is complete: no file is edited")
    results_file.append(path, results_file.environment_line(command))
    processes = given.processes or (1 if device == "cuda" else os.cpu_count() or 1)
    seeds = takewhile(lambda _: time.monotonic() < end_s, range(done, given.seeds))
    candidates = [each for each in (LARGE if device == "cuda" else SMALL) if given.only in each.name]
    for line in looked(candidates, device, seeds, given.budget, processes):
        results_file.append(path, line)
        if line["refused"]:
            print(f"{line['candidate']}, seed {line['seed']}: {line['refused']}", flush=True)
    found = results_file.lines_of(path, "seed")
    refused = sum(bool(line["refused"]) for line in found)
    if len(found) >= given.seeds:
        figure = ("right candidates refused", 100 * refused / len(found), "%", len(found))
        results_file.append(path, results_file.figure_line(SUITE, figure, command))
    print(f"{refused} of {len(found)} refused")


if __name__ == "__main__":
    main()
