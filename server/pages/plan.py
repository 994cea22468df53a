"""The page of a plan, and its download."""

from typing import Final

from fastapi import Request
from fastapi.responses import Response
from sqlalchemy import Connection

from kitsune.errors import NotFoundError
from kitsune.plan import Plan
from server.charts.drawing import words
from server.http.auth import caller
from server.http.context import Here
from server.pages.frame import PageRouter, render
from server.pages.render_charts import timeline_charts
from server.pages.views.plan_view import plan_view
from server.payloads.schemas import PlanId
from tuner.records import Run
from tuner.store.queries import class_tables, plans, runs, timelines
from tuner.store.queries.tokens import Scope

router = PageRouter(Scope.READ, prefix="/plans")

_AS_FILE: Final = 'attachment; filename="plan-{name}.json"'


@router.get("/{plan_id}")
def show(request: Request, here: Here, plan_id: PlanId) -> Response:
    with here.database.read() as connection:
        plan, run = _look(connection, plan_id, caller(request).team)
        timeline = timelines.readable(connection, run.id) if run else None
        tables = class_tables.readable(connection, run.id) if run else None
    view = plan_view(plan, run, timeline, tables)
    trace = f"/runs/{run.id}/trace.json" if run else ""
    return render(
        request, "plan.html", plan=plan, view=view, run=run, charts=timeline_charts(view.timeline), trace=trace
    )


@router.get("/{plan_id}/plan.json")
def download(request: Request, here: Here, plan_id: PlanId) -> Response:
    """The file that `kitsune.Plan.load` reads."""
    with here.database.read() as connection:
        plan, _ = _look(connection, plan_id, caller(request).team)
    headers = {"content-disposition": _AS_FILE.format(name=words.short(plan_id))}
    return Response(f"{plan_view(plan).document}\n", headers=headers, media_type="application/json")


def _look(connection: Connection, plan_id: str, team: str) -> tuple[Plan, Run | None]:
    """The plan, and its run if the team has it.

    Raises NotFoundError, and PlanError for a plan that was altered.
    """
    plan = plans.get(connection, plan_id, team=team)
    if plan is None:
        raise NotFoundError(f"there is no plan {plan_id!r:.100}; the page of a run leads to its plan")
    return plan, runs.get(connection, plan.evidence.run_id, team=team) if plan.evidence else None
