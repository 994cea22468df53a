"""Suite gate_seeds: how often the winner's gate refuses a candidate that is right, over many seeds, on a CPU.

    python -m benchmarks.gate_seeds --seeds 200

Small steps, each by choices that change how it rounds; every seed draws other weights, batches and perturbations.
"""

import argparse
import os
import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from benchmarks import results_file
from kitsune.knobs import Choice
from tuner.long_gate import prove_long
from tuner.probe import probe_workload
from tuner.protocol import ArmSpec, Job
from tuner.records import Failure

BUDGET_S = 30.0


@dataclass(frozen=True, slots=True)
class Candidate:
    name: str
    workload: str
    knobs: Mapping[str, Choice]


CANDIDATES = (
    Candidate("cnn fp32 channels_last", "zoo:lenet5?size=tiny&batch=32", {"layout": "channels_last"}),
    Candidate(
        "cnn bf16 channels_last", "zoo:lenet5?size=tiny&batch=32", {"layout": "channels_last", "precision": "bf16"}
    ),
    Candidate("resnet fp32 channels_last", "zoo:resnet18?size=tiny&batch=8", {"layout": "channels_last"}),
    Candidate("mlp bf16 fused", "zoo:mlp?size=tiny&batch=32", {"precision": "bf16", "update": "fused"}),
    Candidate("bert fp32 fused", "zoo:bert_base?size=tiny&batch=4&seq=16", {"update": "fused"}),
    Candidate("bert bf16 fused", "zoo:bert_base?size=tiny&batch=4&seq=16", {"precision": "bf16", "update": "fused"}),
)


def refusal(candidate: Candidate, budget_s: float, seed: int) -> str:
    """Why the gate refuses it, or nothing."""
    torch.set_num_threads(1)
    arms = (ArmSpec(name="baseline"), ArmSpec(name="candidate", knobs=candidate.knobs))
    job = Job(workload=candidate.workload, device="cpu", seed=seed, arms=arms, budget_s=budget_s)
    probe = probe_workload(job)
    found = probe if isinstance(probe, Failure) else prove_long(job, probe)
    return f"{found.kind.value}: {found.reason}" if isinstance(found, Failure) else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=200, help="of all candidates together")
    parser.add_argument("--budget", type=float, default=BUDGET_S, help="seconds of each proof")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    path = arguments.out or results_file.free_path("gate_seeds")
    results_file.append(path, results_file.environment_line(results_file.command_line()))
    begin = time.monotonic()
    with ProcessPoolExecutor(arguments.processes) as pool:
        futures = [
            (CANDIDATES[seed % len(CANDIDATES)], seed, partial(refusal, budget_s=arguments.budget))
            for seed in range(arguments.seeds)
        ]
        asked = [(candidate, seed, pool.submit(ask, candidate, seed=seed)) for candidate, seed, ask in futures]
        refused = 0
        for candidate, seed, future in asked:
            reason = future.result()
            refused += bool(reason)
            line = {"kind": "seed", "suite": "gate_seeds", "candidate": candidate.name, "seed": seed, "refused": reason}
            results_file.append(path, line)
            if reason:
                print(f"{candidate.name}, seed {seed}: {reason}", flush=True)
    figure = ("right candidates refused", 100 * refused / arguments.seeds, "%", arguments.seeds)
    results_file.append(path, results_file.figure_line("gate_seeds", figure, results_file.command_line()))
    print(f"{refused} of {arguments.seeds} refused, in {time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
