"""The provenance of a run as names and values, and the command that repeats it."""

import shlex
from collections.abc import Iterator
from typing import Final

from kitsune.base.byte_sizes import size_words
from kitsune.base.text_format import clean
from kitsune.plan import Environment
from server.charts.drawing import words
from tuner.records import Run
from tuner.store.queries.runs import ARCHIVE, LIVE

Fact = tuple[str, str]

_GIB: Final = 1024**3


def provenance(run: Run) -> tuple[Fact, ...]:
    """Machine, software, workload, budget, worker and times of a run; unknown values are left out."""
    return (*(machine_facts(run.environment) if run.environment else ()), *_work(run))


def machine_facts(here: Environment) -> tuple[Fact, ...]:
    """The machine and its software; empty values are left out."""
    return tuple((name, value) for name, value in _machine(here) if value)


def again(run: Run) -> str:
    """The command that repeats the run, without control characters, so that nothing can be hidden in it."""
    return clean(_command(run))


def _command(run: Run) -> str:
    is_archive = run.workload == ARCHIVE
    spec = "train.py:make_workload" if is_archive or run.workload == LIVE else shlex.quote(run.workload)
    device = run.device.partition(":")[0] or ("" if is_archive else "cuda")
    options = [f"--device {shlex.quote(device)}"] if device else []
    options += [f"--trials {run.budget_trials}"] if run.budget_trials else []
    options += [f"--budget {_seconds(run.budget_s)}s"] if run.budget_s else []
    options += [f"--memory-limit {run.memory_limit_bytes}"] if run.memory_limit_bytes else []
    return " ".join(["kitsune submit" if is_archive else "kitsune tune", spec, *options, f"--seed {run.seed}"])


def again_note(run: Run) -> str:
    """What the command requires."""
    if run.workload in (LIVE, ARCHIVE):
        return "train.py:make_workload is your function that returns the Workload of this training step."
    return ""


def budget_words(run: Run) -> str:
    """ "25 trials or 5 min"."""
    parts = [words.count(run.budget_trials, "trial")] if run.budget_trials else []
    parts += [words.lasted(run.budget_s)] if run.budget_s else []
    return " or ".join(parts) or "picked by a first look at the model"


def _seconds(budget_s: float) -> str:
    """Without an exponent, which the command line does not accept."""
    return f"{budget_s:.3f}".rstrip("0").rstrip(".")


def _machine(here: Environment) -> Iterator[Fact]:
    yield ("GPU" if here.device == "cuda" else "processor"), here.gpu
    yield "compute capability", here.compute_capability
    yield "memory", f"{here.memory_bytes / _GIB:.0f} GiB" if here.memory_bytes else ""
    yield "driver", here.driver
    yield "CUDA", here.cuda
    yield "torch", here.torch
    yield "triton", here.triton
    yield "Python", here.python
    yield "Kitsune", here.kitsune


def _work(run: Run) -> Iterator[Fact]:
    yield "workload", run.workload
    yield "device", run.device or "any"
    yield "budget", budget_words(run)
    if run.memory_limit_bytes:
        yield "memory limit", size_words(run.memory_limit_bytes)
    yield "seed", str(run.seed)
    if run.worker:
        yield "worker", f"{run.worker}, {words.count(run.attempt, 'attempt')}"
    for name in ("created_at", "started_at", "finished_at"):
        if (at := getattr(run, name)) is not None:
            yield name.removesuffix("_at"), words.moment(at)
    if run.took_s is not None:
        yield "took", words.lasted(run.took_s)
    if run.archive:
        yield "archive", run.archive
    yield "run", run.id
