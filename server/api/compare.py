"""The route that compares runs side by side."""

from collections.abc import Sequence
from typing import Annotated

from fastapi import Query, Request
from fastapi.responses import Response
from sqlalchemy import Connection

from kitsune.errors import SettingsError
from server.api.comparisons import MOST, Side, SideBySide, compare
from server.api.runs import require_run
from server.http.auth import GuardedRouter, caller
from server.http.context import Here
from server.payloads.schemas import answer, documented
from tuner.records import Run
from tuner.store.queries import plans, runs
from tuner.store.queries.tokens import Scope

router = GuardedRouter(Scope.READ, prefix="/api/v1/compare", tag="runs")


@router.get("", responses={200: {"model": SideBySide}, **documented(404)})
def compare_runs(
    request: Request,
    here: Here,
    ids: Annotated[
        str,
        Query(
            pattern=r"^[A-Za-z0-9_-]{1,64}(,[A-Za-z0-9_-]{1,64}){1,19}$",
            description=f"2 to {MOST} runs, separated by commas",
            examples=["06g0t3n8q4v0e4b6k1m2z5y7xc,06g0t3n8q4v0e4b6k1m2z5y7xd"],
        ),
    ],
    is_whole: Annotated[bool, Query(alias="all", description="also rows that are the same for all runs")] = False,
) -> Response:
    """Runs side by side: what differs, and warnings where GPUs or versions do."""
    names = ids.split(",")
    if len(set(names)) < len(names):
        raise SettingsError("a run is named twice in ids; name each once")
    with here.database.read() as connection:
        found = runs.get_all(connection, names, team=caller(request).team)
        sides = with_plans(connection, [require_run(found.get(name), name) for name in names], caller(request).team)
    return answer(compare(sides, is_whole=is_whole).model_dump(mode="json"))


def with_plans(connection: Connection, chosen: Sequence[Run], team: str) -> list[Side]:
    """The runs with their plans. A plan that this version cannot read is left out, and the run stays."""
    readable = plans.get_readable(connection, [run.plan_id for run in chosen if run.plan_id], team=team)
    return [Side(run, readable.get(run.plan_id or "")) for run in chosen]
