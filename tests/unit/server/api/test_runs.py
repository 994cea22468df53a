"""Submitting, listing, showing and cancelling runs over HTTP; invalid input is a 4xx and stores nothing."""

import base64
import json
import threading

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.store.samples import a_plan, a_run, a_trial, after
from tests.unit.server.conftest import assert_problem
from tuner.records import RunStatus, Verdict
from tuner.store.queries import runs, trials

PLACE = "/api/v1/runs"


def submit(client, kept, key: str | None = None, **changes):
    headers = {} if key is None else {"Idempotency-Key": key}
    return client.post(PLACE, json={"archive": kept.sha256, **changes}, headers=headers)


def count(database) -> int:
    with database.read() as connection:
        return len(runs.page(connection, limit=1000).runs)


def test_a_submit_makes_a_queued_run(client, database, archive):
    response = submit(
        client, archive, device="cuda", trials=7, budget="5m", memory_limit_bytes=2**32, seed=3, name="my CNN"
    )
    assert response.status_code == 201
    run = response.json()
    assert response.headers["location"] == run["links"]["self"] == f"{PLACE}/{run['id']}"
    with database.read() as connection:
        stored = runs.get(connection, run["id"])
    assert (stored.status, stored.archive, stored.workload) == (RunStatus.QUEUED, archive.sha256, "archive")
    assert (stored.device, stored.budget_trials, stored.budget_s) == ("cuda", 7, 300.0)
    assert (stored.seed, stored.name, stored.memory_limit_bytes) == (3, "my CNN", 2**32)
    assert client.get(run["links"]["self"]).json() == run


@pytest.mark.parametrize("budget", [{"budget": "90s"}, {"budget": 90}, {"budget": "90"}, {"budget_s": 90.0}])
def test_a_budget_has_several_spellings(client, archive, budget):
    assert submit(client, archive, **budget).json()["budget_s"] == 90.0


@pytest.mark.parametrize("limit", [{"memory_limit": "4GiB"}, {"memory_limit": 2**32}, {"memory_limit_bytes": 2**32}])
def test_a_memory_limit_has_several_spellings(client, archive, limit):
    assert submit(client, archive, **limit).json()["memory_limit_bytes"] == 2**32


def test_the_same_content_is_the_same_run_until_it_ends(client, database, archive):
    first, again = submit(client, archive), submit(client, archive)
    assert (first.status_code, again.status_code) == (201, 200)
    assert first.json() == again.json()
    assert submit(client, archive, seed=1).status_code == 201
    client.post(first.json()["links"]["cancel"])
    assert submit(client, archive).status_code == 201
    assert count(database) == 3


def test_a_key_stands_for_one_submit(client, database, archive):
    first, again = submit(client, archive, "k1"), submit(client, archive, "k1")
    assert (first.status_code, again.status_code) == (201, 200)
    assert first.json()["id"] == again.json()["id"]
    assert first.headers["idempotency-key"] == again.headers["idempotency-key"] == "k1"
    problem = assert_problem(submit(client, archive, "k1", seed=1), 409)
    assert problem["type"] == "/problems/conflict"
    assert count(database) == 1


@pytest.mark.parametrize(
    "spelled", [{"seed": 0}, {"device": ""}, {"name": ""}, {"budget": None}, {"trials": None}], ids=str
)
@pytest.mark.parametrize("key", ["k1", None])
def test_a_default_that_is_spelled_out_asks_for_the_same(client, archive, spelled, key):
    first, again = submit(client, archive, key), submit(client, archive, key, **spelled)
    assert (first.status_code, again.status_code) == (201, 200)
    assert again.json() == first.json()


def test_a_budget_of_time_has_no_default_beside_it(client, archive):
    assert submit(client, archive, "k1", budget="5m").json()["budget_trials"] is None
    assert_problem(submit(client, archive, "k1", budget="5m", trials=25), 409)
    assert submit(client, archive, "k1", budget_s=300).status_code == 200


