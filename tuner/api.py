"""The Python API for tuning on this machine. Runs, trials and plans are stored in the database."""

import contextlib
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kitsune.base.base_record import Record
from kitsune.base.byte_sizes import parse_memory_limit
from kitsune.base.durations import seconds_of
from kitsune.device.backend import pick_device
from kitsune.errors import SettingsError, StoreError
from kitsune.plan import Plan
from kitsune.submission.exporting.export import to_archive
from kitsune.workload import LossFn, Workload, check_trains, device_of
from tuner.ids import new_id
from tuner.measuring.gpu_health import Fitness
from tuner.planning.ablation import Ablation, ablation_of
from tuner.planning.untried import Untried, untried
from tuner.records import Run, Trial
from tuner.settings import settings_for_tuning
from tuner.store.engine import open_database
from tuner.store.queries import runs, trials
from tuner.tuning.events import Started
from tuner.tuning.interrupts import Interrupts, no_interrupts
from tuner.tuning.run import Tuning
from tuner.worker.run_execution import Make, Tell, carry_out, worker_name
from tuner.workloads.loader import check_spec, located


class Result(Record):
    """A finished run with its plan and its trials."""

    run: Run
    plan: Plan
    trials: tuple[Trial, ...]
    interrupted: bool = False

    @property
    def ablation(self) -> Ablation | None:
        """The contribution of each choice of the plan; None if it was not measured."""
        return ablation_of(self.plan.knobs, self.trials, self.run.inapplicable)

    @property
    def untried(self) -> list[Untried]:
        """Configurations of the opening that there was no time for."""
        return untried(self.run, self.trials, self.plan)

    def summary(self) -> dict[str, Any]:
        """The output of `kitsune tune --json`."""
        evidence = self.plan.evidence
        assert evidence is not None
        searched = [trial for trial in self.trials if trial.source.is_search]
        ablation = self.ablation
        return {
            "run_id": self.run.id,
            "plan_id": self.plan.plan_id,
            "verdict": evidence.verdict,
            "speedup": evidence.speedup.model_dump(),
            "note": evidence.note,
            "processes": evidence.processes,
            "prediction": evidence.prediction.model_dump() if evidence.prediction else None,
            "speedup_over_eager": evidence.speedup_over_eager.model_dump(),
            "baseline": evidence.baseline,
            "baseline_step_ms": evidence.baseline_step_ms,
            "eager_step_ms": evidence.eager_step_ms,
            "step_ms": evidence.step_ms,
            "baseline_peak_bytes": evidence.baseline_peak_bytes,
            "peak_bytes": evidence.peak_bytes,
            "memory_limit_bytes": evidence.memory_limit_bytes,
            "trials": len(searched),
            "failed": sum(trial.failure is not None for trial in searched),
            "interrupted": self.interrupted,
            "untried": [asdict(each) for each in self.untried],
            "ablation": ablation.model_dump(mode="json") if ablation else None,
            "plan": self.plan.to_json(),
        }


@contextlib.contextmanager
def _same_draws() -> Iterator[None]:
    """Restores the state of Python's `random`, because packages that tuning imports draw from it."""
    state = random.getstate()
    try:
        yield
    finally:
        random.setstate(state)


