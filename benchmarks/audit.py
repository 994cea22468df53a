"""A drained database and what was acknowledged in; every broken promise out, in words."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from sqlalchemy import select

from tuner.records import Run, RunStatus, Source, Trial
from tuner.store import tables
from tuner.store.database import Database
from tuner.store.queries import plans, runs, trials

#: How a run ends that took down so many workers in a row without one more trial: as it should.
IN_VAIN: Final = "the worker vanished before the run had ended"


@dataclass(frozen=True, slots=True)
class Audit:
    """What became of the runs. `lost`, `doubled`, `failed`, `miscounted` and `misplanned` are faults, each in words."""

    finished: int = 0
    in_vain: int = 0
    trials: int = 0
    resumed: int = 0  #: runs that went on from the trials of a worker that had died
    lost: list[str] = field(default_factory=list)
    doubled: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    miscounted: list[str] = field(default_factory=list)
    misplanned: list[str] = field(default_factory=list)

    @property
    def faults(self) -> list[str]:
        return [*self.lost, *self.doubled, *self.failed, *self.miscounted, *self.misplanned]


def audited(database: Database, acknowledged: Sequence[str], before: frozenset[str] = frozenset()) -> Audit:
    """Of the runs whose ids clients were told; those of `before` are none of ours."""
    kept = ids_of(database) - before
    found = [_look(database, run_id) for run_id in sorted(kept & set(acknowledged))]
    current = [run for run, _, _ in found]
    return Audit(
        finished=sum(run.status is RunStatus.FINISHED for run in current),
        in_vain=sum(map(_is_in_vain, found)),
        trials=sum(len(tried) for _, tried, _ in found),
        resumed=sum(len(set(attempts)) > 1 for _, _, attempts in found),
        lost=[
            *(f"run {run_id} was acknowledged and is not there" for run_id in sorted(set(acknowledged) - kept)),
            *(f"run {run.id} is {run.status}" for run in current if not run.status.is_finished),
        ],
        doubled=[
            *(f"run {run_id} answers to nobody's submit" for run_id in sorted(kept - set(acknowledged))),
            *(f"run {run_id} answers to two submits" for run_id in _repeated(acknowledged)),
        ],
        failed=[
            f"run {seen[0].id} is {seen[0].status}: {seen[0].error}"
            for seen in found
            if seen[0].status in (RunStatus.FAILED, RunStatus.CANCELLED) and not _is_in_vain(seen)
        ],
        miscounted=[fault for run, tried, attempts in found for fault in _miscounts(run, tried, attempts)],
        misplanned=[fault for run in current for fault in _misplans(database, run)],
    )


def ids_of(database: Database) -> frozenset[str]:
    with database.read() as connection:
        return frozenset(connection.scalars(select(tables.runs.c.id)))


def unfinished(database: Database) -> int:
    with database.read() as connection:
        return sum(number for status, number in runs.count(connection).items() if not status.is_finished)


def _look(database: Database, run_id: str) -> tuple[Run, list[Trial], list[int]]:
    """The run, its trials, and the attempt that stored each."""
    trial = tables.trials.c
    with database.read() as connection:
        run = runs.get(connection, run_id)
        assert run is not None
        stored = select(trial.attempt).where(trial.run_id == run_id).order_by(trial.number)
        return run, trials.list_of(connection, run_id), list(connection.scalars(stored))


def _is_in_vain(seen: tuple[Run, list[Trial], list[int]]) -> bool:
    run, _, _ = seen
    said_so = run.status is RunStatus.FAILED and (run.error or "").startswith(IN_VAIN)
    return said_so and run.deaths >= runs.MAX_DEATHS


def _repeated(acknowledged: Sequence[str]) -> list[str]:
    return sorted(run_id for run_id, count in Counter(acknowledged).items() if count > 1)


def _miscounts(run: Run, tried: Sequence[Trial], attempts: Sequence[int]) -> Iterator[str]:
    if [trial.number for trial in tried] != list(range(len(tried))):
        yield f"run {run.id} has the trials {[trial.number for trial in tried]}"
    if list(attempts) != sorted(attempts) or max(attempts, default=0) > run.attempt:
        yield f"run {run.id} of attempt {run.attempt} has trials of the attempts {list(attempts)}"
    searched = [tuple(sorted(trial.knobs.items())) for trial in tried if trial.source.is_search]
    if len(set(searched)) != len(searched):
        yield f"run {run.id} tried one configuration twice"
    if run.status is RunStatus.FINISHED and len(searched) != run.budget_trials:
        yield f"run {run.id} was to try {run.budget_trials} configurations and tried {len(searched)}"
    if sum(trial.source is Source.PLAYOFF for trial in tried) > 1:
        yield f"run {run.id} was played off twice"


def _misplans(database: Database, run: Run) -> Iterator[str]:
    plan = tables.plans.c
    with database.read() as connection:
        written = connection.execute(select(plan.plan_id).where(plan.run_id == run.id)).all()
        stored = plans.get(connection, run.plan_id) if run.plan_id else None
    wanted = [run.plan_id] if run.status is RunStatus.FINISHED else []
    if [row.plan_id for row in written] != wanted:
        yield f"run {run.id} is {run.status} with the plan {run.plan_id}, and {len(written)} plans were written"
    elif wanted and (stored is None or stored.evidence is None or stored.evidence.run_id != run.id):
        yield f"run {run.id} has a plan with the evidence of another"
