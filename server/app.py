"""Assembles the FastAPI application: middleware, routers and shared state, in the order in which they apply."""

from collections.abc import Callable
from typing import Any, Final

from fastapi import APIRouter, FastAPI
from fastapi.responses import Response
from starlette.middleware import Middleware

from kitsune import __version__
from server.api import archives, compare, events, exports, health, plans, runs, shares, traces
from server.http import openapi
from server.http.auth import GuardedRouter
from server.http.context import Context
from server.http.guard import Guard
from server.http.heads import Heads
from server.http.lookups import Lookups
from server.http.metrics import Counting, Metrics
from server.http.rate_limit import Rate
from server.http.token_cache import TokenCache
from server.pages import site
from server.payloads import problems
from server.payloads.schemas import answer, documented
from server.settings import ServerSettings
from tuner.store.database import Database
from tuner.store.queries.tokens import Scope

#: Error statuses that any route can answer: from the guard, the connection or an internal error.
EVERYWHERE: Final = (400, 403, 408, 413, 421, 431, 500)
#: In matching order, the most used first: each router tried before the right one adds 5 % to the time of a look-up.
GUARDED: Final[tuple[GuardedRouter, ...]] = (
    plans.router,
    archives.router,
    runs.submitting,
    runs.reading,
    events.router,
    exports.router,
    traces.router,
    shares.router,
    compare.router,
    health.measured,
)


def create_app(
    database: Database, settings: ServerSettings, *, is_stopping: Callable[[], bool] = lambda: False
) -> FastAPI:
    """Returns the application. Event streams end soon after `is_stopping` returns True."""
    metrics = Metrics()
    app = FastAPI(
        title="Kitsune",
        version=__version__,
        description="Tunes PyTorch training steps that are sent as graphs, without weights, code or data.",
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        telemetry={"tracing": False, "metrics": False, "logs": False},  # looking for collectors took 5 % of a look-up
        responses=documented(*EVERYWHERE),
        middleware=[Middleware(Counting, metrics=metrics), Middleware(Guard, settings=settings), Middleware(Heads)],
    )
    app.state.context = Context(
        database=database,
        settings=settings,
        metrics=metrics,
        token_cache=TokenCache(database),
        lookups=Lookups(database),
        requests_rate=Rate(settings.requests_per_minute),
        lookups_rate=Rate(settings.lookups_per_minute),
        is_stopping=is_stopping,
    )
    problems.install(app)
    for router in (*GUARDED, health.public, _description(app, is_public=settings.is_loopback)):
        app.include_router(router)
    site.install(app)
    return app


def _description(app: FastAPI, *, is_public: bool) -> APIRouter:
    """The route of the OpenAPI document: without a token on loopback, with a `read` token otherwise."""
    router = APIRouter(redirect_slashes=False) if is_public else GuardedRouter(Scope.READ, tag="health")
    made: dict[str, Any] = {}

    @router.get("/openapi.json", include_in_schema=False)
    def description() -> Response:
        if not made:
            made.update(openapi.document(app))
        return answer(made)

    return router
