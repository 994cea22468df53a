"""GET /api/v1/runs/{id}/trace: a trace for Perfetto, or the reason why there is none."""

import pytest
from sqlalchemy import update

from kitsune.launches.planning.trace_export import trace_of
from kitsune.timeline import Timeline
from server.api.traces import Trace
from tests.store.samples import a_plan, a_run, a_timeline, a_trial, after
from tests.unit.server.conftest import assert_problem
from tuner.records import Run, RunStatus, Trial
from tuner.store import tables
from tuner.store.database import Database
from tuner.store.queries import runs, timelines, trials

PLACE = "/api/v1/runs"
ON_STREAMS = {"capture": "step", "streams": 4}


def kept(
    database: Database,
    knobs: dict | None,
    timeline: Timeline | None = None,
    tried: tuple[Trial, ...] = (),
    **run: object,
) -> Run:
    """A finished run with a plan with these knobs; None: without a plan."""
    made = a_run(workload="zoo:mlp", **run)
    with database.begin() as connection:
        runs.add(connection, made)
        claimed = runs.claim_one(connection, made.id, "w")
        assert claimed is not None
        for number, trial in enumerate(tried):
            trials.add(connection, claimed, trial.model_copy(update={"run_id": made.id, "number": number}))
        if timeline is not None:
            timelines.put(connection, claimed, timeline)
        plan = None if knobs is None else a_plan(knobs=knobs)
        return runs.finish(connection, claimed, plan=plan, now=after(9))


def test_a_trace_is_a_file_for_perfetto(client, database):
    run = kept(database, ON_STREAMS, a_timeline())
    answer = client.get(f"{PLACE}/{run.id}/trace")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["content-disposition"] == f'attachment; filename="kitsune-{run.id}-trace.json"'
    assert answer.json() == trace_of(a_timeline())
    assert Trace.model_validate(answer.json()).displayTimeUnit == "ns"
    assert client.get(f"{PLACE}/{run.id}").json()["links"]["trace"] == f"{PLACE}/{run.id}/trace"


def trial_on(**knobs: object) -> Trial:
    return a_trial(a_run(), knobs=knobs)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"knobs": None}, "it has no plan"),
        ({"knobs": {"precision": "bf16"}}, "its plan has one stream: several were not tried"),
        (
            {"knobs": {}, "inapplicable": {"streams=2": "streams need a GPU"}},
            "its plan has one stream: streams need a GPU",
        ),
        (
            {"knobs": {}, "tried": (trial_on(), trial_on(**ON_STREAMS), trial_on(capture="step", streams=2))},
            "one stream was best; 2 of the trials had several",
        ),
        ({"knobs": ON_STREAMS}, "its schedule was not kept"),
    ],
)
def test_where_there_is_none_the_reason_is_given(client, database, given, reason):
    run = kept(database, **given)
    answer = client.get(f"{PLACE}/{run.id}/trace")
    assert_problem(answer, 404)
    assert answer.json()["detail"].startswith(f"run {run.id} has no timeline: {reason}")


def test_before_a_run_has_ended_there_may_be_one_later(client, database):
    run = a_run(status=RunStatus.RUNNING)
    with database.begin() as connection:
        runs.add(connection, run)
    assert "it has no plan yet" in client.get(f"{PLACE}/{run.id}/trace").json()["detail"]


def test_a_plan_that_was_altered_is_no_reason(client, database):
    run = kept(database, {})
    with database.begin() as connection:
        connection.execute(update(tables.plans).values(document={"knobs": 1}))
    answer = client.get(f"{PLACE}/{run.id}/trace")
    assert_problem(answer, 404)
    assert "its plan cannot be read" in answer.json()["detail"]


def test_a_damaged_timeline_is_not_shown(client, database):
    run = kept(database, ON_STREAMS, a_timeline())
    with database.begin() as connection:
        connection.execute(update(tables.timelines).values(content=b"damaged"))
    assert_problem(client.get(f"{PLACE}/{run.id}/trace"), 503)


def test_an_export_has_the_timeline(client, database):
    run, plain = kept(database, ON_STREAMS, a_timeline()), kept(database, None)
    told = client.get(f"{PLACE}/{run.id}/export").json()["timeline"]
    assert Timeline.model_validate(told) == a_timeline()
    assert client.get(f"{PLACE}/{plain.id}/export").json()["timeline"] is None
