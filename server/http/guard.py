"""The gate in front of every route: a request in, either passed on or refused before any route sees it.

Host: only names of this server, so that a web page cannot reach it under a name of its own (DNS rebinding). Origin:
only pages of this server. Both on every method, from the headers as they came. Bodies: bounded in bytes and in time
while they arrive. Nothing here looks at the path.
"""

import ipaddress
import re
import time
from functools import lru_cache
from typing import Final

import anyio
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kitsune.client.server_address import is_loopback
from kitsune.errors import SettingsError
from server.payloads.problems import SECURITY_HEADERS, refusal
from server.settings import ServerSettings

_AUTHORITY = re.compile(r"(?:\[([0-9a-f:.]+)\]|([a-z0-9._-]+))(?::[0-9]{1,5})?", re.ASCII)
_ORIGIN = re.compile(r"https?://(.+)", re.ASCII)
#: A body that its route reads as it comes: by this method, or a form with a file. All others are handed over whole.
_STREAMED: Final = "PUT"
_FORM: Final = "multipart/form-data"
_OURS: Final = tuple((name.encode(), value.encode()) for name, value in SECURITY_HEADERS.items())


class Guard:
    """ASGI middleware; the outermost but for the one that counts."""

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self.app = app
        self.settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            await self._http(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1008})

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers, is_there = Headers(scope=scope), has_body(scope)
        streams = is_there and (scope["method"] == _STREAMED or is_form(headers))
        body = self._body(receive, streams=streams, is_there=is_there)
        answer = _Answer(send, body)
        try:
            check_names(headers, self.settings)
            if is_form(headers):
                incoming = refused_by_page(headers, body)
            else:
                if is_there:
                    check_length(headers, body.limit)
                incoming = body.receive if streams else await body.whole()
        except HTTPException as error:
            await refusal(error.status_code, error.detail)(scope, receive, answer.send)
        else:
            await self.app(scope, incoming, answer.send)

    def _body(self, receive: Receive, *, streams: bool, is_there: bool) -> "Body":
        limits = self.settings
        if streams:
            return Body(receive, limits.max_archive_bytes, limits.archive_timeout_s, is_there=is_there)
        return Body(receive, limits.max_json_bytes, limits.json_timeout_s, is_there=is_there)


class Body:
    """The body of one request while it arrives. `receive` and `whole` raise HTTPException 413, 408 or 400."""

    def __init__(self, receive: Receive, limit: int, timeout_s: float, *, is_there: bool) -> None:
        self.limit = limit
        self.is_complete = not is_there
        self._receive = receive
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._size = 0

    async def receive(self) -> Message:
        """The next message. Once the body is complete, waiting for the client to go away has no limit."""
        if self.is_complete:
            return await self._receive()
        try:
            with anyio.fail_after(max(0.0, self._deadline - time.monotonic())):
                message = await self._receive()
        except TimeoutError as error:
            raise HTTPException(
                408, f"the body did not arrive within {self._timeout_s:g} s; send it faster, or send less"
            ) from error
        if message["type"] == "http.disconnect":
            raise HTTPException(400, "the client went away before its request had ended")
        self._size += len(message.get("body", b""))
        if self._size > self.limit:
            raise too_large(self.limit)
        self.is_complete = not message.get("more_body", False)
        return message

    async def whole(self) -> Receive:
        """Reads all of it; gives a `receive` that hands it over as one message."""
        if self.is_complete:
            return self._receive
        parts = []
        while not self.is_complete:
            parts.append((await self.receive()).get("body", b""))
        pending = [{"type": "http.request", "body": b"".join(parts), "more_body": False}]

        async def receive() -> Message:
            return pending.pop() if pending else await self._receive()

        return receive


class _Answer:
    """Puts our headers on an answer, and closes the connection after one that came before the body had ended.

    Otherwise the rest of an endless body would be read, and thrown away, for as long as it comes.
    """

    def __init__(self, send: Send, body: Body) -> None:
        self._send = send
        self._body = body

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            names = {name for name, _ in message["headers"]}
            message["headers"] = [*message["headers"], *(pair for pair in _OURS if pair[0] not in names)]
            if not self._body.is_complete:
                MutableHeaders(scope=message)["connection"] = "close"
        await self._send(message)


def refused_by_page(headers: Headers, body: Body) -> Receive:
    """As `body.receive`. A browser shows what it is told: a form that says it is too large is refused where its page
    reads it, which can say so as a page, and not a byte of it is read."""

    async def receive() -> Message:
        check_length(headers, body.limit)
        return await body.receive()

    return receive


def has_body(scope: Scope) -> bool:
    names = {name for name, value in scope["headers"] if value != b"0"}
    return b"content-length" in names or b"transfer-encoding" in names


def is_form(headers: Headers) -> bool:
    return headers.get("content-type", "").partition(";")[0].strip().lower() == _FORM


def check_length(headers: Headers, limit: int) -> None:
    """Raises HTTPException for a body that says itself that it is too large, before a byte of it is read."""
    declared = headers.get("content-length", "0")
    if not re.fullmatch(r"[0-9]{1,18}", declared, re.ASCII):
        raise HTTPException(400, "Content-Length is not a number of bytes")
    if int(declared) > limit:
        raise too_large(limit)


def too_large(limit: int) -> HTTPException:
    return HTTPException(413, f"the body may have {limit} bytes; nothing of it was kept")


def check_names(headers: Headers, settings: ServerSettings) -> None:
    """Raises HTTPException unless Host names this server, and Origin, where a browser sends one, a page of it."""
    hosts, origins = headers.getlist("host"), headers.getlist("origin")
    authority = hosts[0].lower() if len(hosts) == 1 else ""
    host = host_of(authority)
    if host is None:
        raise HTTPException(400, "send one header Host with the name or address of this server")
    if not is_ours(host, settings.allowed_hosts, any_address=settings.allow_remote):
        raise HTTPException(
            421, f"this server does not go by the name {host[:100]}; its owner can add it: kitsune serve --allow-host"
        )
    if any(not is_same(origin.lower(), authority) for origin in origins):
        raise HTTPException(403, "web pages of other origins may not use this server")


def host_of(authority: str) -> str | None:
    """The name or address of a Host header in small letters, without port and brackets; None if it is neither."""
    match = _AUTHORITY.fullmatch(authority)
    return (match[1] or match[2]) if match else None


def named_host(given: str) -> str:
    """What `--allow-host` names, as `host_of` gives it; a port says nothing. Raises SettingsError for anything else."""
    name = given.lower()
    host = name if _is_address(name) else host_of(name)
    if host is None:
        raise SettingsError(
            f"--allow-host {given!a:.100} is no name of a host; give it as clients write it in an address, without "
            "http:// and without a path: tuner.example.com"
        )
    return host


@lru_cache(maxsize=64)
def is_ours(host: str, names: tuple[str, ...], *, any_address: bool) -> bool:
    """Whether a client may call this server so. An address cannot be made to mean another machine by DNS.

    Remembered, as reading an address took 4 % of a look-up; few, since a name may be as long as a head.
    """
    if is_loopback(host) or host in {name.lower() for name in names}:
        return True
    return any_address and _is_address(host)


def is_same(origin: str, authority: str) -> bool:
    """Whether an Origin is the server itself. The scheme may differ from ours behind a proxy with TLS."""
    match = _ORIGIN.fullmatch(origin)
    return match is not None and match[1] == authority


def _is_address(host: str) -> bool:
    """0.0.0.0 is none: browsers take it for this machine, whatever page asks."""
    try:
        return not ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False
