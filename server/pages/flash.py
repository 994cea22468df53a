"""Flash messages: a text, such as a new secret, that a page shows once after a form was sent.

A signed cookie carries it to the page, so that reloading the page neither shows it again nor resends the form. The
signature is bound to the session, so that nobody else can set the cookie, and any server process can read it.
"""

import hashlib
import hmac
import json
import time
from base64 import urlsafe_b64decode, urlsafe_b64encode
from typing import Final

from fastapi import Request
from fastapi.responses import Response

from server.pages.frame import is_secure
from tuner.store.queries.sessions import Session

COOKIE: Final = "kitsune_once"
#: Browsers accept this name by https only.
SECURE_COOKIE: Final = f"__Secure-{COOKIE}"
#: Enough time for the browser to follow the redirect.
LIFETIME_S: Final = 60


def set_message(answer: Response, request: Request, place: str, text: str) -> None:
    """Sets the cookie, so that the page at `place` shows `text` once, within LIFETIME_S."""
    session, until = _session(request), int(time.time()) + LIFETIME_S
    content = urlsafe_b64encode(json.dumps([place, text, until]).encode()).decode()
    secure = is_secure(request)
    answer.set_cookie(
        SECURE_COOKIE if secure else COOKIE,
        f"{content}.{_signature(session, content)}",
        max_age=LIFETIME_S,
        path=place,
        secure=secure,
        httponly=True,
        samesite="strict",
    )


def message_of(request: Request, place: str) -> str:
    """The text for this page; "" if there is none, or it is for another page or session, or has expired."""
    content, _, signature = (request.cookies.get(SECURE_COOKIE) or request.cookies.get(COOKIE) or "").partition(".")
    if not hmac.compare_digest(signature.encode(errors="replace"), _signature(_session(request), content).encode()):
        return ""
    where, text, until = json.loads(urlsafe_b64decode(content))
    return str(text) if where == place and time.time() < until else ""


def clear(answer: Response, request: Request, place: str) -> None:
    """Deletes the cookie."""
    for name in {COOKIE, SECURE_COOKIE} & set(request.cookies):
        answer.delete_cookie(name, path=place, secure=name == SECURE_COOKIE, httponly=True, samesite="strict")


def _signature(session: Session, content: str) -> str:
    return hmac.new(session.csrf.encode(), content.encode(errors="replace"), hashlib.sha256).hexdigest()


def _session(request: Request) -> Session:
    found = request.state.session
    assert isinstance(found, Session)
    return found
