"""A bearer token in, the right to use a route or an answer 401 or 403 out. Every guarded route is default-deny.

A route is guarded by the router that it stands on, never by its path; `GuardedRouter` cannot be made without the scope
that its routes need. Its check runs before a body is read or a parameter looked at.
"""

from collections.abc import Awaitable, Callable
from typing import Annotated

from fastapi import APIRouter, Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.exceptions import HTTPException

from server.context import Here
from server.schemas import documented
from tuner.store.tokens import Scope, Token

_bearer = HTTPBearer(
    auto_error=False, description="A token of `kitsune token create`, or the one in KITSUNE_HOME/token"
)


class GuardedRouter(APIRouter):
    """Routes that need a live token with `scope`."""

    def __init__(self, scope: Scope, *, prefix: str = "", tag: str) -> None:
        super().__init__(
            prefix=prefix,
            tags=[tag],
            dependencies=[Depends(require(scope))],
            responses=documented(401, 403, 422, 503),
            redirect_slashes=False,
        )
        self.scope = scope


def require(scope: Scope) -> Callable[..., Awaitable[Token]]:
    """The dependency that lets a request with a live token of this scope through, and gives the token."""

    async def check(
        request: Request, here: Here, given: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)]
    ) -> Token:
        if given is None or len(request.headers.getlist("authorization")) != 1:
            raise _unauthorized("send one header 'Authorization: Bearer TOKEN'; 'kitsune token create' makes one")
        token = await here.admission.token_of(given.credentials)
        if token is None:
            raise _unauthorized("this token is unknown, expired or revoked; ask the owner of the server for one", True)
        if not allows(token, scope):
            raise HTTPException(
                403,
                f"this token may not {scope.value}: it has {', '.join(token.scopes) or 'no scope'}",
                {"www-authenticate": f'Bearer realm="kitsune", error="insufficient_scope", scope="{scope.value}"'},
            )
        request.state.token = token
        return token

    return check


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
