"""Access control, rendering and common helpers of all pages.

As with API routes (`server/http/auth.py`), the router decides what a page requires: a valid session, the scope of its
token, and for everything but GET the CSRF token in the form.
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
from server.payloads.request_checks import check_query
from tuner.store.queries import sessions
from tuner.store.queries.sessions import Session
from tuner.store.queries.tokens import Scope, Token
from tuner.wall_clock import utcnow

COOKIE: Final = "kitsune_session"
#: Browsers accept this name by https only, and from this host only, so that no other host can set it.
SECURE_COOKIE: Final = f"__Host-{COOKIE}"
SIGN_IN: Final = "/login"
MAX_FIELDS: Final = 50
MAX_FIELD_BYTES: Final = 64 * 2**10

#: Only scripts and styles of this server; no framing; forms and requests go to this server only.
CONTENT_SECURITY_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)

#: With `no-referrer`, as on all other answers, browsers would send `Origin: null` with our forms.
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
    """A route whose errors are rendered as pages."""


class _HtmlRouter(APIRouter):
    """Routes whose answers, errors too, are pages."""

    def __init__(self, **options: Any) -> None:
        super().__init__(
            default_response_class=HTMLResponse,
            include_in_schema=False,
            redirect_slashes=False,
            route_class=PageRoute,
            **options,
        )


class OpenPageRouter(_HtmlRouter):
    """Pages without a session. They must not disclose anything."""


class PageRouter(_HtmlRouter):
    """Pages that require a session whose token has this scope; None: any session.

    Sets `request.state.token`, `request.state.session` and, except for GET, `request.state.form`.
    """

    def __init__(self, scope: Scope | None, *, prefix: str = "") -> None:
        super().__init__(prefix=prefix, dependencies=[Depends(_Check(scope))])


class _Check:
    """Dependency that requires a valid session with this scope and applies the rate limit."""

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
    """Raises HTTPException 415 for a form that is not in UTF-8, as those of our pages are."""
    charset = parse_options_header(request.headers.get("content-type", ""))[1].get(b"charset", b"utf-8")
    if charset.lower() not in (b"utf-8", b"utf8"):
        raise HTTPException(415, "send forms in UTF-8, as the pages here do")


def session_of(request: Request) -> tuple[Session, Token] | None:
    """The session and its token; None without a cookie, or if the session is not valid."""
    secret = cookie_of(request)
    if secret is None:
        return None
    with context_in(request).database.read() as connection:
        return sessions.find(connection, secret)


def cookie_of(request: Request) -> str | None:
    return request.cookies.get(SECURE_COOKIE) or request.cookies.get(COOKIE)


def is_secure(request: Request) -> bool:
    """Whether the browser uses https. Behind a proxy with TLS, only the Origin of a form shows it."""
    return request.url.scheme == "https" or request.headers.get("origin", "").startswith("https://")


def not_allowed(scope: Scope) -> HTTPException:
    return HTTPException(
        403,
        f"your token may not {_MEANINGS[scope]}: it lacks the scope {scope.value!r}; sign in with one that has it, or "
        "ask the owner of this server",
    )


def address_of(request: Request) -> str:
    """The URL of this server as the client uses it; the guard has checked Host.

    Behind a proxy with TLS the scheme is known from the secure cookie, which browsers send by https only.
    """
    is_https = is_secure(request) or SECURE_COOKIE in request.cookies
    return str(request.base_url.replace(scheme="https") if is_https else request.base_url).rstrip("/")


def sign_in_first(request: Request) -> HTTPException:
    """A redirect to the sign-in page, which leads back to the page after a GET."""
    if "hx-request" in request.headers:  # htmx would insert the sign-in page into a part of this page
        return HTTPException(401, "sign in again", {"hx-refresh": "true"})
    if request.method != "GET":
        return HTTPException(303, headers={"location": SIGN_IN})
    query = f"?{request.url.query}" if request.url.query else ""
    return HTTPException(303, headers={"location": f"{SIGN_IN}?next={quote(request.url.path + query, safe='/')}"})


def check_csrf(session: Session, form: FormData) -> None:
    """Raises HTTPException 403 unless the form has the CSRF token of this session."""
    given = form.get("csrf")
    if not isinstance(given, str) or not hmac.compare_digest(given.encode(errors="replace"), session.csrf.encode()):
        raise HTTPException(403, "this form is of an earlier session; open its page again, then send it")


def form_of(request: Request) -> Mapping[str, str]:
    """The text fields of the checked form, stripped of surrounding white space."""
    form = request.state.form
    assert isinstance(form, FormData)
    return {name: value.strip() for name, value in form.items() if isinstance(value, str) and name != "csrf"}


def render(request: Request, template: str, *, status: int = 200, **context: Any) -> HTMLResponse:
    """Renders a template with `context` and with `token`, `csrf`, `path` and `now`."""
    session = getattr(request.state, "session", None)
    common = {
        "token": getattr(request.state, "token", None),
        "csrf": session.csrf if session else "",
        "path": request.url.path,
        "now": utcnow(),
    }
    text = _templates.get_template(template).render({**common, **context})
    return HTMLResponse(text, status, PAGE_HEADERS)
