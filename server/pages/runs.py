"""The list of runs: filters and order in its address, a part of it that renews itself."""

import hashlib
from typing import Annotated, Any, Final

from fastapi import Depends, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from pydantic import ValidationError

from kitsune.record import canonical_json
from server.context import Context, Here
from server.pages import runs_view
from server.pages.frame import PageRouter, render, viewer
from server.pages.headline_view import workload_name
from server.pages.runs_view import PLACE, Wanted
from server.schemas import query_of
from tuner.records import RunStatus, Verdict
from tuner.store import runs
from tuner.store.runs import Page
from tuner.store.tokens import Scope
from tuner.views import standing

#: So many runs on a page: what a screen or two hold.
LIMIT: Final = 50
TABLE: Final = "/fragments/runs"
_SEEN: Final = "seen"
_READ_HERE: Final = {"parameters": query_of(Wanted)}

router = PageRouter(Scope.READ)


async def wanted_of(request: Request) -> Wanted:
    """Raises RequestValidationError."""
    given = {name: value for name, value in request.query_params.items() if name != _SEEN}
    try:
        return Wanted.model_validate(given)
    except ValidationError as error:
        raise RequestValidationError(error.errors(include_url=False, include_input=False)) from error


Asked = Annotated[Wanted, Depends(wanted_of)]


@router.get(PLACE, openapi_extra=_READ_HERE)
def show(request: Request, here: Here, wanted: Asked) -> Response:
    return render(request, "runs.html", statuses=RunStatus, verdicts=Verdict, **_list(request, here, wanted))


@router.get(TABLE, openapi_extra=_READ_HERE)
def table(request: Request, here: Here, wanted: Asked) -> Response:
    """The table alone; 204 when it is still as `seen` names it."""
    found = _list(request, here, wanted)
    if found["seen"] == request.query_params.get(_SEEN):
        return Response(status_code=204)
    return render(request, "runs_table.html", **found)


def _list(request: Request, here: Context, wanted: Wanted) -> dict[str, Any]:
    with here.database.read() as connection:
        page = runs.page(connection, team=viewer(request).team, limit=LIMIT, **wanted.filters)
    seen = digest_of(page)
    return {
        "page": page,
        "wanted": wanted,
        "columns": runs_view.COLUMNS,
        "gpus": runs_view.gpus_of(page.runs),
        "seen": seen,
        "renewal": wanted.address(TABLE, **{_SEEN: seen}),
        "server": str(request.base_url).rstrip("/"),
        **view_functions(),
    }


def view_functions() -> dict[str, Any]:
    """What the table of runs asks of a run, for every template that holds one."""
    return {"model_of": workload_name, "gpu_of": runs_view.gpu_of, "standing": standing}


def digest_of(page: Page) -> str:
    """Of all that the table shows of its runs, but for their ages, which the page counts on by itself."""
    shown = page.model_dump(mode="json", exclude={"runs": {"__all__": {"heartbeat_at", "lease_until"}}})
    stands = [standing(run) for run in page.runs]
    return hashlib.sha256(canonical_json([shown, stands]).encode()).hexdigest()[:16]
