"""The first page: the newest runs, how the queue stands, what to do first."""

from typing import Final

from fastapi import Request
from fastapi.responses import Response

from server.context import Here
from server.pages.frame import PageRouter, render, viewer
from server.pages.runs import view_functions
from server.pages.runs_view import COLUMNS
from tuner.store import runs
from tuner.store.tokens import Scope

NEWEST: Final = 10

router = PageRouter(Scope.READ)


@router.get("/")
def show(request: Request, here: Here) -> Response:
    team = viewer(request).team
    with here.database.read() as connection:
        newest = runs.page(connection, team=team, limit=NEWEST)
        counted = runs.count(connection, team=team)
    return render(
        request,
        "home.html",
        page=newest,
        counted=counted,
        columns=COLUMNS,
        wanted=None,
        server=str(request.base_url).rstrip("/"),
        **view_functions(),
    )
