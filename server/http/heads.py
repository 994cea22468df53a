"""HEAD in, the answer to GET without its body out, whatever the route."""

import anyio
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class Heads:
    """ASGI middleware. Routes know of GET alone."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self.app(scope, receive, send)
            return
        asked = {**scope, "method": "GET"}  # a copy: the server sends no body where its own says HEAD
        try:
            with anyio.CancelScope() as rest:
                await self.app(asked, receive, _Head(send, rest).send)
        finally:
            scope.update({name: asked[name] for name in ("route",) if name in asked})  # requests are counted by it


class _Head:
    """Sends what comes before a body. What would make more of it, perhaps without end, is stopped."""

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
