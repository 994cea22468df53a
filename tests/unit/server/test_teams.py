"""Isolation of teams on all routes of the API: others' objects are answered as if they did not exist."""

import json
import re
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from fastapi.testclient import TestClient

from server.http import lookups, ttl_cache
from tests.store.samples import a_plan, a_run, a_timeline, a_trial, after
from tests.unit.kitsune.submission import hostile
from tests.unit.server.conftest import HERE, assert_problem, bearer, secret
from tests.unit.server.http.test_auth import NEEDS
from tuner.records import RunStatus
from tuner.store import tables
from tuner.store.queries import archives, runs, timelines, trials
from tuner.store.queries.tokens import Scope

ASKED = {"fingerprint": "f" * 64, "gpu": "NVIDIA H200", "torch": "2.13.0"}
#: Valid names that nothing has.
NOBODYS_RUN, NOBODYS_SHA256 = "nobodys-run", "1" * 64


@dataclass(frozen=True)
class Theirs:
    """The objects of team red."""

    run: str
    plan: str
    archive: str


@pytest.fixture
def theirs(database) -> Theirs:
    """A finished run with trials, a plan, an archive and a share link."""
    step, plan = hostile.valid(), a_plan(fingerprint="f" * 64)
    with database.begin() as connection:
        kept, _ = archives.put(connection, step.to_bytes(), step, team="red")
        run = a_run(workload="archive", archive=kept.sha256, team="red", tags=("theirs",), fingerprint="f" * 64)
        runs.add(connection, run)
        claimed = runs.claim_one(connection, run.id, "w")
        trials.add(connection, claimed, a_trial(claimed))
        timelines.put(connection, claimed, a_timeline())
        runs.finish(connection, claimed, plan=plan, now=after(9))
    return Theirs(run.id, plan.plan_id, kept.sha256)


@pytest.fixture
def red(app, database):
    with TestClient(app, base_url=HERE, headers=bearer(secret(database, *Scope, team="red"))) as made:
        yield made


@pytest.fixture
def blue(app, database):
    """An administrator of another team."""
    with TestClient(app, base_url=HERE, headers=bearer(secret(database, *Scope, team="blue"))) as made:
        yield made


def everything(database) -> dict[str, list[tuple[object, ...]]]:
    with database.read() as connection:
        return {name: [tuple(row) for row in connection.execute(table.select())] for name, table in TABLES.items()}


TABLES = tables.metadata.tables


def seen(response, *names: str) -> tuple[int, str, list[tuple[str, str]]]:
    """Status, headers and body of an answer, without the requested names."""
    text = response.text
    for name in names:
        text = text.replace(name, "NAME")
    headers = [item for item in response.headers.items() if item[0] != "content-length"]
    return response.status_code, text, headers


# Routes with a name: that of another team's object is answered like an unknown one.
ADDRESSED = {
    ("GET", "/api/v1/runs/{run_id}"): {},
    ("GET", "/api/v1/runs/{run_id}/trials"): {},
    ("GET", "/api/v1/runs/{run_id}/events"): {},
    ("GET", "/api/v1/runs/{run_id}/export"): {},
    ("GET", "/api/v1/runs/{run_id}/trace"): {},
    ("POST", "/api/v1/runs/{run_id}/cancel"): {},
    ("POST", "/api/v1/runs/{run_id}/retry"): {},
    ("POST", "/api/v1/runs/{run_id}/share"): {},
    ("DELETE", "/api/v1/runs/{run_id}/share"): {},
    ("DELETE", "/api/v1/runs/{run_id}"): {},
    ("PATCH", "/api/v1/runs/{run_id}"): {"json": {"note": "mine now", "tags": ["mine"]}},
    ("GET", "/api/v1/plans/{plan_id}"): {"headers": {"If-None-Match": "*"}},
}
# Each of the others has a test below.
OTHERS = {
    ("GET", "/api/v1/runs"),
    ("POST", "/api/v1/runs"),
    ("GET", "/api/v1/plans"),
    ("PUT", "/api/v1/archives/{sha256}"),
    ("GET", "/api/v1/compare"),
    ("GET", "/metrics"),
}


def test_every_route_is_tried_by_another_team():
    """A new route must be added to `NEEDS`, and then here."""
    assert set(ADDRESSED) | OTHERS == set(NEEDS)


@pytest.mark.parametrize(("method", "path"), sorted(ADDRESSED))
def test_what_another_team_has_is_not_there(red, blue, database, theirs, method, path):
    def place(run: str, plan: str) -> str:
        return path.replace("{run_id}", run).replace("{plan_id}", plan)

    options = ADDRESSED[method, path]
    before = everything(database)
    answer = blue.request(method, place(theirs.run, theirs.plan), **options)
    nobodys = blue.request(method, place(NOBODYS_RUN, NOBODYS_SHA256), **options)
    assert_problem(answer, 404)
    assert seen(answer, theirs.run, theirs.plan) == seen(nobodys, NOBODYS_RUN, NOBODYS_SHA256)
    assert everything(database) == before
    assert red.request(method, place(theirs.run, theirs.plan), **options).status_code in (200, 201, 304)


@pytest.mark.parametrize("query", ["", "?status=finished", "?tag=theirs", "?sort=gain", "?sort=gpu&order=asc"])
def test_a_list_holds_the_runs_of_its_team_only(red, blue, theirs, query):
    assert [run["id"] for run in red.get(f"/api/v1/runs{query}").json()["runs"]] == [theirs.run]
    assert blue.get(f"/api/v1/runs{query}").json() == {"after": None, "runs": []}


