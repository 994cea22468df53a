"""Middleware that checks every request before routing: the headers Host and Origin, and the size and time of a body.

Host must name this server, which stops DNS rebinding: a web page cannot reach the server under a name of its own.
Origin, where sent, must be this server. Both are checked on every method. Bodies are limited in bytes and in time
while they arrive. The path is not considered.
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
#: A body with this method, or a form with a file, is streamed to its route. All others are read completely first.
_STREAMED: Final = "PUT"
_FORM: Final = "multipart/form-data"
_HEADERS: Final = tuple((name.encode(), value.encode()) for name, value in SECURITY_HEADERS.items())


class Guard:
    """ASGI middleware. Only the one that counts requests is further out."""

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
            check_host_and_origin(headers, self.settings)
            if is_form(headers):
                incoming = checking_length(headers, body)
            else:
                if is_there:
                    check_length(headers, body.limit)
                incoming = body.receive if streams else await body.whole()
        except HTTPException as error:
            await refusal(error.status_code, error.detail)(scope, receive, answer.send)
        else:
            await self.app(scope, incoming, answer.send)

    def _body(self, receive: Receive, *, streams: bool, is_there: bool) -> "BoundedBody":
        limits = self.settings
        if streams:
            return BoundedBody(receive, limits.max_archive_bytes, limits.archive_timeout_s, is_there=is_there)
        return BoundedBody(receive, limits.max_json_bytes, limits.json_timeout_s, is_there=is_there)


class BoundedBody:
    """The body of a request while it arrives. `receive` and `whole` raise HTTPException 413, 408 or 400."""

    def __init__(self, receive: Receive, limit: int, timeout_s: float, *, is_there: bool) -> None:
        self.limit = limit
        self.is_complete = not is_there
        self._receive = receive
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._size = 0

    async def receive(self) -> Message:
        """The next ASGI message. Once the body is complete there is no timeout: the wait is for a disconnect."""
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
        """Reads the whole body; returns a `receive` that gives it as one message."""
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
    """Adds the security headers to an answer, and closes the connection if the body is not complete by then.

    Otherwise the server would read and discard the rest of the body, however long it is.
    """

    def __init__(self, send: Send, body: BoundedBody) -> None:
        self._send = send
        self._body = body

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            names = {name for name, _ in message["headers"]}
            message["headers"] = [*message["headers"], *(pair for pair in _HEADERS if pair[0] not in names)]
            if not self._body.is_complete:
                MutableHeaders(scope=message)["connection"] = "close"
        await self._send(message)


def checking_length(headers: Headers, body: BoundedBody) -> Receive:
    """`body.receive`, which raises HTTPException 413 for a form whose Content-Length is too large.

    Raised where the page reads the form, so that the error is rendered as a page. No byte of the form is read.
    """

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
    """Raises HTTPException for an invalid or too large Content-Length, before a byte of the body is read."""
    declared = headers.get("content-length", "0")
    if not re.fullmatch(r"[0-9]{1,18}", declared, re.ASCII):
        raise HTTPException(400, "Content-Length is not a number of bytes")
    if int(declared) > limit:
        raise too_large(limit)


def too_large(limit: int) -> HTTPException:
    return HTTPException(413, f"the body may have {limit} bytes; nothing of it was kept")


def check_host_and_origin(headers: Headers, settings: ServerSettings) -> None:
    """Raises HTTPException unless Host names this server, and so does Origin where a browser sends it."""
    hosts, origins = headers.getlist("host"), headers.getlist("origin")
    authority = hosts[0].lower() if len(hosts) == 1 else ""
    host = host_of(authority)
    if host is None:
        raise HTTPException(400, "send one header Host with the name or address of this server")
    if not is_known_host(host, settings.allowed_hosts, any_address=settings.allow_remote):
        raise HTTPException(
            421, f"this server does not go by the name {host[:100]}; its owner can add it: kitsune serve --allow-host"
        )
    if any(not is_same_origin(origin.lower(), authority) for origin in origins):
        raise HTTPException(403, "web pages of other origins may not use this server")


def host_of(authority: str) -> str | None:
    """The name or address in a lower-case Host header, without port and brackets; None if it is invalid."""
    match = _AUTHORITY.fullmatch(authority)
    return (match[1] or match[2]) if match else None


def parse_allowed_host(given: str) -> str:
    """The host of a value of `--allow-host`, as `host_of` returns it; a port is ignored. Raises SettingsError."""
    name = given.lower()
    host = name if _is_address(name) else host_of(name)
    if host is None:
        raise SettingsError(
            f"--allow-host {given!a:.100} is no name of a host; give it as clients write it in an address, without "
            "http:// and without a path: tuner.example.com"
        )
    return host


@lru_cache(maxsize=64)
def is_known_host(host: str, names: tuple[str, ...], *, any_address: bool) -> bool:
    """Whether `host` is an accepted name of this server. Any IP address is, with `any_address`: DNS cannot rebind it.

    Cached, because parsing an address took 4 % of a look-up. The cache is small, because a name may be very long.
    """
    if is_loopback(host) or host in {name.lower() for name in names}:
        return True
    return any_address and _is_address(host)


def is_same_origin(origin: str, authority: str) -> bool:
    """Whether Origin is this server. Its scheme is ignored: it differs behind a proxy with TLS."""
    match = _ORIGIN.fullmatch(origin)
    return match is not None and match[1] == authority


def _is_address(host: str) -> bool:
    """False for 0.0.0.0 as well: a browser connects to this machine with it, from any page."""
    try:
        return not ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False
