"""Trials of a run. Each is stored once, with raw samples or the reason of its failure."""

from sqlalchemy import Connection, select

from kitsune.errors import StoreError
from tuner.records import Run, Source, Trial
from tuner.store import tables
from tuner.store.lease import insert_if_held, update_if_held
from tuner.store.rows import from_row, to_row

_trials = tables.trials


def add(connection: Connection, run: Run, trial: Trial) -> bool:
    """Stores a trial of the claimed run and counts it. Returns whether it was new; an existing trial is kept.

    A new trial is progress, so it resets the count of deaths. A confirmation does so only if it failed, because the
    next worker repeats it until its plan is stored. Raises LeaseLostError when the run is no longer this worker's.
    """
    if trial.run_id != run.id:
        raise StoreError(f"trial {trial.number} belongs to run {trial.run_id}, not to run {run.id}")
    row = to_row(
        trial,
        attempt=run.attempt,
        verdict=trial.comparison.verdict if trial.comparison else None,
        speedup=trial.comparison.speedup.median if trial.comparison else None,
        failure_kind=trial.failure.kind if trial.failure else None,
    )
    is_new = insert_if_held(connection, run, _trials, row)
    if is_new:
        anew = {"deaths": 0} if trial.source is not Source.CONFIRM or trial.failure is not None else {}
        update_if_held(connection, run, trials=tables.runs.c.trials + 1, **anew)
    return is_new


def list_of(connection: Connection, run_id: str, *, after: int = -1, limit: int | None = None) -> list[Trial]:
    """The trials of a run numbered above `after`, at most `limit`, by number; empty when there is no such run."""
    statement = (
        select(_trials)
        .where(_trials.c.run_id == run_id, _trials.c.number > after)
        .order_by(_trials.c.number)
        .limit(limit)
    )
    return [from_row(Trial, _trials, row) for row in connection.execute(statement)]
