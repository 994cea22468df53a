"""Operations on existing runs over HTTP: sort, tag, annotate, retry, export, compare, share."""

import csv
import io
import json
from datetime import UTC, datetime, timedelta

import pytest

from kitsune.class_tables import ClassTables
from kitsune.plan import Plan
from server.api.compare import Side, compare
from server.api.exports import escape_formula
from server.payloads.schemas import RunExport
from tests.store.samples import START, a_plan, a_run, a_trial, after, an_environment, some_class_tables
from tests.unit.server.conftest import assert_problem
from tuner.records import Arm, Comparison, Failure, FailureKind, Measurement, Phase, Run, RunStatus, Source, Verdict
from tuner.store.queries import class_tables, runs, shares, trials

PLACE = "/api/v1/runs"


def keep(database, **changes) -> Run:
    with database.begin() as connection:
        return runs.add(connection, a_run(**changes))


def finished(database, plan=None, tried=(), **changes) -> Run:
    run = keep(database, **changes)
    with database.begin() as connection:
        claimed = runs.claim_one(connection, run.id, "w")
        for trial in tried:
            trials.add(connection, claimed, trial.model_copy(update={"run_id": run.id}))
        return runs.finish(connection, claimed, plan=plan, now=after(9))


# Sort and filter ------------------------------------------------------------------------------------------------------


def test_runs_are_sorted_as_asked(client, database):
    plans = [a_plan(1.2), None, a_plan(1.9)]
    slow, none, fast = (finished(database, plan, workload=name).id for plan, name in zip(plans, "bca", strict=True))

    def listed(**query) -> list[str]:
        return [run["id"] for run in client.get(PLACE, params=query).json()["runs"]]

    assert listed(sort="gain") == [fast, slow, none]
    assert listed(sort="gain", order="asc") == [slow, fast, none]
    assert listed(sort="name", order="asc") == [fast, slow, none]
    first = client.get(PLACE, params={"sort": "gain", "limit": 2}).json()
    assert [run["id"] for run in first["runs"]] == [fast, slow]
    assert listed(sort="gain", after=first["after"]) == [none]
    assert_problem(client.get(PLACE, params={"sort": "trials", "after": first["after"]}), 422, "in this order")


def test_runs_are_filtered_by_what_a_list_shows(client, database):
    slow, fast = (finished(database, a_plan(gain), workload=f"zoo:net{gain}").id for gain in (1.2, 1.9))
    lost = keep(database, status=RunStatus.RUNNING, lease_until=after(0), created_at=after(500)).id

    def listed(**query) -> set[str]:
        return {run["id"] for run in client.get(PLACE, params=query).json()["runs"]}

    assert listed(status="lost") == listed(status="running") == {lost}
    assert listed(workload="NET1.9") == listed(min_gain=1.5) == {fast}
    assert listed(min_gain_low=1.0) == listed(max_memory_ratio=1.0) == {slow, fast}
    assert listed(created_after=after(499).isoformat()) == {lost}
    assert listed(min_trials=1) == set()


@pytest.mark.parametrize(
    "query",
    [
        "min_gain=nan",
        "min_gain=-1",
        "created_after=2026-11-20T12:00:00",
        "created_after=2026-11-20",
        "created_after=0.5",
        "sort=speed",
        "order=down",
        "tag=a,b",
        "tag=",
        'tag="',
        f"tag={'x' * 41}",
    ],
)
def test_an_order_or_a_tag_that_makes_no_sense_is_refused(client, query):
    assert_problem(client.get(f"{PLACE}?{query}"), 422)


# Tags and note --------------------------------------------------------------------------------------------------------


