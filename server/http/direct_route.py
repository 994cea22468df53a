"""A function from request to answer in, a guarded route that calls it and nothing else out."""

import inspect
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import Request
from fastapi.responses import Response
from fastapi.routing import APIRoute
from starlette.types import Receive, Scope, Send

from server.http.auth import Check


class DirectRoute(APIRoute):
    """A route whose function reads the request itself and gives the answer as it is sent.

    FastAPI would look for parameters to solve and for a value to convert, and find neither, in 40 % of the time of a
    look-up. What its router asks of every request is asked here.
    """

    def __init__(self, path: str, endpoint: Callable[[Request], Awaitable[Response]], **options: Any) -> None:
        super().__init__(path, endpoint, **options)
        asked = list(inspect.signature(endpoint).parameters)
        assert asked == ["request"], f"{path} asks FastAPI for {asked}"
        self._checks = [check for depends in self.dependencies if isinstance(check := depends.dependency, Check)]
        assert self._checks and len(self._checks) == len(self.dependencies), f"{path} is guarded otherwise"

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] not in (self.methods or ()):
            await super().handle(scope, receive, send)
            return
        request = Request(scope, receive, send)
        for check in self._checks:
            await check(request)
        answer = await self.endpoint(request)
        await answer(scope, receive, send)
