"""Signing in with a token, and signing out."""

import math
from typing import Annotated, Final
from urllib.parse import urlsplit

from anyio import to_thread
from fastapi import Query, Request
from fastapi.responses import RedirectResponse, Response
from starlette.datastructures import FormData
from starlette.exceptions import HTTPException

from server.http.context import Context, Here
from server.http.guard import is_form
from server.pages.frame import (
    COOKIE,
    MAX_FIELDS,
    SECURE_COOKIE,
    SIGN_IN,
    OpenPageRouter,
    PageRouter,
    cookie_of,
    is_secure,
    render,
    session_of,
)
from server.pages.login_throttle import Attempts
from tuner.store.queries import sessions, tokens
from tuner.store.queries.sessions import Session
from tuner.wall_clock import utcnow

#: Gives no reason, so that nobody can find out which tokens exist.
_INVALID: Final = (
    "This token is not valid here. Check that it was copied completely, or ask the owner of the server for another."
)
_TOO_MANY: Final = (
    "This token is not valid here, and there were too many attempts from your address. Check that it was copied "
    "completely, or wait for {minutes}; a valid one signs you in at once."
)

router = OpenPageRouter()
leaving = PageRouter(None)


@router.get(SIGN_IN)
def ask(request: Request, after: Annotated[str, Query(alias="next", max_length=2000)] = "") -> Response:
    """The sign-in form; with a valid session a redirect to the page."""
    if session_of(request) is not None:
        return RedirectResponse(own_path(after), 303)
    return render(request, "login.html", next=own_path(after), error="", again=is_cross_site(request) and bool(after))


@router.post(SIGN_IN)
async def sign_in(request: Request, here: Here) -> Response:
    """Needs no CSRF token: the guard refuses forms of other origins."""
    if is_form(request.headers):  # multipart may be as large as an archive, and the client is unknown
        raise HTTPException(415, "send the form as its page does")
    form = await request.form(max_fields=MAX_FIELDS)
    after = own_path(_text(form, "next"))
    started = await to_thread.run_sync(_start, here, _text(form, "token"), cookie_of(request))
    if started is None:
        return _refused(request, after)
    answer = RedirectResponse(after, 303)
    _give_cookie(answer, *started, is_secure=is_secure(request))
    return answer


@leaving.post("/logout")
def sign_out(request: Request, here: Here) -> Response:
    secret = cookie_of(request)
    assert secret is not None
    with here.database.begin() as connection:
        sessions.end(connection, secret)
    answer = RedirectResponse(SIGN_IN, 303)
    for name, secure in ((COOKIE, False), (SECURE_COOKIE, True)):
        answer.delete_cookie(name, path="/", secure=secure, httponly=True, samesite="strict")
    return answer


def own_path(place: str) -> str:
    """`place` if it is a path of this server, else "/": browsers treat `//host` and `/\\host` as other hosts."""
    is_ours = place.startswith("/") and place[1:2] not in ("/", "\\") and place.isprintable() and "\\" not in place
    return place if is_ours and not urlsplit(place).netloc else "/"


def is_cross_site(request: Request) -> bool:
    """Whether a link on another site led here. The browser then withholds our cookie; a reload of our page sends it."""
    return request.headers.get("sec-fetch-site") == "cross-site"


def attempts_of(request: Request) -> Attempts:
    found = request.app.state.attempts
    assert isinstance(found, Attempts)
    return found


def _start(here: Context, secret: str, earlier: str | None) -> tuple[Session, str] | None:
    """A new session; None for an invalid token. Ends the earlier session of the same browser."""
    with here.database.read() as connection:
        token = tokens.authenticate(connection, secret)
    if token is None or not token.scopes:
        return None
    with here.database.begin() as connection:
        if earlier is not None:
            sessions.end(connection, earlier)
        return sessions.start(connection, token)


def _refused(request: Request, after: str) -> Response:
    """Only failures are throttled: behind a proxy, all users share one address with a possible attacker."""
    attempts, address = attempts_of(request), request.client.host if request.client else ""
    wait_s = attempts.wait_s(address)
    if not wait_s:
        attempts.note_failure(address)
        return render(request, "login.html", status=422, next=after, again=False, error=_INVALID)
    error = _TOO_MANY.format(minutes=_minutes(wait_s))
    page = render(request, "login.html", status=429, next=after, again=False, error=error)
    page.headers["retry-after"] = str(int(wait_s) + 1)
    return page


def _give_cookie(answer: Response, session: Session, secret: str, *, is_secure: bool) -> None:
    seconds = int((session.ends_at - utcnow()).total_seconds())
    name = SECURE_COOKIE if is_secure else COOKIE
    answer.set_cookie(name, secret, max_age=seconds, path="/", secure=is_secure, httponly=True, samesite="strict")


def _text(form: FormData, name: str) -> str:
    value = form.get(name, "")
    return value.strip() if isinstance(value, str) else ""


def _minutes(seconds: float) -> str:
    minutes = math.ceil(seconds / 60)
    return f"{minutes} minute{'s' if minutes > 1 else ''}"
