"""The pages of problems: errors as HTML, with the text of the API's problem, and what each type means."""

import json
from collections.abc import Awaitable, Callable
from functools import partial
from inspect import isawaitable
from typing import Any, cast

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import RedirectResponse, Response
from starlette.exceptions import HTTPException

from kitsune.errors import KitsuneError
from server.pages.frame import OpenPageRouter, PageRoute, render
from server.payloads.problem_types import PLACE, TYPES
from server.payloads.problems import API, MEDIA_TYPE, SECURITY_HEADERS

Handler = Callable[[Request, Exception], Response | Awaitable[Response]]

router = OpenPageRouter()


@router.get(PLACE)
def show_types(request: Request) -> Response:
    return render(request, "problem_types.html", types=TYPES, place=PLACE)


@router.get(PLACE + "/{slug}")
def show_type(request: Request, slug: str) -> Response:
    if slug not in TYPES:
        raise HTTPException(404, f"there is no problem of this name; {PLACE} lists them")
    return render(request, "problem_type.html", slug=slug, found=TYPES[slug], place=PLACE)


def install(app: FastAPI) -> None:
    """Wraps the error handlers of `app`, so that they answer with a page where a page was requested."""
    for kind in (HTTPException, RequestValidationError, KitsuneError, Exception):
        app.add_exception_handler(kind, partial(_of_page, cast(Handler, app.exception_handlers[kind])))


async def _of_page(handler: Handler, request: Request, error: Exception) -> Response:
    answered = handler(request, error)
    answer = await answered if isawaitable(answered) else answered
    if 300 <= answer.status_code < 400:
        return RedirectResponse(answer.headers["location"], answer.status_code, SECURITY_HEADERS)
    if not wants_page(request) or answer.media_type != MEDIA_TYPE:
        return answer
    kept = {name: answer.headers[name] for name in ("retry-after", "allow", "hx-refresh") if name in answer.headers}
    page = render(request, "problem.html", status=answer.status_code, problem=_told(answer))
    page.headers.update(
        {**{name: value for name, value in SECURITY_HEADERS.items() if name not in page.headers}, **kept}
    )
    return page


def wants_page(request: Request) -> bool:
    """Whether the request is for a page, or by a browser for an unknown path outside the API."""
    if isinstance(request.scope.get("route"), PageRoute):
        return True
    is_of_api = request.url.path == API or request.url.path.startswith(f"{API}/")
    return "route" not in request.scope and not is_of_api and "text/html" in request.headers.get("accept", "")


def _told(answer: Response) -> dict[str, Any]:
    """The problem, without hints that are only useful to programs."""
    problem = {"instance": None, "errors": (), **json.loads(bytes(answer.body))}
    if problem["status"] == 404 and API in problem["detail"]:
        problem["detail"] = "there is nothing at this address; it may have been mistyped, or belong to another team"
    problem["detail"] = problem["detail"].partition("; /openapi.json")[0].rstrip(".")
    return problem