def test_a_run_is_tagged_found_and_noted(client, database):
    run = keep(database)
    keep(database)
    tagged = client.patch(f"{PLACE}/{run.id}", json={"tags": ["b", "a", "b"]})
    assert (tagged.status_code, tagged.json()["tags"], tagged.json()["note"]) == (200, ["b", "a"], "")
    noted = client.patch(f"{PLACE}/{run.id}", json={"note": "first line\r\nsecond"}).json()
    assert (noted["tags"], noted["note"]) == (["b", "a"], "first line\nsecond")
    assert client.get(f"{PLACE}/{run.id}").json() == noted
    assert [one["id"] for one in client.get(PLACE, params={"tag": "a"}).json()["runs"]] == [run.id]
    assert client.patch(f"{PLACE}/{run.id}", json={}).json() == noted
    assert client.patch(f"{PLACE}/{run.id}", json={"tags": [], "note": ""}).json()["tags"] == []


@pytest.mark.parametrize(
    "body",
    [{"tags": "a"}, {"tags": [1]}, {"tags": ["a b"]}, {"tags": ["a,b"]}, {"tags": ['"']}, {"tags": ["x" * 41]},
     {"tags": [str(number) for number in range(21)]}, {"note": 1}, {"note": "\x00"}, {"note": "\x1b[2J"},
     {"note": "x" * 4001}, {"status": "finished"}, [], "x"],
    ids=str,
)  # fmt: skip
def test_what_is_no_tag_or_note_is_refused(client, database, body):
    run = keep(database)
    assert_problem(client.patch(f"{PLACE}/{run.id}", json=body), 422)
    assert_problem(client.patch(f"{PLACE}/{run.id}", content=json.dumps(body)), 415)
    with database.read() as connection:
        assert runs.get(connection, run.id) == run


# Try again ------------------------------------------------------------------------------------------------------------


def test_a_run_is_tried_again_once(client, database):
    old = keep(database, status=RunStatus.FAILED, seed=7)
    first, again = (client.post(f"{PLACE}/{old.id}/retry") for _ in range(2))
    assert (first.status_code, again.status_code) == (201, 200)
    assert first.json() == again.json()
    assert first.headers["location"] == first.json()["links"]["self"] == f"{PLACE}/{first.json()['id']}"
    assert (first.json()["seed"], first.json()["status"]) == (7, "queued")
    with database.begin() as connection:
        assert runs.claim(connection, "w", device="cpu").id == first.json()["id"]


def test_a_run_that_has_not_ended_is_not_tried_again(client, database):
    assert_problem(client.post(f"{PLACE}/{keep(database).id}/retry"), 409, "cancel it first")
    assert_problem(client.post(f"{PLACE}/nobody/retry"), 404)


# Export ---------------------------------------------------------------------------------------------------------------


def tried(count: int = 3) -> list:
    """A measured trial, one that failed with a text that a spreadsheet would run as a formula, and more failures."""
    arms = [Arm(name=n, knobs=k, step_ms=ms, peak_bytes=7, first_step_s=1) for n, k, ms in ARMS]
    gain = a_plan(1.5).evidence.speedup
    measured = {
        "failure": None,
        "measurement": Measurement(arms=arms, steps_per_block=(1, 1), environment=an_environment()),
        "comparison": Comparison(speedup=gain, p_value=0.01, verdict=Verdict.FASTER, blocks=2),
    }
    formula = Failure(kind=FailureKind.RAISED, phase=Phase.BUILD, reason='=HYPERLINK("http://x"), "quoted"\nline')
    run = a_run()
    rest = [a_trial(run, number, source=Source.TPE) for number in range(2, count)]
    return [a_trial(run, 0, **measured), a_trial(run, 1, failure=formula), *rest]


ARMS = [("eager", {}, (10.0, 10.25)), ("candidate", {"precision": "bf16"}, (6.5, 6.0))]