@_same_draws()
def tune(
    model: torch.nn.Module,
    loss_fn: LossFn,
    optimizer: torch.optim.Optimizer,
    batch: tuple[Any, Any],
    *,
    budget: str | float | None = None,
    trials: int | None = None,
    memory_limit: str | int | None = None,
    database: str | None = None,
    ablation: bool = True,
) -> Plan:
    """The best measured plan for this training step on the model's device. Model, optimizer and RNG stay unchanged.

    `budget` is seconds or "90s", "5m", "1h"; `trials` a number of configurations. Without either, a budget is derived
    from an inspection of the model. `memory_limit`, bytes or "40GiB", asks for the fastest step whose peak memory is at
    most that, over the best stock configuration that fits.
    `ablation`: whether to measure afterwards, in what is left of a time budget, where the time of a step goes and what
    each choice contributes.
    Raises ExportError when the model cannot be exported to the measuring process, BaselineError when the step as given
    fails, NoTrialError when nothing could be measured. Ctrl-C ends the search: the best so far is confirmed and
    returned; a second one propagates as KeyboardInterrupt.
    """
    begun_s = time.monotonic()
    settings = settings_for_tuning()
    workload = Workload(model, loss_fn, optimizer, batch)
    run = new_run(runs.LIVE, str(device_of(model)), trials=trials, budget=budget, memory_limit=memory_limit)
    check_trains(model, optimizer)
    archive = to_archive(workload)
    with tempfile.TemporaryDirectory(prefix="kitsune-") as folder:
        path = Path(folder) / "model.ksn"
        archive.save(path)
        with Interrupts(_silent, _silent).installed() as interrupts:
            heard = interrupts.counted
            tuning = partial(Tuning, spec=str(path), ablates=ablation, interrupts=heard, begun_s=begun_s)
            return _tune(run, tuning, database or settings.database_url, interrupts.tell).plan


def tune_workload(
    spec: str,
    *,
    device: str | None = None,
    trials: int | None = None,
    budget: str | float | None = None,
    memory_limit: str | int | None = None,
    seed: int = 0,
    database: str | None = None,
    ablation: bool = True,
    tell: Tell | None = None,
    interrupts: Callable[[], int] = no_interrupts,
    begun_s: float | None = None,
) -> Result:
    """Like `tune` for "zoo:NAME", "FILE.py:FUNCTION" or "FILE.ksn". Raises WorkloadError too.

    `tell` is called with every event. `interrupts` returns how often the user has pressed Ctrl-C; the caller handles
    the signal itself. `begun_s`: start of the budget by the monotonic clock; default now.
    """
    settings = settings_for_tuning()
    check_spec(spec)
    run = new_run(spec, str(pick_device(device)), trials=trials, budget=budget, memory_limit=memory_limit, seed=seed)
    tuning = partial(Tuning, spec=located(spec), ablates=ablation, interrupts=interrupts, begun_s=begun_s)
    return _tune(run, tuning, database or settings.database_url, tell or _silent)


def new_run(
    workload: str,
    device: str,
    *,
    trials: int | None = None,
    budget: str | float | None = None,
    memory_limit: str | int | None = None,
    seed: int = 0,
) -> Run:
    """A new queued run, not yet stored. Raises SettingsError for an invalid budget or memory limit."""
    if trials is not None and not (isinstance(trials, int) and trials >= 1):
        raise SettingsError(f"trials is {trials!r}; it must be a whole number of at least 1")
    budget_s = None if budget is None else seconds_of(budget, "budget")
    return Run(
        id=new_id(),
        workload=workload,
        device=device,
        budget_trials=trials,
        budget_s=budget_s,
        memory_limit_bytes=parse_memory_limit(memory_limit),
        seed=seed,
        created_at=datetime.now(UTC),
    )


def _tune(run: Run, make: Make, database_url: str, tell: Tell) -> Result:
    with open_database(database_url) as database:
        try:
            with database.begin() as connection:
                runs.add(connection, run)
                claimed = runs.claim_one(connection, run.id, worker_name())
            assert claimed is not None, "a run added in this transaction is free to claim"
            tell(Started(claimed))
            diagnose = Fitness(claimed.device).why_unfit
            finished, conclusion = carry_out(database, claimed, make, tell, diagnose=diagnose)
        except (KeyboardInterrupt, SystemExit):
            with contextlib.suppress(StoreError), database.begin() as connection:
                runs.cancel(connection, run.id)  # no other process can continue it
            raise
        with database.read() as connection:
            tried = trials.list_of(connection, run.id)
    return Result(run=finished, plan=conclusion.plan, trials=tuple(tried), interrupted=conclusion.interrupted)


def _silent(_: object) -> None:
    return None