def test_many_submits_at_once_make_one_run(client, database, archive):
    found: list[tuple[int, str]] = []

    def send() -> None:
        response = submit(client, archive, "k")
        found.append((response.status_code, response.json()["id"]))

    threads = [threading.Thread(target=send) for _ in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(code for code, _ in found) == [200] * 9 + [201]
    assert len({run for _, run in found}) == 1
    assert count(database) == 1


BAD = {
    "an unknown archive": ({"archive": "0" * 64}, 404, "archive"),
    "no archive": ({"archive": None}, 422, "archive"),
    "a name that is a path": ({"archive": "../../etc/passwd"}, 422, "archive"),
    "an unknown field": ({"code": "import os"}, 422, "code"),
    "an unknown device": ({"device": "tpu"}, 422, "device"),
    "one device": ({"device": "cuda:0"}, 422, "device"),
    "no trials": ({"trials": 0}, 422, "trials"),
    "too many trials": ({"trials": 10**9}, 422, "trials"),
    "half a trial": ({"trials": 1.5}, 422, "trials"),
    "a budget in words": ({"budget": "a while"}, 422, "budget"),
    "a negative budget": ({"budget": -1}, 422, "budget"),
    "a negative budget_s": ({"budget_s": -1}, 422, "budget_s"),
    "no memory": ({"memory_limit_bytes": 0}, 422, "memory_limit_bytes"),
    "memory in words": ({"memory_limit_bytes": "4GiB"}, 422, "memory_limit_bytes"),
    "a memory limit in words": ({"memory_limit": "much"}, 422, "memory_limit"),
    "two memory limits": ({"memory_limit": "1GiB", "memory_limit_bytes": 5}, 422, "either"),
    "two budgets": ({"budget": "5m", "budget_s": 300}, 422, "either"),
    "a seed of 65 bits": ({"seed": 2**64}, 422, "seed"),
    "a name with a NUL": ({"name": "a\0b"}, 422, "name"),
    "a name that steers a terminal": ({"name": "\x1b[2J"}, 422, "name"),
    "a name of two lines": ({"name": "a\nb"}, 422, "name"),
    "a name that turns the text around": ({"name": "a\u202eb"}, 422, "name"),
    "a long name": ({"name": "a" * 101}, 422, "name"),
    "true trials": ({"trials": True}, 422, "trials"),
    "a true budget": ({"budget": True}, 422, "budget"),
    "a true budget_s": ({"budget_s": True}, 422, "budget_s"),
    "a false seed": ({"seed": False}, 422, "seed"),
    "trials as text": ({"trials": "25"}, 422, "trials"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_submit_that_makes_no_sense_is_refused(client, database, archive, case):
    changes, status, word = BAD[case]
    response = submit(client, archive, **changes)
    assert_problem(response, status, word)
    assert count(database) == 0


TEXTS = (b"", b"{", b"[]", b"null", b"1", b'"x"', b"\xff\xfe", b"{" * 60_000, b"[" * 60_000, b'{"a":' * 10_000,
         b"9" * 60_000, b'{"archive": NaN}', b'{"archive": "\\ud800"}', b'{"seed": 1e999}')  # fmt: skip


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: repr(text[:20]))
def test_a_body_that_is_no_submit_is_refused(client, database, text):
    response = client.post(PLACE, content=text, headers={"Content-Type": "application/json"})
    assert_problem(response, 422)
    assert count(database) == 0


@pytest.mark.parametrize("kind", ["", "text/plain", "application/x-www-form-urlencoded", "application/jsonp"])
def test_what_a_web_page_can_send_unasked_is_refused(client, archive, kind):
    body = json.dumps({"archive": archive.sha256})
    assert_problem(client.post(PLACE, content=body, headers={"Content-Type": kind}), 415, "application/json")


@pytest.mark.parametrize("key", ["", " ", "a b", "k" * 256, "k\x01"])
def test_a_key_that_cannot_be_kept_is_refused(client, archive, key):
    assert_problem(submit(client, archive, key), 422, "idempotency-key")


@given(
    st.dictionaries(
        st.sampled_from(
            ["archive", "device", "trials", "budget", "budget_s", "memory_limit_bytes", "seed", "name", "x"]
        ),
        st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.lists, max_leaves=3),
    )
)
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_no_body_breaks_the_server(client, archive, body):
    content = json.dumps({"archive": archive.sha256, **body})
    response = client.post(PLACE, content=content, headers={"Content-Type": "application/json"})
    assert response.status_code in (200, 201) or assert_problem(response, response.status_code)
    assert response.status_code < 500


# Reading --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def history(database):
    """Three runs, the oldest finished with a plan and three trials."""
    found = [a_run(created_at=after(number), fingerprint=f"{number}" * 64) for number in range(3)]
    with database.begin() as connection:
        for run in found:
            runs.add(connection, run)
        claimed = runs.claim_one(connection, found[0].id, "worker")
        for number in range(3):
            trials.add(connection, claimed, a_trial(claimed, number))
        found[0] = runs.finish(connection, claimed, plan=a_plan(), verdict=Verdict.FASTER)
    return found


def test_runs_come_newest_first_a_page_at_a_time(client, history):
    first = client.get(PLACE, params={"limit": 2}).json()
    assert [run["id"] for run in first["runs"]] == [history[2].id, history[1].id]
    rest = client.get(PLACE, params={"limit": 2, "after": first["after"]}).json()
    assert [run["id"] for run in rest["runs"]] == [history[0].id]
    assert rest["after"] is None


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ({"status": "finished"}, [0]),
        ({"status": "queued"}, [2, 1]),
        ({"verdict": "faster"}, [0]),
        ({"fingerprint": "1" * 64}, [1]),
        ({"workload": "zoo:mlp"}, [2, 1, 0]),
        ({"workload": "zoo:%"}, []),
        ({"gpu": "' OR 1=1 --"}, []),
    ],
)
def test_runs_are_filtered(client, history, query, found):
    listed = client.get(PLACE, params=query).json()["runs"]
    assert [run["id"] for run in listed] == [history[number].id for number in found]


