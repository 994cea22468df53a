"""A bearer token in, the right to use a route or an answer 401 or 403 out. Every guarded route is default-deny.

A route is guarded by the router that it stands on, never by its path; `GuardedRouter` cannot be made without the scope
that its routes need. Its check runs before a body is read or a parameter looked at; what the route does not know of the
query is refused right after it.
"""

import math
from typing import Any, Final

from fastapi import APIRouter, Depends, Request
from fastapi.security import HTTPBearer
from starlette.exceptions import HTTPException

from server.http.context import context_in
from server.http.rate_limit import Rate
from server.payloads.query_check import check_query
from server.payloads.schemas import documented
from tuner.store.queries.tokens import Scope, Token

#: As the description of the API names tokens.
SCHEME: Final = "HTTPBearer"


class GuardedRouter(APIRouter):
    """Routes that need a live token with `scope`."""

    def __init__(self, scope: Scope, *, prefix: str = "", tag: str, is_of_lookups: bool = False) -> None:
        super().__init__(
            prefix=prefix,
            tags=[tag],
            dependencies=[Depends(Check(scope, is_of_lookups=is_of_lookups))],
            responses=documented(401, 422, 429, 503),
            redirect_slashes=False,
        )
        self.scope = scope


class Check(HTTPBearer):
    """The dependency that lets a request with a live token of this scope through, and notes the token.

    All of it is one coroutine: every further dependency would cost a request some 5 % of its time.
    """

    def __init__(self, scope: Scope, *, is_of_lookups: bool = False) -> None:
        super().__init__(
            scheme_name=SCHEME,
            description="A token of `kitsune token create`, or the one in KITSUNE_HOME/token",
        )
        self.scope = scope
        self.is_of_lookups = is_of_lookups

    async def __call__(self, request: Request) -> None:  # type: ignore[override]
        here, secret = context_in(request), secret_of(request)
        if secret is None:
            raise _unauthorized("send one header 'Authorization: Bearer TOKEN'; 'kitsune token create' makes one")
        token = await here.admission.token_of(secret)
        if token is None:
            raise _unauthorized("this token is unknown, expired or revoked; ask the owner of the server for one", True)
        check_rate(here.lookups_rate if self.is_of_lookups else here.requests_rate, token)
        check_scope(token, self.scope)
        request.state.token = token
        if request.scope["query_string"]:
            check_query(request)


def secret_of(request: Request) -> str | None:
    """What the one header Authorization gives as a bearer token; None without it, with several, or of another kind."""
    given = request.headers.getlist("authorization")
    kind, _, secret = given[0].partition(" ") if len(given) == 1 else ("", "", "")
    return secret.strip() or None if kind.lower() == "bearer" else None


class Further:
    """The dependency that asks for a scope beyond that of the router."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope

    async def __call__(self, request: Request) -> None:
        check_scope(caller(request), self.scope)


def also(scope: Scope) -> Any:
    """For one route of a router: a further scope that its answer needs."""
    return Depends(Further(scope))


def check_rate(rate: Rate, token: Token) -> None:
    """Raises HTTPException 429."""
    if wait_s := rate.wait_s(token.id):
        seconds = math.ceil(wait_s)
        raise HTTPException(
            429,
            f"this token may ask {rate.per_minute:,} times a minute; wait for {seconds} s and ask again",
            {"retry-after": str(seconds)},
        )


def check_scope(token: Token, scope: Scope) -> None:
    """Raises HTTPException 403."""
    if not allows(token, scope):
        raise HTTPException(
            403,
            f"this token lacks the scope {scope.value!r}: it has {', '.join(token.scopes) or 'no scope'}",
            {"www-authenticate": f'Bearer realm="kitsune", error="insufficient_scope", scope="{scope.value}"'},
        )


def allows(token: Token, scope: Scope) -> bool:
    return scope in token.scopes or Scope.ADMIN in token.scopes


def caller(request: Request) -> Token:
    """Whose request this is; set by the check of its router."""
    found = request.state.token
    assert isinstance(found, Token)
    return found


def _unauthorized(detail: str, was_given: bool = False) -> HTTPException:
    error = ', error="invalid_token"' if was_given else ""
    return HTTPException(401, detail, {"www-authenticate": f'Bearer realm="kitsune"{error}'})
