"""An error in, an answer of problem+json (RFC 9457) out: type, title, status, and in `detail` what to do.

Nothing internal leaves: the text of an error of ours goes out only where the request caused it (4xx). What went wrong
inside (5xx) is written to the log under the `instance` that the client is told.
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
from pydantic import ConfigDict
from starlette.exceptions import HTTPException

from kitsune import errors
from kitsune.errors import KitsuneError
from kitsune.record import Record, canonical_json

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
                    "type": "urn:kitsune:problem:not-found",
                    "title": "Not found",
                    "status": 404,
                    "detail": "there is no run '06g0'; GET /api/v1/runs lists them",
                }
            ]
        }
    )

    type: str
    title: str
    status: int
    detail: str
    instance: str | None = None
    errors: tuple[WrongField, ...] = ()


@dataclass(frozen=True)
class Kind:
    """How an error of ours is answered; `detail` None: by its own message, and `way_out` where that names none."""

    status: int
    slug: str
    title: str
    detail: str | None = None
    way_out: str = ""


#: The nearest class of an error decides.
KINDS: Final[Mapping[type[BaseException], Kind]] = {
    errors.ArchiveError: Kind(
        422, "archive-refused", "The archive is refused", way_out="; send a file that `kitsune export` made, as it is"
    ),
    errors.SettingsError: Kind(422, "invalid", "The request makes no sense"),
    errors.NotFoundError: Kind(404, "not-found", "Not found"),
    errors.CursorError: Kind(422, "invalid-cursor", "The cursor is not one of ours"),
    errors.ConflictError: Kind(409, "conflict", "The request contradicts what is there"),
    errors.StoreBusyError: Kind(503, "busy", "The database is busy", "the database is busy; try again in a second"),
    errors.StoreFullError: Kind(
        507, "full", "No space is left", "the server has no space left and kept nothing; its owner must free some"
    ),
    errors.StoreError: Kind(
        503, "unavailable", "The database cannot be used", "the server's log says why; try again when it is mended"
    ),
    KitsuneError: Kind(
        500, "internal", "The server failed", "the server's log says why, under the instance given here"
    ),
}

TITLES: Final[Mapping[int, str]] = {
    400: "The request cannot be read",
    401: "A token is needed",
    403: "Not allowed",
    404: "Not found",
    405: "This route has no such method",
    408: "The request came too slowly",
    409: "The request contradicts what is there",
    413: "The request is too large",
    415: "Another content type is needed",
    421: "This server does not go by that name",
    422: "The request makes no sense",
    431: "The head of the request is too large",
    500: "The server failed",
    503: "The database cannot be used now",
    507: "No space is left",
}
DETAILS: Final[Mapping[int, str]] = {
    404: f"there is nothing at this path; this server speaks {API}, and /openapi.json lists its routes",
    405: "use one of the methods of the header Allow; /openapi.json lists all routes",
}

#: On every answer: nothing here is a page, a script, or meant to be framed, guessed at or kept by a proxy.
SECURITY_HEADERS: Final[Mapping[str, str]] = {
    "x-content-type-options": "nosniff",
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'; base-uri 'none'",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}


def install(app: FastAPI) -> None:
    """From here on every error leaves `app` as a problem."""
    app.add_exception_handler(HTTPException, _of_status)
    app.add_exception_handler(RequestValidationError, _of_fields)
    app.add_exception_handler(KitsuneError, _of_ours)
    app.add_exception_handler(Exception, _of_unforeseen)


def refusal(status: int, detail: str, headers: Mapping[str, str] | None = None) -> Response:
    """The answer to a request that is refused for a reason that the status names well enough."""
    slug = HTTPStatus(status).phrase.lower().replace(" ", "-")
    return respond(Kind(status, slug, TITLES.get(status, HTTPStatus(status).phrase)), detail, headers=headers)


def respond(
    kind: Kind,
    detail: str,
    *,
    fields: tuple[WrongField, ...] = (),
    instance: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    problem = Problem(
        type=f"urn:kitsune:problem:{kind.slug}",
        title=kind.title,
        status=kind.status,
        detail=detail[:MAX_TEXT],
        instance=instance,
        errors=fields,
    )
    body = canonical_json(problem.model_dump(mode="json", exclude_defaults=True))
    return Response(body, kind.status, {**SECURITY_HEADERS, **(headers or {})}, media_type=MEDIA_TYPE)


def kind_of(error: type[KitsuneError]) -> Kind:
    return next(KINDS[known] for known in error.__mro__ if known in KINDS)


async def _of_status(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    is_plain = error.detail == HTTPStatus(error.status_code).phrase
    detail = DETAILS.get(error.status_code, error.detail) if is_plain else error.detail
    return refusal(error.status_code, detail, error.headers)


async def _of_fields(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    fields = wrong_fields(error.errors())
    kind = Kind(422, "invalid", TITLES[422])
    detail = f"{fields[0].field}: {fields[0].problem}; /openapi.json shows what this route takes"
    return respond(kind, detail, fields=fields)


async def _of_ours(request: Request, error: Exception) -> Response:
    assert isinstance(error, KitsuneError)
    kind = kind_of(type(error))
    if kind.detail is None:
        return respond(kind, f"{str(error)[: MAX_TEXT - len(kind.way_out)]}{kind.way_out}")
    headers = {"retry-after": "1"} if kind.status == 503 else None
    return respond(kind, kind.detail, instance=_logged(request, error), headers=headers)


async def _of_unforeseen(request: Request, error: Exception) -> Response:
    """The server logs the traceback as well: Starlette raises the error again once this is sent."""
    kind = KINDS[KitsuneError]
    return respond(kind, str(kind.detail), instance=_logged(request, error))


def wrong_fields(found: Any) -> tuple[WrongField, ...]:
    """What pydantic found, without repeating what was sent."""
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
