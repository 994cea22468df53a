"""What a route works with: the database, the settings and the counters of its application."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request

from server.admission import Admission
from server.metrics import Metrics
from server.settings import ServerSettings
from tuner.store.database import Database


@dataclass(frozen=True)
class Context:
    database: Database
    settings: ServerSettings
    metrics: Metrics
    admission: Admission
    is_stopping: Callable[[], bool]


async def context_of(request: Request) -> Context:
    """A coroutine, so that it costs no thread."""
    found = request.app.state.context
    assert isinstance(found, Context)
    return found


Here = Annotated[Context, Depends(context_of)]
