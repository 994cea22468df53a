"""Authentication and authorization of API routes by bearer token: 401 without a valid token, 403 without the scope.

The router decides what a route requires, not its path, and a `GuardedRouter` cannot be created without a scope. The
check runs before the body and the parameters are read; unknown query parameters are refused right after it.
"""

import math
from typing import Any, Final

from fastapi import APIRouter, Depends, Request
from fastapi.security import HTTPBearer
from starlette.exceptions import HTTPException

from server.http.context import context_in
from server.http.rate_limit import Rate
from server.payloads.request_checks import check_query
from server.payloads.schemas import documented
from tuner.store.queries.tokens import Scope, Token

#: Name of the security scheme in the OpenAPI document.
SCHEME: Final = "HTTPBearer"


class GuardedRouter(APIRouter):
    """Routes that require a valid token with `scope`."""

    def __init__(self, scope: Scope, *, prefix: str = "", tag: str, is_lookup: bool = False) -> None:
        super().__init__(
            prefix=prefix,
            tags=[tag],
            dependencies=[Depends(ScopeCheck(scope, is_lookup=is_lookup))],
            responses=documented(401, 422, 429, 503),
            redirect_slashes=False,
        )
        self.scope = scope


class ScopeCheck(HTTPBearer):
    """Dependency that requires a valid token with this scope, applies the rate limit, and stores the token.

    It is one coroutine because each further dependency would add some 5 % to the time of a request.
    """

    def __init__(self, scope: Scope, *, is_lookup: bool = False) -> None:
        super().__init__(
            scheme_name=SCHEME,
            description="A token of `kitsune token create`, or the one in KITSUNE_HOME/token",
        )
        self.scope = scope
        self.is_lookup = is_lookup

    async def __call__(self, request: Request) -> None:  # type: ignore[override]
        here, secret = context_in(request), secret_of(request)
        if secret is None:
            raise _unauthorized("send one header 'Authorization: Bearer TOKEN'; 'kitsune token create' makes one")
        token = await here.token_cache.token_of(secret)
        if token is None:
            raise _unauthorized("this token is unknown, expired or revoked; ask the owner of the server for one", True)
        check_rate(here.lookups_rate if self.is_lookup else here.requests_rate, token)
        check_scope(token, self.scope)
        request.state.token = token
        if request.scope["query_string"]:
            check_query(request)


def secret_of(request: Request) -> str | None:
    """The bearer token of the header Authorization; None if the header is missing, repeated or of another kind."""
    given = request.headers.getlist("authorization")
    kind, _, secret = given[0].partition(" ") if len(given) == 1 else ("", "", "")
    return secret.strip() or None if kind.lower() == "bearer" else None


class FurtherScope:
    """Dependency that requires a scope in addition to that of the router."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope

    async def __call__(self, request: Request) -> None:
        check_scope(caller(request), self.scope)


def requires(scope: Scope) -> Any:
    """For the `dependencies` of a single route: a further scope that it requires."""
    return Depends(FurtherScope(scope))


def check_rate(rate: Rate, token: Token) -> None:
    """Raises HTTPException 429 if the token has used up its rate."""
    if wait_s := rate.wait_s(token.id):
        seconds = math.ceil(wait_s)
        raise HTTPException(
            429,
            f"this token may ask {rate.per_minute:,} times a minute; wait for {seconds} s and ask again",
            {"retry-after": str(seconds)},
        )


def check_scope(token: Token, scope: Scope) -> None:
    """Raises HTTPException 403 if the token lacks the scope."""
    if not allows(token, scope):
        raise HTTPException(
            403,
            f"this token lacks the scope {scope.value!r}: it has {', '.join(token.scopes) or 'no scope'}",
            {"www-authenticate": f'Bearer realm="kitsune", error="insufficient_scope", scope="{scope.value}"'},
        )


def allows(token: Token, scope: Scope) -> bool:
    return scope in token.scopes or Scope.ADMIN in token.scopes


def caller(request: Request) -> Token:
    """The token of this request, or of its session on a page, stored by the check of its router."""
    found = request.state.token
    assert isinstance(found, Token)
    return found


def _unauthorized(detail: str, was_given: bool = False) -> HTTPException:
    error = ', error="invalid_token"' if was_given else ""
    return HTTPException(401, detail, {"www-authenticate": f'Bearer realm="kitsune"{error}'})
