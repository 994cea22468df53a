"""Rate limits and quotas: 429 with the time to wait, and nothing is done."""

from types import SimpleNamespace

import pytest
from fastapi.testclient import TestClient

from server.app import create_app
from server.http import rate_limit
from server.http.rate_limit import Rate
from server.settings import ServerSettings
from tests.unit.kitsune.submission import hostile
from tests.unit.server.api.test_archives import GOOD, put
from tests.unit.server.api.test_runs import count, submit
from tests.unit.server.conftest import HERE, assert_problem, bearer, secret
from tests.unit.server.pages.conftest import HTML, csrf_of, signed_in
from tuner.store.queries import tokens
from tuner.store.queries.tokens import Scope

RUNS, LOOKUP = "/api/v1/runs", "/api/v1/plans?gpu=G&torch=2&fingerprint=" + "0" * 64


@pytest.fixture
def clock(monkeypatch):
    """The time in seconds, in a list of one."""
    now = [100.0]
    monkeypatch.setattr(rate_limit, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


@pytest.fixture
def serve(database):
    """Makes a server with these limits, and clients, each with its own token."""
    opened = []

    def make(**limits):
        app = create_app(database, ServerSettings(**limits))

        def client(*scopes, **options):
            headers = bearer(secret(database, *scopes, **options))
            opened.append(TestClient(app, base_url=HERE, headers=headers).__enter__())
            return opened[-1]

        return client

    yield make
    for client in opened:
        client.__exit__(None, None, None)


def test_what_was_saved_up_may_come_at_once_and_comes_back(clock):
    rate = Rate(60)
    assert [rate.wait_s("a") for _ in range(60)] == [0.0] * 60
    assert rate.wait_s("a") == pytest.approx(1.0)
    assert rate.wait_s("b") == 0.0
    clock[0] += 0.5
    assert rate.wait_s("a") == pytest.approx(0.5), "who asks too early waits no longer for it"
    clock[0] += 0.5
    assert rate.wait_s("a") == 0.0
    assert rate.wait_s("a") > 0
    clock[0] += 3600
    assert [rate.wait_s("a") for _ in range(61)].count(0.0) == 60, "no more than a minute is saved up"


def test_any_number_of_names_takes_a_bounded_memory(clock, monkeypatch):
    monkeypatch.setattr(rate_limit, "MOST_NAMES", 3)
    rate = Rate(1)
    for name in "abca":
        rate.wait_s(name)
    rate.wait_s("d")
    assert len(rate) == 3
    assert rate.wait_s("a") > 0, "who asked a moment ago is remembered"


def test_without_a_limit_nothing_is_remembered():
    rate = Rate(0)
    assert [rate.wait_s("a") for _ in range(1000)] == [0.0] * 1000
    assert len(rate) == 0


def test_a_token_that_asks_too_often_waits(serve, clock):
    make = serve(requests_per_minute=2)
    client, other = make(), make()
    assert [client.get(RUNS).status_code for _ in range(2)] == [200, 200]
    response = client.get(RUNS)
    problem = assert_problem(response, 429, "2 times a minute", "wait for 30 s")
    assert (problem["type"], response.headers["retry-after"]) == ("/problems/too-many-requests", "30")
    assert_problem(client.post(RUNS, json={}), 429)
    assert other.get(RUNS).status_code == 200
    assert client.get("/healthz").status_code == 200
    clock[0] += 30
    assert client.get(RUNS).status_code == 200


def test_look_ups_have_no_limit_unless_one_is_set(serve, clock):
    client = serve(requests_per_minute=1)()
    assert {client.get(LOOKUP).status_code for _ in range(50)} == {200}
    assert client.get(RUNS).status_code == 200
    limited = serve(requests_per_minute=1, lookups_per_minute=3)()
    assert [limited.get(LOOKUP).status_code for _ in range(4)] == [200, 200, 200, 429]
    assert limited.get(RUNS).status_code == 200


def test_a_token_that_opens_nothing_has_no_rate(serve, clock):
    client = serve(requests_per_minute=1)()
    for _ in range(3):
        assert_problem(client.get(RUNS, headers=bearer(tokens.new_secret())), 401)


def test_pages_say_so_to_whoever_looks(database, clock):
    app = create_app(database, ServerSettings(requests_per_minute=2))
    with database.begin() as connection:
        token, _ = tokens.create(connection, "ada", tuple(Scope))
    with TestClient(app, base_url=HERE, headers=HTML) as browser:
        browser.cookies.set("kitsune_session", signed_in(database, token)[1])
        assert [browser.get("/runs").status_code for _ in range(2)] == [200, 200]
        answer = browser.get("/runs")
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "30")
        assert "Too many requests" in answer.text and "wait for 30 s" in answer.text
        assert 'href="/problems/too-many-requests"' in answer.text
        assert browser.get("/problems/too-many-requests").status_code == 200
        clock[0] += 60
        assert csrf_of(browser)


def test_a_team_has_no_more_unfinished_runs_than_it_may(serve, database, archive):
    make = serve(active_runs=2)
    client, mate, other = make(), make(), make(team="red")
    first = submit(client, archive, "a")
    submit(client, archive, "b")
    for one, key in ((client, "c"), (mate, "d")):
        response = submit(one, archive, key)
        problem = assert_problem(response, 429, "2 runs that have not ended")
        assert (problem["type"], response.headers["retry-after"]) == ("/problems/quota-exceeded", "60")
    assert submit(client, archive, "a").status_code == 200
    assert put(other, GOOD).status_code == 201
    assert submit(other, archive, "a").status_code == 201
    client.post(first.json()["links"]["cancel"])
    assert submit(client, archive, "c").status_code == 201
    assert_problem(client.post(first.json()["links"]["retry"]), 429)
    assert count(database) == 4


def test_a_token_has_no_more_unfinished_runs_than_it_may(serve, database, archive):
    make = serve(token_active_runs=1, active_runs=3)
    client, mate = make(), make()
    first = submit(client, archive, "a")
    assert_problem(submit(client, archive, "b"), 429, "this token has 1 runs that have not ended")
    assert submit(client, archive, "a").status_code == 200
    assert submit(mate, archive, "a").status_code == 201
    client.post(first.json()["links"]["cancel"])
    assert_problem(mate.post(first.json()["links"]["retry"]), 429)
    assert client.post(first.json()["links"]["retry"]).status_code == 201
    assert count(database) == 3


def test_a_team_has_no_more_archives_than_it_may(serve):
    make = serve(team_archive_bytes=len(GOOD))
    client = make()
    assert [put(client, GOOD).status_code for _ in range(2)] == [201, 200]
    other = hostile.put("sizes", "s0", 9)
    assert_problem(put(client, other), 429, "archives of the team default may have")
    assert put(make(team="red"), other).status_code == 201