def test_a_cursor_of_another_team_leads_nowhere(red, blue, database, theirs):
    with database.begin() as connection:
        runs.add(connection, a_run(team="red"))
    cursor = red.get("/api/v1/runs?limit=1").json()["after"]
    assert red.get("/api/v1/runs", params={"after": cursor}).json()["runs"]
    assert blue.get("/api/v1/runs", params={"after": cursor}).json()["runs"] == []


def test_an_archive_of_another_team_cannot_be_tuned(red, blue, database, theirs):
    answer = blue.post("/api/v1/runs", json={"archive": theirs.archive})
    nobodys = blue.post("/api/v1/runs", json={"archive": NOBODYS_SHA256})
    assert_problem(answer, 404)
    assert seen(answer, theirs.archive) == seen(nobodys, NOBODYS_SHA256)
    assert red.post("/api/v1/runs", json={"archive": theirs.archive}).status_code == 201


def test_an_archive_that_another_team_sent_is_as_new(red, blue, database, theirs):
    content = hostile.valid().to_bytes()
    place = f"/api/v1/archives/{theirs.archive}"
    sent = blue.put(place, content=content)
    assert (sent.status_code, blue.put(place, content=content).status_code) == (201, 200)
    assert red.put(place, content=content).status_code == 200
    assert blue.put(place, content=content).json() == sent.json()
    with database.read() as connection:
        known = archives.get(connection, theirs.archive, team="red")
    assert sent.json()["created_at"] != known.model_dump(mode="json")["created_at"]
    run = blue.post("/api/v1/runs", json={"archive": theirs.archive})
    assert (run.status_code, run.json()["team"]) == (201, "blue")


def test_a_key_of_another_team_is_free(red, blue, theirs, database):
    content = hostile.valid().to_bytes()
    blue.put(f"/api/v1/archives/{theirs.archive}", content=content)
    answers = [
        client.post("/api/v1/runs", json={"archive": theirs.archive, "seed": seed}, headers={"Idempotency-Key": "k"})
        for seed, client in enumerate((red, blue))
    ]
    assert [answer.status_code for answer in answers] == [201, 201]
    assert [answer.json()["team"] for answer in answers] == ["red", "blue"]


def test_a_plan_of_another_team_is_not_found(red, blue, database, theirs, monkeypatch):
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(ttl_cache, "time", SimpleNamespace(monotonic=lambda: clock.now))
    found = red.get("/api/v1/plans", params=ASKED)
    assert found.json()["match"] == "exact"
    tag = {"If-None-Match": found.headers["etag"]}
    for _ in range(2):  # the second is remembered
        answer = blue.get("/api/v1/plans", params=ASKED, headers=tag)
        assert answer.status_code == 200
        lacking = answer.json()
        assert lacking["match"] == "none" and lacking["plan"] is None
        assert "it was never tuned here" in lacking["reason"]
    elsewhere = blue.get("/api/v1/plans", params={**ASKED, "gpu": "NVIDIA A100"})
    assert "NVIDIA H200" not in elsewhere.text
    with database.begin() as connection:
        run = runs.claim_one(connection, runs.add(connection, a_run(team="blue")).id, "w")
        runs.finish(connection, run, plan=a_plan(1.2, fingerprint="f" * 64), now=after(9))
    clock.now += lookups.EXTENT_TTL_S
    assert blue.get("/api/v1/plans", params=ASKED).json()["plan"]["evidence"]["speedup"]["median"] == 1.2
    assert red.get("/api/v1/plans", params=ASKED, headers=tag).status_code == 304


def test_an_archive_of_another_team_names_no_model(blue, database, theirs):
    """A look-up by the fingerprint of the model alone goes over archives: those of its own team only."""
    step = hostile.valid()
    with database.begin() as connection:
        run = runs.claim_one(connection, runs.add(connection, a_run(team="blue")).id, "w")
        runs.finish(connection, run, plan=a_plan(1.2, fingerprint=step.fingerprint), now=after(9))
    asked = {**ASKED, "fingerprint": step.model_fingerprint}
    assert blue.get("/api/v1/plans", params=asked).json()["match"] == "none"


def test_runs_of_another_team_cannot_be_compared(red, blue, database, theirs):
    with database.begin() as connection:
        for name in ("b1", "b2"):
            runs.add(connection, a_run(id=name, team="blue"))
    answer = blue.get("/api/v1/compare", params={"ids": f"b1,{theirs.run}"})
    nobodys = blue.get("/api/v1/compare", params={"ids": f"b1,{NOBODYS_RUN}"})
    assert_problem(answer, 404)
    assert seen(answer, theirs.run) == seen(nobodys, NOBODYS_RUN)
    assert blue.get("/api/v1/compare", params={"ids": "b1,b2"}).status_code == 200


def test_what_all_teams_do_is_told_to_the_operators_only(red, blue, app, database, theirs):
    for client in (red, blue):
        assert_problem(client.get("/metrics"), 403, "default")
    with TestClient(app, base_url=HERE, headers=bearer(secret(database, Scope.READ))) as operator:
        counted = operator.get("/metrics").text
    assert 'kitsune_runs{status="finished"} 1.0' in counted


def test_a_worker_serves_every_team(database, red, theirs):
    red.post("/api/v1/runs", json={"archive": theirs.archive})
    with database.begin() as connection:
        runs.add(connection, a_run(workload="zoo:mlp", team="blue"))
        taken = [runs.claim(connection, "w", device="cpu") for _ in range(3)]
    assert sorted(run.team for run in taken if run) == ["blue", "red"]


def test_events_tell_the_team_of_the_run(red, theirs):
    text = red.get(f"/api/v1/runs/{theirs.run}/events").text
    (line,) = re.findall(r"event: run\ndata: (.*)", text)
    assert (json.loads(line)["team"], json.loads(line)["status"]) == ("red", RunStatus.FINISHED)
