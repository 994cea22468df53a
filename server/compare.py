"""Ids of runs in, what they differ in out."""

from typing import Annotated

from fastapi import Query, Request
from fastapi.responses import Response
from sqlalchemy import Connection

from kitsune.errors import PlanError, SettingsError
from kitsune.plan import Plan
from server.auth import GuardedRouter, caller
from server.comparisons import MOST, Side, SideBySide, compare
from server.context import Here
from server.runs import existing
from server.schemas import answer, documented
from tuner.records import Run
from tuner.store import plans, runs
from tuner.store.tokens import Scope

router = GuardedRouter(Scope.READ, prefix="/api/v1/compare", tag="runs")


@router.get("", responses={200: {"model": SideBySide}, **documented(404)})
def compare_runs(
    request: Request,
    here: Here,
    ids: Annotated[
        str,
        Query(
            pattern=r"^[A-Za-z0-9_-]{1,64}(,[A-Za-z0-9_-]{1,64}){1,19}$",
            description=f"2 to {MOST} runs, by commas",
            examples=["06g0t3n8q4v0e4b6k1m2z5y7xc,06g0t3n8q4v0e4b6k1m2z5y7xd"],
        ),
    ],
    is_whole: Annotated[bool, Query(alias="all", description="also what is the same")] = False,
) -> Response:
    """Runs side by side: what differs, and warnings where GPUs or versions do."""
    names = ids.split(",")
    if len(set(names)) < len(names):
        raise SettingsError("a run is named twice in ids; name each once")
    with here.database.read() as connection:
        sides = [side_of(connection, name, caller(request).team) for name in names]
    return answer(compare(sides, is_whole=is_whole).model_dump(mode="json"))


def side_of(connection: Connection, run_id: str, team: str) -> Side:
    """Raises NotFoundError."""
    run = existing(runs.get(connection, run_id, team=team), run_id)
    return Side(run, readable_plan(connection, run, team))


def readable_plan(connection: Connection, run: Run, team: str) -> Plan | None:
    """One plan that this version cannot read must not hide the other runs."""
    try:
        return plans.get(connection, run.plan_id, team=team) if run.plan_id else None
    except PlanError:
        return None
