"""The progress of a run that has not ended."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from server.charts.drawing import words
from tuner.records import Run, RunStatus, Source, Trial
from tuner.statistics.plan_evidence import words as in_words
from tuner.terminal.views import is_lost


@dataclass(frozen=True, slots=True)
class Progress:
    """The current activity. `share`: the spent part of the budget, 0 to 1, None if unknown."""

    doing: str
    share: float | None
    facts: tuple[tuple[str, str], ...]
    seen: int


def progress(run: Run, trials: Sequence[Trial], now: datetime) -> Progress | None:
    """None for a run that has ended."""
    if run.status.is_finished:
        return None
    return Progress(_doing(run, trials, now), _share(run, trials, now), tuple(_facts(run, trials, now)), seen(trials))


def seen(trials: Sequence[Trial]) -> int:
    """The number of trials that the page shows, which it sends when it polls for updates."""
    return trials[-1].number + 1 if trials else 0


def searched(trials: Sequence[Trial]) -> list[Trial]:
    return [trial for trial in trials if trial.source.is_search]


def _doing(run: Run, trials: Sequence[Trial], now: datetime) -> str:
    if run.status is RunStatus.QUEUED:
        return "Waiting for a worker: one is started by kitsune worker."
    if is_lost(run, now):
        return "Waiting for another worker of this kind, which goes on after the last trial."
    if not trials:
        return "Looking at the step as given."
    if run.plan_id is not None:
        return "The plan is final. Measuring what each of its choices gives."
    if trials[-1].source in (Source.PLAYOFF, Source.CONFIRM) or _is_spent(run, trials):
        return "Measuring the best again, in fresh processes."
    total = f" of {run.budget_trials:,}" if run.budget_trials else ""
    return f"Measuring trial {len(searched(trials)) + 1:,}{total}."


def _is_spent(run: Run, trials: Sequence[Trial]) -> bool:
    return run.budget_trials is not None and len(searched(trials)) >= run.budget_trials


def _share(run: Run, trials: Sequence[Trial], now: datetime) -> float | None:
    spent = []
    if run.budget_trials:
        spent.append(len(searched(trials)) / run.budget_trials)
    if run.budget_s and run.started_at:
        spent.append((now - run.started_at).total_seconds() / run.budget_s)
    return min(1.0, max(0.0, *spent)) if spent else None


def _facts(run: Run, trials: Sequence[Trial], now: datetime) -> list[tuple[str, str]]:
    since = run.started_at or run.created_at
    name = "running for" if run.started_at else "queued for"
    found = [(name, words.lasted(max(0.0, (now - since).total_seconds())))]
    if run.worker:
        found.append(("worker", run.worker))
    if trials:
        last = trials[-1]
        found.append(("last trial", f"{in_words(last.knobs)}, tried in {words.lasted(last.took_s)}"))
    return found
