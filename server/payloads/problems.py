"""Turns errors into problem+json answers (RFC 9457) with type, title, status, and a `detail` that says what to do.

`type` is a path of this server that has a page (docs/decisions/0011).

Internal details are not disclosed: the message of an error is sent only where the request caused it (4xx). Other
errors (5xx) are logged under the `instance` that the answer has.
"""

import logging
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from fastapi.routing import iter_route_contexts
from pydantic import ConfigDict, Field
from starlette.exceptions import HTTPException

from kitsune import errors
from kitsune.base.base_record import Record, canonical_json
from kitsune.errors import KitsuneError
from server.payloads.problem_types import BY_STATUS, PLACE, TYPES, slug_of

MEDIA_TYPE: Final = "application/problem+json"
API: Final = "/api/v1"
MAX_FIELDS: Final = 20
MAX_TEXT: Final = 2000

log = logging.getLogger("kitsune.server")


class WrongField(Record):
    """A part of a request that is refused."""

    field: str
    problem: str


class Problem(Record):
    """Why a request was not carried out, after RFC 9457."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "type": f"{PLACE}/not-found",
                    "title": "Not found",
                    "status": 404,
                    "detail": "there is no run '06g0'; GET /api/v1/runs lists them",
                }
            ]
        }
    )

    type: str = Field(description="path of the page about this type of problem")
    title: str
    status: int
    detail: str = Field(description="what is wrong with this request, and what to do")
    instance: str | None = None
    errors: tuple[WrongField, ...] = ()


@dataclass(frozen=True, slots=True)
class Kind:
    """How an error class is answered. `detail` None: with the message of the error, followed by `advice`."""

    slug: str
    detail: str | None = None
    advice: str = ""
    retry_after_s: int | None = None

    @property
    def status(self) -> int:
        return TYPES[self.slug].status


#: The first class in the method resolution order of an error decides.
KINDS: Final[Mapping[type[BaseException], Kind]] = {
    errors.ArchiveError: Kind("archive-refused", advice="; send a file that `kitsune export` made, as it is"),
    errors.PlanError: Kind("damaged", "the plan was altered after it was written; the server's owner must restore it"),
    errors.SettingsError: Kind("invalid"),
    errors.NotFoundError: Kind("not-found"),
    errors.CursorError: Kind("invalid-cursor"),
    errors.ConflictError: Kind("conflict"),
    errors.QuotaError: Kind("quota-exceeded", retry_after_s=60),
    errors.StoreBusyError: Kind("busy", "the database is busy; try again in a second", retry_after_s=1),
    errors.StoreFullError: Kind("full", "the server has no space left and kept nothing; its owner must free some"),
    errors.StoreError: Kind("unavailable", "the server's log says why; try again when it is mended", retry_after_s=1),
    KitsuneError: Kind("internal", "the server's log says why, under the instance given here"),
}

TITLES: Final[Mapping[int, str]] = {status: TYPES[slug].title for status, slug in BY_STATUS.items()}
DETAILS: Final[Mapping[int, str]] = {
    404: f"there is nothing at this path; this server has {API}, and /openapi.json lists its routes",
    405: "use one of the methods of the header Allow; /openapi.json lists all routes",
}

#: On every answer: no scripts, no framing, no content sniffing, no caching. Pages override some of them.
SECURITY_HEADERS: Final[Mapping[str, str]] = {
    "x-content-type-options": "nosniff",
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'; base-uri 'none'",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}


def install(app: FastAPI) -> None:
    """Registers handlers that answer every error of `app` with a problem."""
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(RequestValidationError, _on_invalid_request)
    app.add_exception_handler(KitsuneError, _on_kitsune_error)
    app.add_exception_handler(Exception, _on_unexpected_error)


def refusal(status: int, detail: str, headers: Mapping[str, str] | None = None) -> Response:
    """A problem whose type follows from the status."""
    return respond(slug_of(status), detail, status=status, headers=headers)


def respond(
    slug: str,
    detail: str,
    *,
    status: int | None = None,
    fields: tuple[WrongField, ...] = (),
    instance: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """A problem of the type `slug`; `status` overrides that of the type."""
    found = TYPES[slug]
    problem = Problem(
        type=f"{PLACE}/{slug}",
        title=found.title,
        status=status or found.status,
        detail=detail[:MAX_TEXT],
        instance=instance,
        errors=fields,
    )
    body = canonical_json(problem.model_dump(mode="json", exclude_defaults=True))
    return Response(body, problem.status, {**SECURITY_HEADERS, **(headers or {})}, media_type=MEDIA_TYPE)


def kind_of(error: type[KitsuneError]) -> Kind:
    return next(KINDS[known] for known in error.__mro__ if known in KINDS)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    is_plain = error.detail == HTTPStatus(error.status_code).phrase
    detail = DETAILS.get(error.status_code, error.detail) if is_plain else error.detail
    headers = {"allow": _methods(request)} if error.status_code == 405 else error.headers
    return refusal(error.status_code, detail, headers)


def _methods(request: Request) -> str:
    """All methods of the path; the framework names only those of the first router that has it. GET includes HEAD."""
    path = request.scope["path"]
    routes = [route for route in iter_route_contexts(request.app.routes) if route.path_regex.match(path)]
    found = {method for route in routes for method in route.methods or ()}
    return ", ".join(sorted(found | {"HEAD"} if "GET" in found else found))


async def _on_invalid_request(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    fields = wrong_fields(error.errors())
    detail = f"{fields[0].field}: {fields[0].problem}; /openapi.json shows what this route takes"
    return respond("invalid", detail, fields=fields)


async def _on_kitsune_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, KitsuneError)
    kind = kind_of(type(error))
    headers = {} if kind.retry_after_s is None else {"retry-after": str(kind.retry_after_s)}
    if kind.detail is None:
        return respond(kind.slug, f"{str(error)[: MAX_TEXT - len(kind.advice)]}{kind.advice}", headers=headers)
    return respond(kind.slug, kind.detail, instance=_logged(request, error), headers=headers)


async def _on_unexpected_error(request: Request, error: Exception) -> Response:
    """The server logs the traceback as well: Starlette raises the error again once this is sent."""
    kind = KINDS[KitsuneError]
    return respond(kind.slug, str(kind.detail), instance=_logged(request, error))


def wrong_fields(found: Any) -> tuple[WrongField, ...]:
    """The errors of pydantic, without the values that were sent."""
    return tuple(
        WrongField(
            field=".".join(str(part) for part in one["loc"][:8])[:100] or "body",
            problem=one["msg"].removeprefix("Value error, ")[:300],
        )
        for one in found[:MAX_FIELDS]
    )


def _logged(request: Request, error: Exception) -> str:
    instance = uuid.uuid4().urn
    log.error("%s: %s answered by %s: %s", instance, request.method, type(error).__name__, error)
    return instance
