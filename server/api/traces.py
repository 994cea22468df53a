"""The route that returns the launches of a step by the plan of a run, as a trace file for Perfetto."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from fastapi import Request
from fastapi.responses import Response
from pydantic import ConfigDict
from sqlalchemy import Connection

from kitsune.base.base_record import Record
from kitsune.errors import NotFoundError, PlanError
from kitsune.knobs import KNOBS
from kitsune.launches.planning.trace_export import trace_of
from kitsune.plan import Plan
from server.api.runs import require_run
from server.http.auth import GuardedRouter, caller
from server.http.context import Here
from server.payloads.schemas import RunId, documented
from tuner.records import Run, Trial
from tuner.store.queries import plans, runs, timelines, trials
from tuner.store.queries.tokens import Scope

_STREAMS: Final = KNOBS["streams"]

router = GuardedRouter(Scope.READ, prefix="/api/v1/runs", tag="runs")


class Trace(Record):
    """A trace after the "Trace Event Format": times in us, as predicted."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "displayTimeUnit": "ns",
                    "otherData": {"plan": "279 launches on 3 streams"},
                    "traceEvents": [
                        {"name": "gemm", "ph": "X", "pid": 0, "tid": 1, "ts": 12.5, "dur": 3.25, "args": {"launch": 0}}
                    ],
                }
            ]
        }
    )

    displayTimeUnit: str  # noqa: N815 - names of the format
    traceEvents: tuple[Mapping[str, Any], ...]  # noqa: N815
    otherData: Mapping[str, Any]  # noqa: N815


@router.get("/{run_id}/trace", responses={200: {"model": Trace, "description": "The file"}, **documented(404)})
def trace(request: Request, here: Here, run_id: RunId) -> Response:
    """The launches of a step by the plan of the run, stream by stream, as a file for https://ui.perfetto.dev."""
    with here.database.read() as connection:
        run = require_run(runs.get(connection, run_id, team=caller(request).team), run_id)
        timeline = timelines.get(connection, run.id)
        if timeline is None:
            raise NotFoundError(f"run {run.id} has no timeline: {_reason_of(connection, run)}")
    name = {"content-disposition": f'attachment; filename="kitsune-{run.id}-trace.json"'}
    return Response(json.dumps(trace_of(timeline)), headers=name, media_type="application/json")


def why_no_timeline(run: Run, tried: Sequence[Trial], plan: Plan | None) -> str:
    """Why there is no timeline of launches on streams, as the end of a sentence."""
    if plan is None:
        return "it has no plan" if run.status.is_finished else "it has no plan yet"
    if plan.choice(_STREAMS.name) != _STREAMS.default:
        return "its schedule was not kept: the run is of an older version of Kitsune"
    on_several = [trial for trial in tried if trial.source.is_search and _is_on_several(trial)]
    if on_several:
        return f"one stream was best; {len(on_several)} of the trials had several"
    reasons = (run.inapplicable.get(f"{_STREAMS.name}={choice}") for choice in _STREAMS.choices)
    reason = next(filter(None, reasons), "")
    return f"its plan has one stream: {reason or 'several were not tried'}"


def _is_on_several(trial: Trial) -> bool:
    return trial.knobs.get(_STREAMS.name, _STREAMS.default) != _STREAMS.default


def _reason_of(connection: Connection, run: Run) -> str:
    try:
        plan = plans.get(connection, run.plan_id, team=run.team) if run.plan_id else None
    except PlanError:
        return "its plan cannot be read"
    return why_no_timeline(run, trials.list_of(connection, run.id), plan)
