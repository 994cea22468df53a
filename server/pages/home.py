"""The home page: the newest runs, the queue and first steps. Tokens that may only submit get the form instead."""

from typing import Final

from fastapi import Request
from fastapi.responses import RedirectResponse, Response

from server.http.auth import allows, caller
from server.http.context import Here
from server.pages.frame import PageRouter, address_of, render
from server.pages.runs import view_functions
from server.pages.submit import PLACE as SUBMIT
from server.pages.views.runs_view import COLUMNS
from tuner.store.queries import runs
from tuner.store.queries.tokens import Scope

NEWEST: Final = 10

router = PageRouter(None)


@router.get("/")
def show(request: Request, here: Here) -> Response:
    if not allows(caller(request), Scope.READ):
        return RedirectResponse(SUBMIT, 303)
    team = caller(request).team
    with here.database.read() as connection:
        newest = runs.page(connection, team=team, limit=NEWEST)
        counted = runs.count(connection, team=team)
        lost = runs.count_lost(connection, team=team)
    return render(
        request,
        "home.html",
        page=newest,
        counted=counted,
        lost=lost,
        columns=COLUMNS,
        wanted=None,
        server=address_of(request),
        **view_functions(),
    )
