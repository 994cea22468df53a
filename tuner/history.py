"""The database in, its runs on the terminal out: `kitsune runs`."""

from pathlib import Path

from sqlalchemy import Connection

from kitsune import screen
from kitsune.errors import NotFoundError, PlanError, SettingsError
from kitsune.plan import Plan
from tuner import views
from tuner.records import Run, RunStatus
from tuner.settings import Settings
from tuner.store import plans, runs, trials
from tuner.store.database import Database
from tuner.store.engine import open_database

LAST = "last"
FIRST = "kitsune tune 'zoo:lenet5?batch=64' --trials 12"


def list_runs(
    database_url: str | None, *, limit: int, status: RunStatus | None, after: str | None, as_json: bool
) -> None:
    with _open(database_url) as database, database.read() as connection:
        page = runs.page(connection, status=status, after=after, limit=limit)
        found = [_readable_plan(connection, run) for run in page.runs]
    if as_json:
        screen.emit(page.model_dump(mode="json"))
    elif page.runs:
        screen.stdout().print(views.run_table(page.runs, found))
        if page.after is not None:
            screen.note(f"There are more: --after {page.after}")
    else:
        screen.note("No run stands so." if status else f"No runs yet. A first one: {FIRST}")


def show_run(database_url: str | None, run_id: str, *, as_json: bool) -> None:
    """Raises NotFoundError."""
    with _open(database_url) as database, database.read() as connection:
        run = _run(connection, run_id)
        tried = trials.list_of(connection, run.id)
        plan = _plan_of(connection, run)
    if as_json:
        screen.emit(
            {
                "run": run.model_dump(mode="json"),
                "trials": [trial.model_dump(mode="json") for trial in tried],
                "plan": plan.to_json() if plan else None,
            }
        )
        return
    console = screen.stdout()
    for part in views.run_screen(run, tried, plan):
        console.print(screen.clean(part) if isinstance(part, str) else part)


def give_plan(database_url: str | None, run_id: str, out: Path | None, *, as_json: bool) -> None:
    """Raises NotFoundError when there is no such run or it has no plan, SettingsError when `out` cannot be written."""
    with _open(database_url) as database, database.read() as connection:
        run = _run(connection, run_id)
        plan = _plan_of(connection, run)
    if plan is None:
        why = f": {run.error}" if run.error else ""
        raise NotFoundError(f"run {run.id} has no plan, it is {run.status.value}{why}")
    if out is not None:
        save(plan, out)
    if as_json or out is None:
        screen.emit(plan.to_json())


def save(plan: Plan, out: Path) -> None:
    """Raises SettingsError when the file cannot be written."""
    try:
        plan.save(out)
    except OSError as error:
        raise SettingsError(f"--out {out} cannot be written: {error.strerror}; the plan is in the database") from error
    screen.note(f"The plan is in {out}")


def _open(database_url: str | None) -> Database:
    return open_database(database_url or Settings.from_environment().database_url)


def _run(connection: Connection, run_id: str) -> Run:
    if run_id == LAST:
        newest = runs.page(connection, limit=1).runs
        if not newest:
            raise NotFoundError("there are no runs yet; make one with kitsune tune")
        return newest[0]
    run = runs.get(connection, run_id)
    if run is None:
        raise NotFoundError(f"there is no run {run_id!r}; kitsune runs lists those that there are")
    return run


def _plan_of(connection: Connection, run: Run) -> Plan | None:
    return plans.get(connection, run.plan_id) if run.plan_id else None


def _readable_plan(connection: Connection, run: Run) -> Plan | None:
    """One plan that this version cannot read must not hide the other runs; `kitsune runs show` tells of it."""
    try:
        return _plan_of(connection, run)
    except PlanError:
        return None
