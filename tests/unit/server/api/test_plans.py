"""Plans by id, and look-ups: exact, compatible or none, with the reason and an ETag."""

import time
from types import SimpleNamespace

import pytest

from kitsune.plan import Plan
from server.http import lookups, ttl_cache
from tests.store.samples import a_plan, after, an_environment
from tests.unit.kitsune.submission import hostile
from tests.unit.server.conftest import assert_problem
from tuner.store.queries import archives, plans

PLACE = "/api/v1/plans"
FINGERPRINT = "f" * 64
HERE = {"fingerprint": FINGERPRINT, "gpu": "NVIDIA H200", "torch": "2.13.0"}
ALL = {"triton": "3.7.1", "cuda": "13.0", "driver": "580", "compute_capability": "9.0", "memory_bytes": 150_000_000_000}


@pytest.fixture
def keep(database):
    def put(*kept: Plan) -> None:
        with database.begin() as connection:
            for plan in kept:
                plans.put(connection, plan, now=after(0))

    return put


def ours(speedup: float = 1.5, fingerprint: str = FINGERPRINT, **environment: object) -> Plan:
    return a_plan(speedup, an_environment(**environment), fingerprint=fingerprint)


def look(client, **changes):
    return client.get(PLACE, params={**HERE, **changes})


def test_an_exact_plan(client, keep):
    keep(ours())
    for asked in ({}, ALL, {"device": "cuda"}):
        found = look(client, **asked).json()
        assert found["match"] == "exact"
        assert Plan.from_json(found["plan"]) == ours()


CHANGES = [("torch", "2.14.0"), ("triton", "3.8"), ("cuda", "12"), ("driver", "1"), ("compute_capability", "8.0"),
           ("memory_bytes", 1)]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), CHANGES)
def test_a_compatible_plan_says_what_differs(client, keep, name, value):
    keep(ours())
    found = look(client, **{**ALL, name: value}).json()
    assert found["match"] == "compatible"
    assert name in found["reason"] and str(value) in found["reason"]
    assert Plan.from_json(found["plan"]) == ours()


@pytest.mark.parametrize("change", [{"gpu": "NVIDIA A100"}, {"device": "cpu"}, {"fingerprint": "e" * 64}])
def test_a_plan_for_another_machine_or_workload_is_none(client, keep, change):
    keep(ours())
    found = look(client, **change).json()
    assert (found["match"], found["plan"]) == ("none", None)
    assert len(found["reason"]) > 20


def test_an_exact_plan_goes_before_a_faster_compatible_one(client, keep):
    keep(ours(1.2), ours(3.0, torch="2.14.0"), ours(1.4), ours(1.3))
    assert Plan.from_json(look(client).json()["plan"]) == ours(1.4)
    assert Plan.from_json(look(client, torch="2.14.0").json()["plan"]) == ours(3.0, torch="2.14.0")


def test_a_plan_is_found_by_its_model_alone(client, database, keep):
    archive = hostile.valid()
    with database.begin() as connection:
        archives.put(connection, archive.to_bytes(), archive)
    keep(ours(fingerprint=archive.fingerprint))
    assert archive.model_fingerprint != archive.fingerprint
    assert look(client, fingerprint=archive.model_fingerprint).json()["match"] == "exact"
    assert look(client, fingerprint=archive.fingerprint).json()["match"] == "exact"


def test_an_etag_spares_the_answer_until_it_changes(client, keep, monkeypatch):
    keep(ours(1.2))
    first = look(client)
    tag = first.headers["etag"]
    assert tag.startswith('"') and tag.endswith('"')
    for given in (tag, f'"other", {tag}', f"W/{tag}", "*"):
        again = client.get(PLACE, params=HERE, headers={"If-None-Match": given})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
    keep(ours(1.4))
    monkeypatch.setattr(ttl_cache, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + lookups.EXTENT_TTL_S))
    changed = client.get(PLACE, params=HERE, headers={"If-None-Match": tag})
    assert (changed.status_code, changed.headers["etag"] != tag) == (200, True)


def test_a_plan_by_its_id(client, keep):
    plan = ours()
    keep(plan)
    response = client.get(f"{PLACE}/{plan.plan_id}")
    assert Plan.from_json(response.json()) == plan
    assert response.headers["etag"] == f'"{plan.plan_id}"'
    again = client.get(f"{PLACE}/{plan.plan_id}", headers={"If-None-Match": response.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_a_plan_written_by_hand_has_an_id_too(client, keep):
    plan = Plan.by_hand(precision="bf16")
    keep(plan)
    assert Plan.from_json(client.get(f"{PLACE}/{plan.plan_id}").json()) == plan


def test_an_unknown_plan_is_a_404(client):
    assert_problem(client.get(f"{PLACE}/{'0' * 64}"), 404)


@pytest.mark.parametrize("name", ["0", "z" * 64, "%00", "..%2f.."])
def test_an_id_that_cannot_be_one_is_refused(client, name):
    response = client.get(f"{PLACE}/{name}")
    assert_problem(response, 404 if "%2f" in name else 422)


BAD = ({"gpu": None}, {"torch": None}, {"fingerprint": None}, {"fingerprint": "f"}, {"gpu": "a\0"}, {"device": "tpu"},
       {"memory_bytes": "many"}, {"memory_bytes": 2**63}, {"memory_bytes": -1}, {"torch": "x" * 201})  # fmt: skip


@pytest.mark.parametrize("change", BAD, ids=str)
def test_a_question_that_makes_no_sense_is_refused(client, change):
    asked = {name: value for name, value in {**HERE, **change}.items() if value is not None}
    assert_problem(client.get(PLACE, params=asked), 422)


@pytest.mark.parametrize("change", [('"bf16"', '"fp16"'), ("{", "[")])
def test_a_plan_that_was_altered_in_the_database_is_not_given(client, database, keep, change):
    plan = ours()
    keep(plan)
    with database.begin() as connection:
        altered = plan.canonical_json().replace(*change)
        connection.exec_driver_sql(f"UPDATE kitsune_plans SET document = '{altered}'")
    problem = assert_problem(client.get(f"{PLACE}/{plan.plan_id}"), 500, "altered", "restore")
    assert problem["type"] == "/problems/damaged"
    assert look(client).json()["match"] == "none"
