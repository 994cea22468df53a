"""The page that compares runs."""

import re
from typing import Annotated, Final

from fastapi import Query, Request
from fastapi.responses import Response

from kitsune.errors import SettingsError
from server.api.compare import MOST, with_plans
from server.http.auth import caller
from server.http.context import Here
from server.pages.frame import PageRouter, render
from server.pages.run import require_run
from server.pages.views.compare_view import FEWEST, compare_view
from server.payloads.schemas import RUN_ID
from tuner.store.queries import runs
from tuner.store.queries.tokens import Scope

_ID: Final = re.compile(RUN_ID)

router = PageRouter(Scope.READ)

Ids = Annotated[
    tuple[str, ...], Query(max_length=1000, description="ids of runs, as repeated parameters or separated by commas")
]


@router.get("/compare")
def compare(
    request: Request, here: Here, ids: Ids = (), *, every: Annotated[bool, Query(alias="all")] = False
) -> Response:
    """The rows that differ; all rows with `all`."""
    wanted = list(dict.fromkeys(filter(None, (one.strip() for given in ids for one in given.split(",")))))
    if not FEWEST <= len(wanted) <= MOST:
        return render(request, "compare_choice.html", status=422, fewest=FEWEST, most=MOST, chosen=len(wanted))
    if not all(map(_ID.fullmatch, wanted)):
        raise SettingsError("ids contains something that is not the id of a run; the list of runs has the ids")
    with here.database.read() as connection:
        found = runs.get_all(connection, wanted, team=caller(request).team)
        chosen = [require_run(found.get(run_id), run_id) for run_id in wanted]
        pairs = with_plans(connection, chosen, caller(request).team)
    view = compare_view(pairs, shows_all=every)
    return render(request, "compare.html", view=view, runs=chosen, ids=",".join(wanted), shows_all=every)
