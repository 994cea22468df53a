"""A request of a browser in, a page in the common frame out, or the way to the sign-in page.

A page is guarded by the router that it stands on, as every route is (`server/http/auth.py`): by a session that is live,
by the scope that its token has, and, for whatever is not a mere look, by the token against forgery in its form.
"""

import contextlib
import hmac
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from anyio import to_thread
from fastapi import APIRouter, Depends, Request
from fastapi.responses import HTMLResponse
from fastapi.routing import APIRoute
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from python_multipart.multipart import parse_options_header
from starlette.datastructures import FormData
from starlette.exceptions import HTTPException

from kitsune import __version__
from server.api.archives import arriving
from server.charts.drawing import words
from server.http.auth import allows, check_rate
from server.http.context import context_in
from server.http.guard import is_form
from server.pages import assets
from server.payloads.query_check import check_query
from tuner.store.queries import sessions
from tuner.store.queries.sessions import Session
from tuner.store.queries.tokens import Scope, Token
from tuner.wall_clock import utcnow

COOKIE: Final = "kitsune_session"
#: Browsers take it by https only, and from this very host: no other one can plant it.
SECURE_COOKIE: Final = f"__Host-{COOKIE}"
SIGN_IN: Final = "/login"
MAX_FIELDS: Final = 50
MAX_FIELD_BYTES: Final = 64 * 2**10

#: Scripts and styles are files of ours, and nothing else runs, frames a page or is sent anywhere.
CONTENT_SECURITY_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)

#: `no-referrer`, as on all other answers, would have browsers send `Origin: null` with our own forms.
PAGE_HEADERS: Final = {"content-security-policy": CONTENT_SECURITY_POLICY, "referrer-policy": "same-origin"}

_MEANINGS: Final[Mapping[Scope, str]] = {
    Scope.READ: "look at runs and plans",
    Scope.SUBMIT: "start and change runs",
    Scope.ADMIN: "make and revoke tokens",
}

_templates = Environment(
    loader=FileSystemLoader(Path(__file__).with_name("templates")),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_templates.filters.update(words.FILTERS)
_templates.globals.update(asset=assets.address, version=__version__, may=lambda token, word: allows(token, Scope(word)))


class PageRoute(APIRoute):
    """A route whose errors are pages."""


class PageRouter(APIRouter):
    """Pages for whoever is signed in with a token of this scope; None: with any.

    Notes `request.state.token`, `request.state.session` and, where something is sent, `request.state.form`.
    """

    def __init__(self, scope: Scope | None, *, prefix: str = "") -> None:
        super().__init__(
            prefix=prefix,
            dependencies=[Depends(_Check(scope))],
            default_response_class=HTMLResponse,
            include_in_schema=False,
            redirect_slashes=False,
            route_class=PageRoute,
        )
        self.scope = scope


class OpenPageRouter(APIRouter):
    """Pages for everybody: they must tell nothing."""

    def __init__(self) -> None:
        super().__init__(
            default_response_class=HTMLResponse,
            include_in_schema=False,
            redirect_slashes=False,
            route_class=PageRoute,
        )


class _Check:
    """The dependency that lets a request of a live session with this scope through."""

    def __init__(self, scope: Scope | None) -> None:
        self.scope = scope

    async def __call__(self, request: Request) -> AsyncIterator[None]:
        found = await to_thread.run_sync(session_of, request)
        if found is None:
            raise sign_in_first(request)
        request.state.session, request.state.token = found
        check_rate(context_in(request).requests_rate, found[1])
        if self.scope is not None and not allows(found[1], self.scope):
            raise not_allowed(self.scope)
        if request.scope["query_string"]:
            check_query(request)
        if request.method == "GET":
            yield
        else:
            check_charset(request)
            with arriving() if is_form(request.headers) else contextlib.nullcontext():
                async with request.form(max_files=1, max_fields=MAX_FIELDS, max_part_size=MAX_FIELD_BYTES) as form:
                    check_csrf(found[0], form)
                    request.state.form = form
                    yield


def check_charset(request: Request) -> None:
    """Raises HTTPException for a form in letters of another kind than those of our pages."""
    charset = parse_options_header(request.headers.get("content-type", ""))[1].get(b"charset", b"utf-8")
    if charset.lower() not in (b"utf-8", b"utf8"):
        raise HTTPException(415, "send forms in UTF-8, as the pages here do")


def session_of(request: Request) -> tuple[Session, Token] | None:
    """Who is signed in; None when there is no cookie, or one that opens nothing."""
    secret = cookie_of(request)
    if secret is None:
        return None
    with context_in(request).database.read() as connection:
        return sessions.find(connection, secret)


def cookie_of(request: Request) -> str | None:
    return request.cookies.get(SECURE_COOKIE) or request.cookies.get(COOKIE)


def is_secure(request: Request) -> bool:
    """Whether the browser itself speaks https, also where a proxy does that for us: it says so in Origin of a form."""
    return request.url.scheme == "https" or request.headers.get("origin", "").startswith("https://")


def not_allowed(scope: Scope) -> HTTPException:
    return HTTPException(
        403,
        f"your token may not {_MEANINGS[scope]}: it lacks the scope {scope.value!r}; sign in with one that has it, or "
        "ask the owner of this server",
    )


def address_of(request: Request) -> str:
    """Under which address whoever asks knows this server; the guard has checked the Host.

    Behind a proxy with TLS it is https: browsers send the cookie of such a session by nothing else.
    """
    is_https = is_secure(request) or SECURE_COOKIE in request.cookies
    return str(request.base_url.replace(scheme="https") if is_https else request.base_url).rstrip("/")


def sign_in_first(request: Request) -> HTTPException:
    """The way to the sign-in page, and back from there to a page that was only to be looked at."""
    if "hx-request" in request.headers:  # it would put the sign-in page where a part of another one belongs
        return HTTPException(401, "sign in again", {"hx-refresh": "true"})
    if request.method != "GET":
        return HTTPException(303, headers={"location": SIGN_IN})
    query = f"?{request.url.query}" if request.url.query else ""
    return HTTPException(303, headers={"location": f"{SIGN_IN}?next={quote(request.url.path + query, safe='/')}"})


def check_csrf(session: Session, form: FormData) -> None:
    """Raises HTTPException unless the form comes from a page of this session."""
    given = form.get("csrf")
    if not isinstance(given, str) or not hmac.compare_digest(given.encode(errors="replace"), session.csrf.encode()):
        raise HTTPException(403, "this form is of an earlier session; open its page again, then send it")


def form_of(request: Request) -> Mapping[str, str]:
    """The fields of text of a form whose page was checked, without blanks around them."""
    form = request.state.form
    assert isinstance(form, FormData)
    return {name: value.strip() for name, value in form.items() if isinstance(value, str) and name != "csrf"}


def viewer(request: Request) -> Token:
    """Who looks at a page; set by the check of its router."""
    found = request.state.token
    assert isinstance(found, Token)
    return found


def render(request: Request, template: str, *, status: int = 200, **context: Any) -> HTMLResponse:
    """A page. Templates get what is given here, and `token`, `csrf`, `path` and `now`."""
    session = getattr(request.state, "session", None)
    common = {
        "token": getattr(request.state, "token", None),
        "csrf": session.csrf if session else "",
        "path": request.url.path,
        "now": utcnow(),
    }
    text = _templates.get_template(template).render({**common, **context})
    return HTMLResponse(text, status, PAGE_HEADERS)
