"""The page where administrators list, create and revoke tokens.

Administrators of the default team operate the server: they manage the tokens of all teams. Others manage their own
team's.
"""

from typing import Any, Final

from fastapi import Request
from fastapi.responses import RedirectResponse, Response

from kitsune.errors import NotFoundError, SettingsError
from server.http.auth import caller
from server.http.context import Here
from server.pages import flash
from server.pages.frame import PageRouter, form_of, render
from server.payloads.schemas import TokenId
from server.tokens import check_name, check_team, expiry, scopes_of
from tuner.records import DEFAULT_TEAM
from tuner.store.queries import tokens
from tuner.store.queries.tokens import Scope, Token

PLACE: Final = "/tokens"
#: Lifetimes to choose from; "": no expiry.
LENGTHS: Final = {"30d": "30 days", "90d": "90 days", "365d": "a year", "": "without end"}
BLANK: Final = {"name": "", "team": "", "expires": "90d"}

router = PageRouter(Scope.ADMIN)


@router.get(PLACE)
def show(request: Request, here: Here) -> Response:
    """The list of tokens. Shows a new secret once, right after `create`."""
    token_id, _, secret = flash.message_of(request, PLACE).partition(" ")
    answer = _page(request, here, BLANK, (Scope.READ, Scope.SUBMIT), made=token_id, secret=secret)
    flash.clear(answer, request, PLACE)
    return answer


@router.post(PLACE)
def create(request: Request, here: Here) -> Response:
    given = {**BLANK, **form_of(request)}
    words = [str(word) for word in request.state.form.getlist("scope")]
    try:
        name, scopes, team = given["name"], scopes_of(words), _team(given["team"], caller(request))
        check_name(name)
        until = expiry(given["expires"] or None)
        if not scopes:
            raise SettingsError("choose at least one thing that the token may do")
    except SettingsError as error:
        return _page(request, here, given, tuple(words), error=str(error), status=422)
    with here.database.begin() as connection:
        token, secret = tokens.create(connection, name, scopes, team=team, expires_at=until)
    answer = RedirectResponse(PLACE, 303)
    flash.set_message(answer, request, PLACE, f"{token.id} {secret}")
    return answer


@router.post(PLACE + "/{token_id}/revoke")
def revoke(request: Request, here: Here, token_id: TokenId) -> Response:
    with here.database.begin() as connection:
        token = tokens.revoke(connection, token_id, team=_managed_team(caller(request)))
    if token is None:
        raise NotFoundError("there is no such token; the page of tokens lists them")
    return RedirectResponse(PLACE, 303)


def _page(
    request: Request,
    here: Here,
    given: dict[str, str],
    scopes: tuple[str, ...],
    *,
    made: str = "",
    secret: str = "",
    error: str = "",
    status: int = 200,
) -> Response:
    me = caller(request)
    with here.database.read() as connection:
        found = tokens.listed(connection, team=_managed_team(me))
    shown = next((token for token in found if token.id == made), None)
    context: dict[str, Any] = {"given": given, "scopes": scopes, "made": shown, "secret": secret, "error": error}
    return render(
        request,
        "tokens.html",
        status=status,
        tokens=found[::-1],
        lengths=LENGTHS,
        all_scopes=Scope,
        is_operator=_managed_team(me) is None,
        **context,
    )


def _managed_team(me: Token) -> str | None:
    """The team whose tokens this token may manage; None: all teams."""
    return None if me.team == DEFAULT_TEAM else me.team


def _team(given: str, me: Token) -> str:
    """The team of a new token. Raises SettingsError for a team that `me` may not manage, or an invalid name."""
    managed = _managed_team(me)
    if managed is not None and given not in ("", managed):
        raise SettingsError(f"you can make tokens of the team {managed} only")
    check_team(given or me.team)
    return given or me.team