@pytest.mark.parametrize("count", [3, 50, 51, 120])
def test_a_run_is_exported_whole(client, database, count):
    plan = a_plan()
    run = finished(database, plan, tried(count))
    answer = client.get(f"{PLACE}/{run.id}/export")
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["content-disposition"] == f'attachment; filename="kitsune-{run.id}.json"'
    found = answer.json()
    assert found["run"] == client.get(f"{PLACE}/{run.id}").json()
    told = {**json.loads(plan.canonical_json()), "plan_id": plan.plan_id}
    assert found["plan"] == client.get(f"/api/v1/plans/{plan.plan_id}").json() == told
    assert Plan.from_json(found["plan"]) == plan
    assert found["trials"] == client.get(f"{PLACE}/{run.id}/trials", params={"limit": 1000}).json()["trials"]
    assert len(found["trials"]) == count


def test_the_times_by_class_are_exported_with_the_run(client, database):
    run = keep(database)
    with database.begin() as connection:
        class_tables.put(connection, runs.claim_one(connection, run.id, "w"), some_class_tables())
    found = client.get(f"{PLACE}/{run.id}/export").json()
    assert ClassTables.model_validate(found["classes"]) == some_class_tables()
    assert RunExport.model_validate(found).classes == some_class_tables()


def test_a_run_without_plan_and_trials_is_exported_too(client, database):
    run = keep(database)
    found = client.get(f"{PLACE}/{run.id}/export?format=json").json()
    assert (found["plan"], found["timeline"], found["classes"], found["trials"]) == (None, None, None, [])
    assert len(client.get(f"{PLACE}/{run.id}/export?format=csv").text.splitlines()) == 1


def test_every_sample_is_a_line(client, database):
    run = finished(database, None, tried())
    answer = client.get(f"{PLACE}/{run.id}/export?format=csv")
    assert answer.headers["content-type"] == "text/csv; charset=utf-8"
    rows = list(csv.DictReader(io.StringIO(answer.text, newline="")))
    samples = [(row["arm"], json.loads(row["arm_knobs"]), float(row["step_ms"])) for row in rows if row["step_ms"]]
    assert samples == [(name, knobs, ms) for name, knobs, times in ARMS for ms in times]
    assert [row["block"] for row in rows] == ["0", "1", "0", "1", "", ""]
    assert {(row["run"], row["trial"]) for row in rows} == {(run.id, str(number)) for number in range(3)}
    assert (rows[0]["verdict"], rows[0]["speedup"], rows[0]["failure"]) == ("faster", "1.5", "")
    assert rows[4]["reason"] == '\'=HYPERLINK("http://x"), "quoted"\nline'
    assert (rows[4]["failure"], rows[5]["source"]) == ("raised", "tpe")


@pytest.mark.parametrize("text", ["=1", "+1", "-1", "@x", "\tx", "\rx"])
def test_no_text_is_a_formula(text):
    assert escape_formula(text) == f"'{text}"
    assert escape_formula(f"x{text}") == f"x{text}"


def test_another_format_is_refused(client, database):
    assert_problem(client.get(f"{PLACE}/{keep(database).id}/export?format=pickle"), 422)


# Compare --------------------------------------------------------------------------------------------------------------


def ask(client, *ids: str, **query):
    return client.get("/api/v1/compare", params={"ids": ",".join(ids), **query})


def test_runs_are_compared_by_what_differs(client, database):
    one = finished(database, a_plan(1.2), seed=1)
    two = finished(database, a_plan(1.9, knobs={"precision": "fp16"}), seed=2)
    found = ask(client, one.id, two.id).json()
    rows = {(row["group"], row["name"]): row["values"] for row in found["rows"]}
    assert found["ids"] == [one.id, two.id]
    assert rows["request", "seed"] == [1, 2]
    assert rows["result", "gain"] == [1.2, 1.9]
    assert rows["plan", "precision"] == ["bf16", "fp16"]
    assert ("environment", "gpu") not in rows and ("request", "workload") not in rows
    assert all(row["differs"] for row in found["rows"])
    assert found["warnings"] == []
    whole = {(row["group"], row["name"]): row for row in ask(client, one.id, two.id, all=True).json()["rows"]}
    assert (whole["environment", "gpu"]["values"], whole["environment", "gpu"]["differs"]) == (
        ["NVIDIA H200"] * 2,
        False,
    )
    assert set(rows) < set(whole)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"gpu": "NVIDIA A100"}, "different GPUs (NVIDIA A100, NVIDIA H200)"),
        ({"torch": "2.11.0"}, "versions of torch (2.11.0, 2.13.0)"),
        ({"driver": "999"}, "versions of driver (580, 999)"),
    ],
)
def test_what_does_not_compare_is_said(client, database, changes, words):
    pair = [
        finished(database, a_plan(environment=an_environment(**change)), fingerprint="f") for change in ({}, changes)
    ]
    (warning,) = ask(client, *(run.id for run in pair)).json()["warnings"]
    assert words in warning


