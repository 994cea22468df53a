"""The page of a run, its live updates, and its actions: cancel, retry, delete, annotate and share."""

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

from fastapi import Query, Request
from fastapi.responses import RedirectResponse, Response
from pydantic import ValidationError
from sqlalchemy import Connection

from kitsune.class_tables import ClassTables
from kitsune.errors import PlanError, SettingsError
from kitsune.plan import Plan
from kitsune.timeline import Timeline
from server.api import runs as api_runs
from server.charts.search import search_history
from server.http.auth import caller, requires
from server.http.context import Here
from server.pages import flash
from server.pages.frame import PageRouter, address_of, form_of, render
from server.pages.render_charts import charts_of, drawn
from server.pages.views.run_view import news_view, run_view
from server.payloads.schemas import Annotation, RunId
from tuner.records import Run, Trial
from tuner.store.queries import class_tables, plans, retention, runs, shares, submits, timelines, trials
from tuner.store.queries.runs import ARCHIVE, ZOO
from tuner.store.queries.tokens import Scope
from tuner.wall_clock import utcnow

reading = PageRouter(Scope.READ, prefix="/runs")
changing = PageRouter(Scope.SUBMIT, prefix="/runs")

#: As in the API, with a hint for readers of pages.
require_run = partial(api_runs.require_run, hint="the list of runs has all that your team may see")

Seen = Annotated[int, Query(ge=0, lt=2**63, description="number of trials that the page shows already")]


@dataclass(frozen=True, slots=True)
class LoadedRun:
    """A run with its trials, plan, timeline and class tables. `problem`: why its plan is not shown."""

    run: Run
    trials: list[Trial]
    plan: Plan | None
    problem: str
    timeline: Timeline | None = None
    tables: ClassTables | None = None


@reading.get("/{run_id}")
def show(request: Request, here: Here, run_id: RunId) -> Response:
    with here.database.read() as connection:
        found = look(connection, run_id, team=caller(request).team)
        links = shares.listed(connection, run_id, team=caller(request).team)
    place = place_of(run_id)
    secret = flash.message_of(request, place)
    answer = render_run(
        request,
        "run.html",
        found,
        address_of(request),
        place=place,
        trace=f"{place}/trace.json",
        links=links,
        link=f"{address_of(request)}/shared/{secret}" if secret else "",
        is_retriable=found.run.status.is_finished and is_data(found.run),
    )
    flash.clear(answer, request, place)
    return answer


@reading.get("/{run_id}/live")
def live(request: Request, here: Here, run_id: RunId, seen: Seen = 0) -> Response:
    """The changes since the page was rendered."""
    with here.database.read() as connection:
        found = look(connection, run_id, team=caller(request).team)
    return news(request, found, seen, place_of(run_id))


@changing.post("/{run_id}/cancel")
def cancel(request: Request, here: Here, run_id: RunId) -> Response:
    with here.database.begin() as connection:
        require_run(runs.cancel(connection, run_id, team=caller(request).team), run_id)
    return back_to(run_id)


@changing.post("/{run_id}/retry")
def retry(request: Request, here: Here, run_id: RunId) -> Response:
    """Redirects to the new run, or to that of an earlier retry that has not ended yet."""
    with here.database.begin() as connection:
        token, quota = caller(request), here.settings.quota
        made = submits.retry(connection, run_id, owner=token.id, team=token.team, quota=quota)
    run, _ = require_run(made, run_id)
    return back_to(run.id)


@changing.post("/{run_id}/delete")
def delete(request: Request, here: Here, run_id: RunId) -> Response:
    """Redirects to the list of runs."""
    with_plan = "plan" in form_of(request)
    with here.database.begin() as connection:
        team = caller(request).team
        require_run(retention.delete_run(connection, run_id, team=team, with_plan=with_plan), run_id)
    return RedirectResponse("/runs", 303)


