"""The shared state of an application (database, settings, caches, rate limits), and how a route gets it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request

from server.http.lookups import Lookups
from server.http.metrics import Metrics
from server.http.rate_limit import Rate
from server.http.token_cache import TokenCache
from server.settings import ServerSettings
from tuner.store.database import Database


@dataclass(frozen=True)
class Context:
    database: Database
    settings: ServerSettings
    metrics: Metrics
    token_cache: TokenCache
    lookups: Lookups
    requests_rate: Rate
    lookups_rate: Rate
    is_stopping: Callable[[], bool]


def context_in(request: Request) -> Context:
    found = request.app.state.context
    assert isinstance(found, Context)
    return found


async def _of(request: Request) -> Context:
    """A coroutine, so that FastAPI does not run it in a thread."""
    return context_in(request)


Here = Annotated[Context, Depends(_of)]
