"""`kitsune runs`: lists, shows, watches, cancels and deletes the runs of a database or a server."""

import math
import os
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Final, Protocol, TypeVar

from kitsune.base.atomic_write import writing
from kitsune.base.backoff import retried, within
from kitsune.base.durations import seconds_of
from kitsune.base.text_format import clean
from kitsune.cli import output
from kitsune.cli.exit_codes import ExitCode
from kitsune.client.remote_run import PATIENCE_S
from kitsune.errors import NotFoundError, PlanError, SettingsError, UnreachableError
from kitsune.plan import Plan
from tuner.planning.ablation import ablation_of
from tuner.records import Run, RunStatus, Trial
from tuner.terminal import views

LAST: Final = "last"
PAUSE_S: Final = 1.0  # between polls of a watched run, and between tries of a server that is away
#: After this time in the queue, a message asks whether a worker is running.
QUEUE_S: Final = 10.0

Answer = TypeVar("Answer")


class Ledger(Protocol):
    """Access to runs, in a database or on a server. `how_to_begin` is an example command that creates a run."""

    how_to_begin: str

    def page(
        self, *, status: RunStatus | None = None, after: str | None = None, limit: int
    ) -> tuple[Sequence[Run], str | None]:
        """Runs, newest first, and the cursor of the next page, if there is one."""

    def run(self, run_id: str) -> Run | None: ...

    def trials(self, run_id: str, after: int = -1) -> Sequence[Trial]:
        """All trials with a number above `after`, by number."""

    def plan(self, plan_id: str) -> Plan | None:
        """Raises PlanError when this version cannot read the stored plan."""

    def cancel(self, run_id: str) -> Run | None: ...

    def delete(self, run_id: str, *, with_plan: bool) -> object:
        """None when there is no such run. Raises ConflictError or RefusedError for a run that has not ended."""

    def count_ended(self, before: datetime) -> tuple[int, int]:
        """How many runs ended before `before`, and how many trials they have."""

    def delete_ended(self, before: datetime, *, with_plans: bool) -> int:
        """Deletes the runs that ended before `before`; returns how many."""


def list_runs(ledger: Ledger, *, limit: int, status: RunStatus | None, after: str | None, as_json: bool) -> None:
    runs, cursor = ledger.page(status=status, after=after, limit=limit)
    if as_json:
        output.emit({"runs": [run.model_dump(mode="json") for run in runs], "after": cursor})
    elif runs:
        output.stdout().print(views.run_table(runs, [_readable_plan(ledger, run) for run in runs]))
        if cursor is not None:
            output.note(f"There are more: --after {cursor}")
    else:
        output.note("No run stands so." if status else f"No runs yet. A first one: {ledger.how_to_begin}")


def show_run(ledger: Ledger, run_id: str, *, as_json: bool) -> None:
    """Raises NotFoundError."""
    run = _run(ledger, run_id)
    _show(run, ledger.trials(run.id), _plan_of(ledger, run), as_json=as_json)


def give_plan(ledger: Ledger, run_id: str, out: Path | None, *, as_json: bool) -> None:
    """Raises NotFoundError when there is no such run or it has no plan, SettingsError when `out` cannot be written."""
    run = _run(ledger, run_id)
    plan = _plan_of(ledger, run)
    if plan is None:
        why = f": {run.error}" if run.error else ""
        raise NotFoundError(f"run {run.id} has no plan, it is {views.standing(run)}{why}")
    if out is not None:
        save(plan, out, kept=f"run {run.id} keeps the plan")
    if as_json or out is None:
        output.emit(plan.to_json())


def watch_run(ledger: Ledger, run_id: str, *, as_json: bool) -> ExitCode:
    """Prints each trial on stderr until the run has ended, then shows the run.

    Tolerates a server that is unreachable for less than a minute. Raises NotFoundError.
    """
    run = _run(ledger, run_id)
    tried: list[Trial] = []
    hint_at = time.monotonic() + QUEUE_S
    while True:
        last = tried[-1].number if tried else -1
        for trial in _outlasting(partial(ledger.trials, run.id, after=last)):
            tried.append(trial)
            position = sum(known.source.is_search for known in tried)
            output.note(views.tried_line(trial, position, run.budget_trials))
        if run.status.is_finished:
            break
        if run.status is not RunStatus.QUEUED:
            hint_at = max(hint_at, time.monotonic() + QUEUE_S)
        elif time.monotonic() >= hint_at:
            output.note(f"run {run.id} is queued; is a worker running? (kitsune worker)")
            hint_at = math.inf
        time.sleep(PAUSE_S)
        run = _outlasting(partial(_run, ledger, run.id))
    _show(run, tried, _outlasting(partial(_plan_of, ledger, run)), as_json=as_json)
    return ExitCode.OK if run.status is RunStatus.FINISHED else ExitCode.NO_RESULT


