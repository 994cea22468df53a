"""The list of runs, with filters and order in its URL. Its table refreshes itself."""

import hashlib
from typing import Any, Final

from fastapi import Request
from fastapi.responses import RedirectResponse, Response
from pydantic import ValidationError

from kitsune.base.base_record import canonical_json
from server.api.compare import MOST
from server.http.auth import caller
from server.http.context import Context, Here
from server.pages.frame import PageRouter, address_of, render
from server.pages.views import runs_view
from server.pages.views.compare_view import FEWEST
from server.pages.views.runs_view import PLACE, Wanted
from server.payloads.request_checks import refused
from server.payloads.schemas import query_of
from tuner.records import Verdict
from tuner.store.queries import runs
from tuner.store.queries.runs import Page, label_of
from tuner.store.queries.tokens import Scope
from tuner.terminal.views import standing
from tuner.wall_clock import utcnow

#: Runs on a page: one or two screens.
LIMIT: Final = 50
TABLE: Final = "/fragments/runs"
_SEEN: Final = "seen"
_READ_HERE: Final = {"parameters": query_of(Wanted)}

router = PageRouter(Scope.READ)


@router.get(PLACE, openapi_extra=_READ_HERE)
def show(request: Request, here: Here) -> Response:
    """The list. Invalid fields are shown again with a hint; blank ones are removed from the URL by a redirect."""
    given = _given(request)
    try:
        wanted = Wanted.model_validate(given)
    except ValidationError as error:
        wrong = runs_view.wrong_fields(error)
        if wrong is None:
            raise refused(error) from error
        rest = Wanted.model_validate({name: value for name, value in given.items() if name not in wrong})
        return _page(request, 422, given, wanted=rest, wrong=wrong, page=None, gpus=())
    if not all(value.strip() for value in given.values()):
        return RedirectResponse(wanted.address(), 303)
    return _page(request, 200, given, wrong={}, **_list(request, here, wanted))


@router.get(TABLE, openapi_extra=_READ_HERE)
def table(request: Request, here: Here) -> Response:
    """The table alone; 204 if it is unchanged since the digest `seen`."""
    try:
        wanted = Wanted.model_validate(_given(request))
    except ValidationError as error:
        raise refused(error) from error
    found = _list(request, here, wanted)
    if found["seen"] == request.query_params.get(_SEEN):
        return Response(status_code=204)
    return render(request, "runs_table.html", **found)


def _given(request: Request) -> dict[str, str]:
    return {name: value for name, value in request.query_params.items() if name != _SEEN}


def _page(request: Request, status: int, given: dict[str, str], **context: Any) -> Response:
    choices = {"statuses": runs_view.STANDINGS, "verdicts": Verdict, "ages": runs_view.AGES}
    shows_more = not given.keys().isdisjoint(runs_view.FIGURES)
    return render(request, "runs.html", status=status, given=given, shows_more=shows_more, **choices, **context)


def _list(request: Request, here: Context, wanted: Wanted) -> dict[str, Any]:
    now = utcnow()
    with here.database.read() as connection:
        page = runs.page(
            connection,
            team=caller(request).team,
            sort=wanted.sort,
            is_descending=wanted.order == "desc",
            after=wanted.after,
            limit=LIMIT,
            now=now,
            **wanted.filters(now),
        )
    seen = digest_of(page)
    return {
        "page": page,
        "wanted": wanted,
        "columns": runs_view.COLUMNS,
        "gpus": runs_view.gpus_of(page.runs),
        "seen": seen,
        "least_compared": FEWEST,
        "most_compared": MOST,
        "renewal": wanted.address(TABLE, **{_SEEN: seen}),
        "server": address_of(request),
        **view_functions(),
    }


def view_functions() -> dict[str, Any]:
    """Functions that the table of runs needs in its template context."""
    return {"model_of": label_of, "gpu_of": runs_view.gpu_of, "standing": standing}


def digest_of(page: Page) -> str:
    """A digest of everything that the table shows, except ages, which a script of the page updates."""
    shown = page.model_dump(mode="json", exclude={"runs": {"__all__": {"heartbeat_at", "lease_until"}}})
    stands = [standing(run) for run in page.runs]
    return hashlib.sha256(canonical_json([shown, stands]).encode()).hexdigest()[:16]