@changing.post("/{run_id}/note", dependencies=[requires(Scope.READ)])
def note(request: Request, here: Here, run_id: RunId) -> Response:
    """Saves the tags and the note."""
    form = form_of(request)
    told = annotation_of(form.get("tags", ""), form.get("note", ""))
    with here.database.begin() as connection:
        team = caller(request).team
        require_run(runs.annotate(connection, run_id, team=team, tags=told.tags, note=told.note), run_id)
    return back_to(run_id, "notes")


@changing.post("/{run_id}/share", dependencies=[requires(Scope.READ)])
def share(request: Request, here: Here, run_id: RunId) -> Response:
    """Creates a link, which the page of the run shows once: the database has only its digest."""
    with here.database.begin() as connection:
        made = shares.create(connection, run_id, team=caller(request).team)
    _, secret = require_run(made, run_id)
    answer = back_to(run_id)
    flash.set_message(answer, request, place_of(run_id), secret)
    return answer


@changing.post("/{run_id}/unshare")
def unshare(request: Request, here: Here, run_id: RunId) -> Response:
    with here.database.begin() as connection:
        team = caller(request).team
        require_run(runs.get(connection, run_id, team=team), run_id)
        shares.end(connection, run_id, team=team)
    return back_to(run_id, "share")


# Shared with the other pages of a run ---------------------------------------------------------------------------------


def look(connection: Connection, run_id: str, *, team: str) -> LoadedRun:
    """The run and its parts, also if its plan cannot be read. Raises NotFoundError."""
    run = require_run(runs.get(connection, run_id, team=team), run_id)
    tried = trials.list_of(connection, run_id)
    try:
        plan = plans.get(connection, run.plan_id, team=team) if run.plan_id else None
    except PlanError as error:
        return LoadedRun(run, tried, None, f"The plan of this run cannot be read: {error}.")
    if plan is None:
        return LoadedRun(run, tried, None, "")
    timeline, tables = timelines.readable(connection, run.id), class_tables.readable(connection, run.id)
    return LoadedRun(run, tried, plan, "", timeline, tables)


def render_run(request: Request, template: str, found: LoadedRun, server: str | None, **context: Any) -> Response:
    """Renders a page of a run. `server`: the URL from which the viewer can fetch the plan; None if they cannot."""
    view = run_view(found.run, found.trials, found.plan, utcnow(), server, found.timeline, found.tables)
    return render(request, template, found=found, run=found.run, view=view, charts=charts_of(view), **context)


def news(request: Request, found: LoadedRun, seen: int, place: str) -> Response:
    """The part of the page that changes; once the run has ended, an instruction to reload the page."""
    if found.run.status.is_finished:
        return Response(status_code=204, headers={"hx-refresh": "true"})
    view = news_view(found.run, found.trials, found.plan, utcnow())
    is_new = view.progress is not None and view.progress.seen != seen
    charts = {"search": drawn(search_history, view.tried) if is_new else ""}
    return render(request, "run_news.html", view=view, place=place, is_new=is_new, charts=charts)


def is_data(run: Run) -> bool:
    """Whether any worker can run it again, because it needs nothing of the machine where it was submitted."""
    return run.workload.startswith(ZOO) or (run.workload == ARCHIVE and run.archive is not None)


def place_of(run_id: str) -> str:
    return f"/runs/{run_id}"


def back_to(run_id: str, part: str = "") -> Response:
    return RedirectResponse(f"{place_of(run_id)}{f'#{part}' if part else ''}", 303)


def annotation_of(tags: str, note: str) -> Annotation:
    """Tags separated by commas, and a note, validated by the rules of the API. Raises SettingsError."""
    words = [word for word in (tag.strip() for tag in tags.split(",")) if word]
    try:
        return Annotation.model_validate({"tags": words, "note": note})
    except ValidationError as error:
        raise SettingsError(
            "give at most 20 tags separated by commas, each of up to 40 letters, digits and _ . : / + -, and a note of "
            "at most 4000 printable characters"
        ) from error
