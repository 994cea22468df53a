"""What a route works with: the database, the settings and the counters of its application."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request

from server.http.lookups import Lookups
from server.http.metrics import Metrics
from server.http.rate_limit import Rate
from server.http.token_cache import Admission
from server.settings import ServerSettings
from tuner.store.database import Database


@dataclass(frozen=True)
class Context:
    database: Database
    settings: ServerSettings
    metrics: Metrics
    admission: Admission
    lookups: Lookups
    requests_rate: Rate
    lookups_rate: Rate
    is_stopping: Callable[[], bool]


def context_in(request: Request) -> Context:
    found = request.app.state.context
    assert isinstance(found, Context)
    return found


async def _of(request: Request) -> Context:
    """A coroutine, so that it costs no thread."""
    return context_in(request)


Here = Annotated[Context, Depends(_of)]
