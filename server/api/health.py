"""Questions of those who operate the server in: does it live, can it work, what does it do."""

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse, Response
from sqlalchemy import text
from starlette.exceptions import HTTPException

from server.http.auth import GuardedRouter, caller
from server.http.context import Here
from server.http.metrics import CONTENT_TYPE
from server.payloads.schemas import documented
from tuner.records import DEFAULT_TEAM
from tuner.store.queries import runs
from tuner.store.queries.tokens import Scope

#: Open to all: load balancers have no token. Nothing that stands here may tell anything.
public = APIRouter(tags=["health"], redirect_slashes=False)
measured = GuardedRouter(Scope.READ, tag="health")


@public.get("/healthz", response_class=PlainTextResponse)
async def lives() -> Response:
    """The process lives."""
    return PlainTextResponse("ok\n")


@public.get("/readyz", response_class=PlainTextResponse, responses=documented(503))
def is_ready(here: Here) -> Response:
    """The database answers as well."""
    with here.database.read() as connection:
        connection.execute(text("SELECT 1"))
    return PlainTextResponse("ok\n")


@measured.get("/metrics", response_class=PlainTextResponse)
def metrics(request: Request, here: Here) -> Response:
    """Requests by route, method and status, their latency, and runs by status, for Prometheus.

    They are those of all teams, so they are for tokens of the team `default`: that of whoever operates the server.
    """
    if caller(request).team != DEFAULT_TEAM:
        raise HTTPException(403, f"what all teams do is told to tokens of the team {DEFAULT_TEAM!r} only")
    with here.database.read() as connection:
        counted = runs.count(connection)
    return Response(here.metrics.text(counted), media_type=CONTENT_TYPE)
