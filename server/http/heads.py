"""Middleware that answers HEAD on every route as GET, without the body."""

import anyio
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class Heads:
    """ASGI middleware; the routes themselves only handle GET."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self.app(scope, receive, send)
            return
        asked = {**scope, "method": "GET"}  # a copy: the server sends no body because its own scope says HEAD
        try:
            with anyio.CancelScope() as rest:
                await self.app(asked, receive, _Head(send, rest).send)
        finally:
            scope.update({name: asked[name] for name in ("route",) if name in asked})  # the metrics read it


class _Head:
    """Sends the head of the answer, then cancels the rest of it, which may be an endless stream."""

    def __init__(self, send: Send, rest: anyio.CancelScope) -> None:
        self._send = send
        self._rest = rest
        self._is_over = False

    async def send(self, message: Message) -> None:
        if message["type"] != "http.response.body":
            await self._send(message)
        elif not self._is_over:
            self._is_over = True
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})
            if message.get("more_body", False):
                self._rest.cancel()
