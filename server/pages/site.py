"""Adds all pages to the application, in the order in which their paths are matched."""

from typing import Final

from fastapi import APIRouter, FastAPI

from server.pages import assets, compare, export, home, login, model, plan, problem, run, runs, shared, submit, tokens
from server.pages.login_throttle import Attempts

PAGES: Final[tuple[APIRouter, ...]] = (
    login.router,
    login.leaving,
    home.router,
    runs.router,
    run.reading,
    run.changing,
    export.router,
    plan.router,
    compare.router,
    model.router,
    shared.router,
    submit.router,
    tokens.router,
    problem.router,
    assets.router,
)


def install(app: FastAPI) -> None:
    """Adds the pages. Must be called after `problems.install`, whose error handlers it wraps."""
    app.state.attempts = Attempts()
    problem.install(app)
    for router in PAGES:
        app.include_router(router)
