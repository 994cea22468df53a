"""The routes for operators: liveness, readiness and metrics."""

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

#: Open without a token, for load balancers. These routes must not disclose anything.
public = APIRouter(tags=["health"], redirect_slashes=False)
measured = GuardedRouter(Scope.READ, tag="health")


@public.get("/healthz", response_class=PlainTextResponse)
async def lives() -> Response:
    """Liveness: the process answers."""
    return PlainTextResponse("ok\n")


@public.get("/readyz", response_class=PlainTextResponse, responses=documented(503))
def is_ready(here: Here) -> Response:
    """Readiness: the database answers as well."""
    with here.database.read() as connection:
        connection.execute(text("SELECT 1"))
    return PlainTextResponse("ok\n")


@measured.get("/metrics", response_class=PlainTextResponse)
def metrics(request: Request, here: Here) -> Response:
    """Requests by route, method and status, their latency, and runs by status, for Prometheus.

    They cover all teams, so they need a token of the team `default`, which operates the server.
    """
    if caller(request).team != DEFAULT_TEAM:
        raise HTTPException(403, f"metrics cover all teams; they need a token of the team {DEFAULT_TEAM!r}")
    with here.database.read() as connection:
        counted = runs.count(connection)
    return Response(here.metrics.text(counted), media_type=CONTENT_TYPE)
