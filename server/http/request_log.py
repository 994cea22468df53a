"""Middleware that logs each request: id, method, path, status and duration.

Query, headers and body are never logged, since they may hold secrets.
"""

import logging
import re
import secrets
import time
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kitsune.base import json_logging

#: Longest logged parts: clients may send any length.
MAX_METHOD: Final = 20
MAX_PATH: Final = 500
_RUN: Final = re.compile(r"/runs/([A-Za-z0-9_-]{1,64})(?:/|$)", re.ASCII)

log = logging.getLogger("kitsune.server.requests")


class RequestLog:
    """ASGI middleware outside the error handlers. A request without an answer is logged with status 500.

    All log records of a request have the same `request_id`, which the answer has as `X-Request-Id`.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        begin, status, name = time.perf_counter(), 500, secrets.token_hex(8)

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", name.encode())]
            await send(message)

        method, path = scope["method"][:MAX_METHOD], json_logging.without_secrets(scope["path"][:MAX_PATH])
        run = _RUN.search(path)
        about = {"run_id": run[1]} if run else {}
        with json_logging.concerning(request_id=name, method=method, path=path, **about):
            try:
                await self.app(scope, receive, noting)
            finally:
                took_ms = round((time.perf_counter() - begin) * 1e3, 3)
                log.info("%s %s %d", method, path, status, extra={"status": status, "duration_ms": took_ms})
