"""The page of a plan, and its download."""

from typing import Final

from fastapi import Request
from fastapi.responses import Response

from kitsune.errors import NotFoundError
from kitsune.plan import Plan
from kitsune.timeline import Timeline
from server.charts.drawing import words
from server.http.auth import caller
from server.http.context import Context, Here
from server.pages.frame import PageRouter, render
from server.pages.render_charts import timeline_charts
from server.pages.views.plan_view import plan_view
from server.payloads.schemas import PlanId
from tuner.records import Run
from tuner.store.queries import plans, runs, timelines
from tuner.store.queries.tokens import Scope

router = PageRouter(Scope.READ, prefix="/plans")

_AS_FILE: Final = 'attachment; filename="plan-{name}.json"'


@router.get("/{plan_id}")
def show(request: Request, here: Here, plan_id: PlanId) -> Response:
    plan, run, timeline = _look(here, plan_id, caller(request).team)
    view = plan_view(plan, timeline)
    trace = f"/runs/{run.id}/trace.json" if run else ""
    return render(
        request, "plan.html", plan=plan, view=view, run=run, charts=timeline_charts(view.timeline), trace=trace
    )


@router.get("/{plan_id}/plan.json")
def download(request: Request, here: Here, plan_id: PlanId) -> Response:
    """The file that `kitsune.Plan.load` reads."""
    plan, _, _ = _look(here, plan_id, caller(request).team)
    headers = {"content-disposition": _AS_FILE.format(name=words.short(plan_id))}
    return Response(f"{plan_view(plan).document}\n", headers=headers, media_type="application/json")


def _look(here: Context, plan_id: str, team: str) -> tuple[Plan, Run | None, Timeline | None]:
    """The plan, and its run and timeline if the team has them.

    Raises NotFoundError, and PlanError for a plan that was altered.
    """
    with here.database.read() as connection:
        plan = plans.get(connection, plan_id, team=team)
        if plan is None:
            raise NotFoundError(f"there is no plan {plan_id!r:.100}; the page of a run leads to its plan")
        run = runs.get(connection, plan.evidence.run_id, team=team) if plan.evidence else None
        return plan, run, timelines.readable(connection, run.id) if run else None