def _outlasting(ask: Callable[[], Answer]) -> Answer:
    """Calls `ask` until the server answers. Raises UnreachableError after PATIENCE_S."""
    failures: list[Exception] = []

    def note_first(error: Exception) -> None:
        if not failures:
            output.note(f"The server is away, and the run goes on without it; asking again: {error}")
        failures.append(error)

    answer = retried(ask, UnreachableError, within(PATIENCE_S, repeat(PAUSE_S)), note_first)
    if failures:
        output.note("The server is back.")
    return answer


def cancel_run(ledger: Ledger, run_id: str, *, as_json: bool) -> None:
    """Cancels a run; an ended run is unchanged. Raises NotFoundError."""
    run = ledger.cancel(_run(ledger, run_id).id)
    if run is None:
        raise _no_run(run_id)
    if as_json:
        output.emit({"run": run.model_dump(mode="json")})
    else:
        output.note(f"Run {run.id} is {run.status.value}.")


def delete_run(ledger: Ledger, run_id: str, *, is_meant: bool, with_plan: bool, as_json: bool) -> None:
    """Deletes an ended run, or (unless `is_meant`) says what would be deleted.

    Raises NotFoundError, and SettingsError for a run that has not ended.
    """
    run = _run(ledger, run_id)
    if not run.status.is_finished:
        raise SettingsError(f"run {run.id} is {views.standing(run)}; cancel it first, or wait until it has ended")
    if is_meant and ledger.delete(run.id, with_plan=with_plan) is None:
        raise _no_run(run_id)
    _tell_deleted(f"run {run.id}", 1, run.trials, is_meant=is_meant, with_plans=with_plan, as_json=as_json)


def delete_old(ledger: Ledger, age: str, *, is_meant: bool, with_plans: bool, as_json: bool) -> None:
    """Like `delete_run` for all runs that ended longer ago than `age`. Raises SettingsError."""
    before = before_now(age, "--older-than")
    found, tried = ledger.count_ended(before)
    if is_meant:
        found = ledger.delete_ended(before, with_plans=with_plans)
    what = f"{found:,} run{'' if found == 1 else 's'} that ended before {before:%Y-%m-%d %H:%M} UTC"
    _tell_deleted(what, found, tried, is_meant=is_meant, with_plans=with_plans, as_json=as_json)


def before_now(age: str, what: str) -> datetime:
    """The moment `age` ("12h", "90d") ago. Raises SettingsError that names `what`."""
    try:
        return datetime.now(UTC) - timedelta(seconds=seconds_of(age, what))
    except OverflowError as error:
        raise SettingsError(f"{what} {age!r:.100} is longer than any run is old") from error


def _tell_deleted(what: str, count: int, tried: int, *, is_meant: bool, with_plans: bool, as_json: bool) -> None:
    if as_json:
        output.emit({"runs": count, "trials": tried, "deleted": is_meant})
        return
    plans = ", and plans with them" if with_plans else "; plans stay, and look-ups go on giving them"
    if is_meant:
        output.note(f"Deleted: {what}{plans}.")
    else:
        output.note(f"This would delete {what}, with {tried:,} trials{plans}. To do it, add --yes.")


def check_writable(out: Path, option: str = "--out") -> None:
    """Checks an output path before the work begins. Raises SettingsError, which names the option."""
    target = out if out.exists() else out.absolute().parent
    if not os.access(target, os.W_OK):
        raise SettingsError(f"{option} {out} cannot be written: {target} is missing or not yours to write")


def save(plan: Plan, out: Path, *, kept: str = "the plan is in the database") -> None:
    """Raises SettingsError when the file cannot be written; `kept` then tells where else the plan is stored."""
    with writing(f"--out {out}", note=f"; {kept}"):
        plan.save(out)
    output.note(f"The plan is in {out}")


def _show(run: Run, tried: Sequence[Trial], plan: Plan | None, *, as_json: bool) -> None:
    found = ablation_of(plan.knobs, tried, run.inapplicable) if plan else None
    if as_json:
        output.emit(
            {
                "run": run.model_dump(mode="json"),
                "trials": [trial.model_dump(mode="json") for trial in tried],
                "plan": plan.to_json() if plan else None,
                "ablation": found.model_dump(mode="json") if found else None,
            }
        )
        return
    console = output.stdout()
    for part in views.run_screen(run, tried, plan, found):
        console.print(clean(part) if isinstance(part, str) else part)


def _run(ledger: Ledger, run_id: str) -> Run:
    if run_id == LAST:
        newest, _ = ledger.page(limit=1)
        if not newest:
            raise NotFoundError("there are no runs yet; make one with kitsune tune")
        return newest[0]
    run = ledger.run(run_id)
    if run is None:
        raise _no_run(run_id)
    return run


def _no_run(run_id: str) -> NotFoundError:
    return NotFoundError(f"there is no run {run_id!r}; kitsune runs lists those that there are")


def _plan_of(ledger: Ledger, run: Run) -> Plan | None:
    return ledger.plan(run.plan_id) if run.plan_id else None


def _readable_plan(ledger: Ledger, run: Run) -> Plan | None:
    """None for an unreadable plan, so that it does not hide the other runs; `kitsune runs show` reports the error."""
    try:
        return _plan_of(ledger, run)
    except PlanError:
        return None