def cursor(text: str) -> str:
    return base64.urlsafe_b64encode(text.encode()).decode()


BAD_QUERIES = (
    {"limit": 0}, {"limit": 201}, {"limit": "all"}, {"status": "asleep"}, {"verdict": "best"}, {"after": "x"},
    {"after": "AAAA"}, {"after": "\0"}, {"after": "é" * 50}, {"fingerprint": "abc"}, {"gpu": "a\0b"},
    {"workload": "x" * 201}, {"bogus": 1}, {"after": cursor("0001-01-01T00:00:00+14:00 x")},
    {"after": cursor("9999-12-31T23:59:59-14:00 x")},
)  # fmt: skip


@pytest.mark.parametrize("query", BAD_QUERIES, ids=str)
def test_a_query_that_makes_no_sense_is_refused(client, history, query):
    assert_problem(client.get(PLACE, params=query), 422)


def test_a_finished_run_leads_to_its_plan_and_its_trials(client, history):
    run = client.get(f"{PLACE}/{history[0].id}").json()
    assert client.get(run["links"]["plan"]).json()["plan_id"] == run["plan_id"]
    tried = client.get(run["links"]["trials"]).json()["trials"]
    assert [trial["number"] for trial in tried] == [0, 1, 2]
    rest = client.get(run["links"]["trials"], params={"after": 0, "limit": 1}).json()["trials"]
    assert rest == tried[1:2]
    assert "plan" not in client.get(f"{PLACE}/{history[1].id}").json()["links"]


def test_cancel_ends_a_run_and_leaves_one_that_has_ended(client, history):
    assert client.post(f"{PLACE}/{history[1].id}/cancel").json()["status"] == "cancelled"
    assert client.post(f"{PLACE}/{history[1].id}/cancel").json()["status"] == "cancelled"
    assert client.post(f"{PLACE}/{history[0].id}/cancel").json()["status"] == "finished"


@pytest.mark.parametrize("path", ["", "/trials", "/events"])
def test_a_run_that_is_not_there_is_a_404(client, path):
    assert_problem(client.get(f"{PLACE}/nothing{path}"), 404, "'nothing'", "lists them")


def test_cancel_of_a_run_that_is_not_there_is_a_404(client):
    assert_problem(client.post(f"{PLACE}/nothing/cancel"), 404)


@pytest.mark.parametrize("name", ["%00", "a%00b", "x" * 65, "%27%20OR%201=1", "é", "a%0ab"])
def test_an_id_that_cannot_be_one_is_refused(client, name):
    for path in ("", "/trials", "/events"):
        assert_problem(client.get(f"{PLACE}/{name}{path}"), 422, "run_id")


# Deleting -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def ended(client, database, archive):
    """A run that has finished, with a trial and a plan."""
    run_id = submit(client, archive, "k").json()["id"]
    with database.begin() as connection:
        mine = runs.claim_one(connection, run_id, "w")
        trials.add(connection, mine, a_trial(mine))
        return runs.finish(connection, mine, plan=a_plan(fingerprint="f" * 64), verdict=Verdict.FASTER)


@pytest.mark.parametrize(("query", "left"), [("", 200), ("?plan=false", 200), ("?plan=true", 404)])
def test_a_run_is_deleted_and_its_plan_where_that_is_asked_for(client, database, ended, query, left):
    response = client.delete(f"{PLACE}/{ended.id}{query}")
    assert (response.status_code, response.json()) == (200, {"id": ended.id})
    assert_problem(client.get(f"{PLACE}/{ended.id}"), 404)
    assert_problem(client.delete(f"{PLACE}/{ended.id}"), 404)
    assert client.get(f"/api/v1/plans/{ended.plan_id}").status_code == left
    assert count(database) == 0


def test_a_run_that_goes_on_is_not_deleted(client, database, archive):
    run = submit(client, archive).json()
    problem = assert_problem(client.delete(run["links"]["self"]), 409, "is queued", "cancel it first")
    assert problem["type"] == "/problems/conflict"
    assert count(database) == 1


def test_what_asked_for_a_deleted_run_may_ask_again(client, archive, ended):
    client.delete(f"{PLACE}/{ended.id}")
    assert_problem(submit(client, archive, "k"), 404, "send it first")
    assert_problem(client.post(f"{PLACE}/{ended.id}/retry"), 404)