def test_another_step_another_batch_and_a_run_without_a_result_are_said():
    sides = [
        Side(a_run(fingerprint="f", status=RunStatus.FINISHED), a_plan(batch="4x8")),
        Side(a_run(fingerprint="g", status=RunStatus.FINISHED), a_plan(batch="8x8")),
        Side(a_run(id="r3", fingerprint="g", status=RunStatus.RUNNING), None),
    ]
    step, batch, unfinished = compare(sides).warnings
    assert "not the same training step" in step and "different shapes" in batch and "run r3 is running" in unfinished
    rows = {row.name: row.values for row in compare(sides).rows}
    assert "gain" not in rows
    assert rows["precision"] == ("bf16", "bf16", None)


def test_two_to_twenty_runs_are_compared(client, database):
    ids = [keep(database).id for _ in range(21)]
    assert len(ask(client, *ids[:20]).json()["ids"]) == 20
    for wrong in (ids, ids[:1], [], ["a b", "c"], ["a", "a"]):
        assert_problem(ask(client, *wrong), 422)
    assert_problem(ask(client, ids[0], "nobody"), 404, "nobody")
    assert_problem(client.get("/api/v1/compare"), 422)


# Links ----------------------------------------------------------------------------------------------------------------


def test_a_link_is_made_and_ended(client, database):
    run = keep(database)
    made = client.post(f"{PLACE}/{run.id}/share", params={"expires": "1h"})
    assert made.status_code == 201
    secret = made.json()["path"].removeprefix("/shared/")
    expires = datetime.fromisoformat(made.json()["expires_at"])
    assert abs(expires - datetime.now(UTC) - timedelta(hours=1)) < timedelta(minutes=1)
    assert client.post(f"{PLACE}/{run.id}/share").json()["expires_at"] is None
    with database.read() as connection:
        assert shares.find(connection, secret).run_id == run.id
    assert client.delete(f"{PLACE}/{run.id}/share").json() == {"ended": 2}
    assert client.delete(f"{PLACE}/{run.id}/share").json() == {"ended": 0}
    with database.read() as connection:
        assert shares.find(connection, secret) is None


@pytest.mark.parametrize("expires", ["soon", "0", "-1h", "99999999d", ""])
def test_a_link_that_ends_at_no_time_is_refused(client, database, expires):
    run = keep(database, created_at=START)
    assert_problem(client.post(f"{PLACE}/{run.id}/share", params={"expires": expires}), 422, "expires")


@pytest.mark.parametrize("text", ["=1", "\n=1", " =1", "\ufeff=1", "\x00=1", "\u00a0=1", "\uff1d1", "@x", "\t", "-2+3"])
def test_a_cell_that_would_be_a_formula_is_text(text):
    assert escape_formula(text) == f"'{text}"


@pytest.mark.parametrize("text", ["", "a=1", "RuntimeError: =1", "\u200bplain"])
def test_other_cells_stay_as_they_are(text):
    assert escape_formula(text) == text


def test_a_budget_has_an_end(client):
    for budget in ({"budget": "31d"}, {"budget_s": 1e308}, {"budget": "99999999999999999d"}):
        assert client.post("/api/v1/runs", json={"archive": "a" * 64, **budget}).status_code == 422
