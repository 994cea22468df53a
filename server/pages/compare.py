"""The ids of several runs in; the page of what differs between them out."""

import re
from typing import Annotated, Final

from fastapi import Query, Request
from fastapi.responses import Response
from sqlalchemy import Connection

from kitsune.errors import SettingsError
from server.compare import readable_plan
from server.comparisons import MOST
from server.context import Here
from server.pages.compare_view import FEWEST, Pair, compare_view
from server.pages.frame import PageRouter, render, viewer
from server.pages.run import existing
from server.schemas import RUN_ID
from tuner.store import runs
from tuner.store.tokens import Scope

_ID: Final = re.compile(RUN_ID)

router = PageRouter(Scope.READ)

Ids = Annotated[list[str], Query(max_length=1000, description="ids of runs, each its own parameter or between commas")]


@router.get("/compare")
def compare(request: Request, here: Here, ids: Ids, *, every: Annotated[bool, Query(alias="all")] = False) -> Response:
    """Only what differs, unless all is asked for."""
    wanted = list(dict.fromkeys(filter(None, (one.strip() for given in ids for one in given.split(",")))))
    if not FEWEST <= len(wanted) <= MOST:
        raise SettingsError(f"choose {FEWEST} to {MOST} runs to compare; these are {len(wanted)}")
    if not all(map(_ID.fullmatch, wanted)):
        raise SettingsError("these are no ids of runs; the list of runs has them")
    with here.database.read() as connection:
        pairs = [_pair(connection, run_id, viewer(request).team) for run_id in wanted]
    view = compare_view(pairs, shows_all=every)
    chosen = [run for run, _ in pairs]
    return render(request, "compare.html", view=view, runs=chosen, ids=",".join(wanted), shows_all=every)


def _pair(connection: Connection, run_id: str, team: str) -> Pair:
    """Raises NotFoundError. A plan that cannot be read is none."""
    run = existing(runs.get(connection, run_id, team=team), run_id)
    return run, readable_plan(connection, run, team)
