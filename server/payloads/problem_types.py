"""The table of problem types: status, title, meaning, causes and remedies.

Answers, the pages under /problems and docs/troubleshooting.md are generated from it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from kitsune.submission.format.limits import MAX_ARCHIVE_BYTES

#: Path of the pages of problem types; `type` of a problem is this and its slug.
PLACE: Final = "/problems"


@dataclass(frozen=True, slots=True)
class ProblemType:
    """A problem type. Text between backticks is code."""

    status: int
    title: str
    means: str
    why: str
    do: str


TYPES: Final[Mapping[str, ProblemType]] = {
    "bad-request": ProblemType(
        400,
        "The request cannot be read",
        "The server could not parse the request, so no route has handled it.",
        "It is not HTTP/1.1, its path is longer than 64 KiB, it has no single header `Host` or a `Content-Length` that "
        "is not a number, a form has too many fields, or the client disconnected during the request.",
        "Use a common HTTP client. Behind a proxy, check what the proxy changes.",
    ),
    "unauthorized": ProblemType(
        401,
        "A token is needed",
        "The route requires a token, and the request has no valid one. Nothing was done.",
        "There is no header `Authorization: Bearer TOKEN`, there are two, or the token is unknown, expired or revoked.",
        "Set `KITSUNE_TOKEN`, or send the header. On the server's machine `kitsune token list` shows which tokens are "
        "valid, and `kitsune token create NAME` makes one. On a page, sign in again.",
    ),
    "forbidden": ProblemType(
        403,
        "Not allowed",
        "The token is valid, but does not permit this.",
        "The token lacks the scope that the answer names; the request comes from a web page of another origin; a form "
        "is of an earlier session; or `/metrics` was asked for by a team other than `default`.",
        "Use a token with the scope. For a form, open its page again. A page of your own that uses the API must be "
        "served under the address of this server.",
    ),
    "not-found": ProblemType(
        404,
        "Not found",
        "Nothing with this name is visible to this token. Things of another team are answered in the same way.",
        "A name or a path was mistyped, the run was deleted, by retention too, a share link has ended, or the token is "
        "of another team.",
        "`kitsune runs` and `GET /api/v1/runs` list the runs; `/openapi.json` lists the routes. Upload a missing "
        "archive first. When a run is deleted, its plan stays under its own id.",
    ),
    "method-not-allowed": ProblemType(
        405,
        "This route has no such method",
        "The path exists, but not with this method.",
        "A client of another version, or a mistake, such as `POST` instead of `PUT`.",
        "Use one of the methods in the header `Allow`.",
    ),
    "request-timeout": ProblemType(
        408,
        "The request came too slowly",
        "The head or the body did not arrive in time, and nothing of it was kept.",
        "The head may take 10 s, a body 10 s, an archive 120 s: the connection is slow, or a client hangs.",
        "Send it again, over a faster connection. `KITSUNE_JSON_TIMEOUT_S` and `KITSUNE_ARCHIVE_TIMEOUT_S` of the "
        "server set other limits.",
    ),
    "conflict": ProblemType(
        409,
        "The request conflicts with the current state",
        "The request is valid, but not in the current state. Nothing was changed.",
        "An `Idempotency-Key` was used for another request; a run that has not ended cannot be deleted or retried; or "
        "a retry needs the machine where the run was started.",
        "Repeat the original request, or use a new key. Cancel the run first, or wait until it has ended.",
    ),
    "content-too-large": ProblemType(
        413,
        "The request is too large",
        "The body has more bytes than its route accepts. Nothing of it was kept.",
        f"A body may have 64 KiB, an archive {MAX_ARCHIVE_BYTES // 2**20} MiB; the owner of the server may have chosen "
        "others. An archive holds no weights, so a larger one has large constants in its graph.",
        "Make large constants parameters or inputs, and export again. `KITSUNE_MAX_JSON_BYTES` of the server raises "
        "the limit of other bodies.",
    ),
    "unsupported-media-type": ProblemType(
        415,
        "Another content type is needed",
        "The body was not read, because its content type is not the one that the route accepts.",
        "The header `Content-Type` is missing or names another type, or a form is not in UTF-8.",
        "Send JSON with `Content-Type: application/json`, and forms as their pages do.",
    ),
    "misdirected-request": ProblemType(
        421,
        "This server does not go by that name",
        "The header `Host` names a host that is not on the allowlist of this server. The check stops web pages from "
        "reaching a server on your machine under a name of their own (DNS rebinding).",
        "Clients use a name that is not on the allowlist, or a proxy changes the header.",
        "Start the server with `--allow-host NAME` for each name that clients use, and let the proxy pass `Host` on.",
    ),
    "invalid": ProblemType(
        422,
        "The request is invalid",
        "A field of the body, a parameter of the query, a header or a part of the path has an invalid "
        "value. Nothing was done.",
        "`errors` names each invalid field, and why. Unknown names are refused too: a misspelled filter would match "
        "everything.",
        "Correct the named fields; the HTTP reference has the limits of each.",
    ),
    "invalid-cursor": ProblemType(
        422,
        "The cursor is invalid",
        "A page of a list was requested with a cursor that this list did not return.",
        "The cursor was truncated or invented, or belongs to a list in another order.",
        "Begin again without `after`, and take each cursor from the page before, with the same `sort` and `order`.",
    ),
    "archive-refused": ProblemType(
        422,
        "The archive is refused",
        "The file is not a valid archive. It was read as data, no part of it was run, and nothing of it was kept.",
        "It was damaged or changed, was made by another version, or holds an operator that is not on the allowlist.",
        "Send a file that `kitsune export` made, as it is. If the version differs, export it with that of the server.",
    ),
    "too-many-requests": ProblemType(
        429,
        "Too many requests",
        "The token has exceeded its rate limit, and this request was not carried out.",
        "Each token has a limit of requests per minute, and a separate limit of plan look-ups if the server sets one. "
        "A program that polls without a pause uses them up.",
        "Wait for the seconds in `Retry-After`. Watch a run by its events instead of polling. The owner of the server "
        "sets the limits: `KITSUNE_REQUESTS_PER_MINUTE`, `KITSUNE_LOOKUPS_PER_MINUTE`.",
    ),
    "quota-exceeded": ProblemType(
        429,
        "A quota is reached",
        "The team or the token would have more unfinished runs, or the team more bytes of archives, than the server "
        "allows. Nothing was kept.",
        "Runs are submitted faster than workers carry them out, or old archives are never deleted.",
        "Cancel runs that nobody needs, delete old ones, or start more workers. The owner of the server sets the "
        "limits: `KITSUNE_ACTIVE_RUNS`, `KITSUNE_TOKEN_ACTIVE_RUNS`, `KITSUNE_TEAM_ARCHIVE_BYTES`; "
        "`KITSUNE_RETENTION_DAYS` has old runs deleted.",
    ),
    "request-header-fields-too-large": ProblemType(
        431,
        "The head of the request is too large",
        "The header of the request has more than 64 KiB, and the connection was closed.",
        "Cookies of other programs on the same host name, or a client that repeats headers.",
        "Send fewer headers; in a browser, delete the cookies of this host.",
    ),
    "internal": ProblemType(
        500,
        "The server failed",
        "An unexpected error occurred in the server.",
        "A defect of Kitsune, or a stored record that was altered.",
        "The server's log says why, under the `instance` that the answer gives. Report it with those lines.",
    ),
    "damaged": ProblemType(
        500,
        "What is stored was altered",
        "The plan that is stored under this id is not the one that was written. It is not returned.",
        "The disk or the memory of the server is faulty, or somebody changed the database by hand. Every plan is "
        "checked against its id, the SHA-256 of its text, whenever it is read.",
        "Restore the database from a backup, or start the run again with `POST /api/v1/runs/{run_id}/retry`. Look for "
        "what else was damaged: `PRAGMA integrity_check` in SQLite, `amcheck` in PostgreSQL.",
    ),
    "busy": ProblemType(
        503,
        "The database is busy",
        "Other processes locked the database for longer than 10 s, or all connections to it are in use.",
        "A process hangs in a transaction, the disk is slow, or there is more to write than SQLite can take.",
        "Try again after `Retry-After`. If it lasts, look for a process that hangs; a team is better off with "
        "PostgreSQL.",
    ),
    "unavailable": ProblemType(
        503,
        "The server cannot do this now",
        "The database does not answer; or the limit of concurrent archive uploads is reached.",
        "The database is down, unreachable, damaged, of another version, or refuses this user. Or 64 archives are "
        "being uploaded at once.",
        "Try again after `Retry-After`. For the database, the server's log says why, under the `instance` that the "
        "answer gives. `GET /readyz` tells when it is back; after an upgrade run `kitsune migrate`.",
    ),
    "full": ProblemType(
        507,
        "No space is left",
        "The disk or the database is full. The new data was not stored; existing data is unharmed.",
        "Runs keep every raw sample, and nothing is deleted automatically unless retention is configured.",
        "Free space, delete old runs with `kitsune runs delete --older-than 90d`, or set `KITSUNE_RETENTION_DAYS`.",
    ),
}

#: The type of a refusal that is given as a status only.
BY_STATUS: Final[Mapping[int, str]] = {
    400: "bad-request",
    401: "unauthorized",
    403: "forbidden",
    404: "not-found",
    405: "method-not-allowed",
    408: "request-timeout",
    409: "conflict",
    413: "content-too-large",
    415: "unsupported-media-type",
    421: "misdirected-request",
    422: "invalid",
    429: "too-many-requests",
    431: "request-header-fields-too-large",
    500: "internal",
    503: "unavailable",
    507: "full",
}


def slug_of(status: int) -> str:
    """The type of a status; the nearest general one for a status that this server does not use."""
    return BY_STATUS.get(status) or ("bad-request" if status < 500 else "internal")
