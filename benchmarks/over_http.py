"""The whole way over HTTP on one machine: serve, worker, submit, fetch in another process, train and measure by it.

    python -m benchmarks.over_http --case resnet18/128 --trials 9

Everything is a process of its own, as a user has them: `kitsune serve`, `kitsune worker`, `kitsune submit`, and a
training script (this module with --train) that fetches the plan with other weights and trains by it and plainly.
After that suite training_step measures the fetched plan against its rivals.
"""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal
from unittest.mock import patch

import torch

import kitsune
from benchmarks import results_file
from benchmarks.cases import CASES, Case
from benchmarks.results_file import Figure
from benchmarks.serving import KITSUNE, serving
from tuner.workloads.loader import load_workload

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STEPS = 100
SEED = 1  # of the weights; the submitted ones are drawn from another


def tuned_over_http(case: Case, trials: str, folder: Path) -> Iterator[Figure]:
    """Leaves what the training script fetched in <folder>/plan.json."""
    with serving(folder, f"sqlite:///{folder}/kitsune.db") as server:
        home = {**os.environ, "KITSUNE_HOME": str(folder)}
        worker = subprocess.Popen([KITSUNE, "worker", "--device", DEVICE, "--database", server.database], env=home)
        try:
            began = time.monotonic()
            here = {**home, "KITSUNE_SERVER": server.url}
            subprocess.run([KITSUNE, "submit", case.spec, "--trials", trials, "--wait"], env=here, check=True)
            yield f"{case.name}: from submit to plan", time.monotonic() - began, "s", 1
            script = [sys.executable, "-m", "benchmarks.over_http", "--case", case.name, "--train", str(folder)]
            said = subprocess.run(script, env=here, check=True, stdout=subprocess.PIPE).stdout
            yield from (tuple(figure) for figure in json.loads(said))
        finally:
            worker.send_signal(signal.SIGTERM)
            worker.wait()


def train(case: Case, folder: Path) -> Iterator[Figure]:
    """A user's training script; the environment says where the server is."""
    began = time.perf_counter()
    workload = load_workload(case.spec, DEVICE, SEED)
    yield f"{case.name}: model and batch made", time.perf_counter() - began, "s", 1
    began = time.perf_counter()
    plan = kitsune.fetch_plan(workload.model, workload.optimizer, workload.batch)
    yield f"{case.name}: fetch_plan", time.perf_counter() - began, "s", 1
    if plan is None:
        raise SystemExit("no plan was fetched")
    plan.save(folder / "plan.json")
    by_plan, plain = losses(case, "auto"), losses(case, None)
    yield f"{case.name}: loss at first", plain[0], "loss", 1
    yield f"{case.name}: loss after {STEPS} steps by plan=auto", by_plan[-1], "loss", 1
    yield f"{case.name}: loss after {STEPS} steps plain", plain[-1], "loss", 1
    yield from without_server(case)


def losses(case: Case, plan: Literal["auto"] | None, steps: int = STEPS) -> list[float]:
    """Before every step on one batch, and after the last."""
    workload = load_workload(case.spec, DEVICE, SEED)
    step = kitsune.TrainStep(workload.model, workload.loss_fn, workload.optimizer, plan=plan)
    found = [float(step(*workload.batch)) for _ in range(steps + 1)]
    print(step.report, file=sys.stderr)
    return found


def without_server(case: Case) -> Iterator[Figure]:
    """What plan="auto" adds to the first step where nobody listens, and where somebody listens and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as silent, socket.create_server(("127.0.0.1", 0)) as closed:
        ports = {"silent": silent.getsockname()[1], "absent": closed.getsockname()[1]}
        closed.close()
        for name, port in ports.items():
            plain_s = first_step_s(case, None)
            with patch.dict(os.environ, KITSUNE_SERVER=f"http://127.0.0.1:{port}", KITSUNE_TOKEN="none"):
                took_s = first_step_s(case, "auto")
            yield f"{case.name}: plan=auto added to the first step, server {name}", took_s - plain_s, "s", 1


def first_step_s(case: Case, plan: Literal["auto"] | None) -> float:
    """The constructor included."""
    workload = load_workload(case.spec, DEVICE, SEED)
    began = time.perf_counter()
    step = kitsune.TrainStep(workload.model, workload.loss_fn, workload.optimizer, plan=plan)
    float(step(*workload.batch))
    return time.perf_counter() - began


def measure(case: Case, folder: Path, out: Path | None) -> None:
    """A process without a server: the plan is all that it has."""
    words = ["--case", case.name, "--plan", str(folder / "plan.json"), *(("--out", str(out)) if out else ())]
    subprocess.run([sys.executable, "-m", "benchmarks.training_step", *words], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", default="resnet18/128", choices=CASES)
    parser.add_argument("--trials", default="9", help="of the run")
    parser.add_argument("--train", type=Path, metavar="FOLDER", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="figures; a new file under benchmarks/results otherwise")
    parser.add_argument("--steps-out", type=Path, help="step times; likewise")
    arguments = parser.parse_args()
    case = CASES[arguments.case]
    if arguments.train:
        print(json.dumps(list(train(case, arguments.train))))
        return
    with tempfile.TemporaryDirectory(prefix="kitsune-over-http-") as name:
        figures = list(tuned_over_http(case, arguments.trials, Path(name)))
        results_file.write_figures(arguments.out or results_file.free_path("over_http"), "over_http", figures)
        if DEVICE == "cuda":
            measure(case, Path(name), arguments.steps_out)


if __name__ == "__main__":
    main()
