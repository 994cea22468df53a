"""The cache of look-ups: hits need no thread and no database, are a second old at most, and stay within a team."""

import asyncio
from types import SimpleNamespace

import anyio.to_thread
import pytest
from fastapi.exceptions import RequestValidationError

from server.http import lookups, ttl_cache
from server.http.lookups import Lookups
from tests.store.samples import a_plan, after
from tests.unit.kitsune.submission import hostile
from tests.unit.server.conftest import assert_problem, bearer, expired, made, revoked, secret
from tuner.store.queries import archives, plans, tokens
from tuner.store.queries.tokens import Scope, new_secret

ASKED = {"fingerprint": "f" * 64, "gpu": "NVIDIA H200", "torch": "2.13.0"}
QUERY = b"fingerprint=" + b"f" * 64 + b"&gpu=NVIDIA+H200&torch=2.13.0"
PLACE = "/api/v1/plans"


@pytest.fixture
def clock(monkeypatch):
    seen = SimpleNamespace(now=100.0)
    monkeypatch.setattr(ttl_cache, "time", SimpleNamespace(monotonic=lambda: seen.now))
    return seen


def keep(database, speedup: float = 1.5, **changes) -> None:
    with database.begin() as connection:
        plans.put(connection, a_plan(speedup, **{"fingerprint": "f" * 64, **changes}), now=after(0))


def refuse_threads(monkeypatch) -> None:
    async def refuse(*_args, **_options):
        raise AssertionError("a thread was asked")

    monkeypatch.setattr(anyio.to_thread, "run_sync", refuse)
    monkeypatch.setattr(ttl_cache, "to_thread", SimpleNamespace(run_sync=refuse))


@pytest.mark.parametrize("changes", [{}, {"gpu": "NVIDIA A100"}, {"torch": "2.14.0"}], ids=str)
def test_a_question_asked_again_needs_neither_thread_nor_database(client, database, monkeypatch, clock, changes):
    keep(database)
    first = client.get(PLACE, params={**ASKED, **changes})
    refuse_threads(monkeypatch)
    monkeypatch.setattr(database, "read", None)
    monkeypatch.setattr(lookups, "question_of", None)
    again = client.get(PLACE, params={**ASKED, **changes})
    assert (again.status_code, again.content, again.headers) == (200, first.content, first.headers)
    unchanged = client.get(PLACE, params={**ASKED, **changes}, headers={"If-None-Match": first.headers["etag"]})
    assert (unchanged.status_code, unchanged.content) == (304, b"")


def test_what_is_remembered_is_for_those_with_a_token_that_may_read(client, stranger, database, clock):
    keep(database)
    answered = client.get(PLACE, params=ASKED)
    tag = {"If-None-Match": answered.headers["etag"]}
    for given in (new_secret(), expired(database), revoked(database), secret(database).swapcase()):
        assert_problem(stranger.get(PLACE, params=ASKED, headers=bearer(given)), 401)
        assert_problem(stranger.get(PLACE, params=ASKED, headers={**bearer(given), **tag}), 401)
    assert_problem(stranger.get(PLACE, params=ASKED, headers=tag), 401)
    assert_problem(stranger.get(PLACE, params=ASKED, headers=bearer(secret(database, Scope.SUBMIT))), 403)
    assert stranger.get(PLACE, params=ASKED, headers=bearer(secret(database, Scope.READ))).status_code == 200


def test_a_revoked_token_gets_what_is_remembered_for_a_second_at_most(stranger, database, clock):
    keep(database)
    token, given = made(database, Scope.READ)
    assert stranger.get(PLACE, params=ASKED, headers=bearer(given)).status_code == 200
    with database.begin() as connection:
        tokens.revoke(connection, token.id)
    clock.now += 1
    assert_problem(stranger.get(PLACE, params=ASKED, headers=bearer(given)), 401)


def match(client) -> str:
    found = client.get(PLACE, params=ASKED).json()["match"]
    assert isinstance(found, str)
    return found


def test_a_new_plan_is_seen_after_a_second(client, database, clock):
    assert match(client) == "none"
    keep(database)
    clock.now += lookups.EXTENT_TTL_S
    assert match(client) == "exact"


def test_a_plan_is_seen_after_a_second_when_an_archive_names_its_model(client, database, clock):
    archive = hostile.valid()
    keep(database, fingerprint=archive.fingerprint)
    asked = {**ASKED, "fingerprint": archive.model_fingerprint}
    assert client.get(PLACE, params=asked).json()["match"] == "none"
    with database.begin() as connection:
        archives.put(connection, archive.to_bytes(), archive)
    clock.now += lookups.EXTENT_TTL_S
    assert client.get(PLACE, params=asked).json()["match"] == "exact"


def test_a_plan_of_another_batch_is_compatible_and_says_so(client, database, clock):
    keep(database, batch="2048x64")
    assert client.get(PLACE, params={**ASKED, "batch": "2048x64"}).json()["match"] == "exact"
    assert client.get(PLACE, params=ASKED).json()["match"] == "exact"
    other = client.get(PLACE, params={**ASKED, "batch": "4x64"}).json()
    assert (other["match"], other["reason"]) == ("compatible", "tuned with batch 2048x64, this is 4x64")
    keep(database, batch="4x64", knobs={})
    clock.now += lookups.EXTENT_TTL_S
    ours = client.get(PLACE, params={**ASKED, "batch": "4x64"}).json()
    assert (ours["match"], ours["plan"]["knobs"]) == ("exact", {})
    assert_problem(client.get(PLACE, params={**ASKED, "batch": "4x64'; --"}), 422)


def test_a_plan_for_another_workload_leaves_the_answer_as_it_was(client, database, clock):
    keep(database)
    first = client.get(PLACE, params=ASKED)
    keep(database, fingerprint="e" * 64)
    clock.now += lookups.EXTENT_TTL_S
    again = client.get(PLACE, params=ASKED)
    assert (again.content, again.headers["etag"]) == (first.content, first.headers["etag"])


def test_an_answer_found_while_a_plan_arrives_is_not_kept_for_older_than_it_is(database, clock, monkeypatch):
    """The plan is written after the look-up has read, before its answer is cached."""
    found = Lookups(database)
    find = found._find

    def overtaken(query, team):
        answer = find(query, team)
        keep(database)
        return answer

    async def ask():
        monkeypatch.setattr(found, "_find", overtaken)
        assert b'"match":"none"' in (await found.answer(QUERY, "default")).body
        monkeypatch.setattr(found, "_find", find)
        clock.now += lookups.EXTENT_TTL_S
        assert b'"match":"exact"' in (await found.answer(QUERY, "default")).body

    asyncio.run(ask())


def test_a_question_that_makes_no_sense_is_not_remembered(database, clock):
    found = Lookups(database)

    async def ask():
        for _ in range(2):
            with pytest.raises(RequestValidationError):
                await found.answer(QUERY + b"&color=red", "default")

    asyncio.run(ask())
    assert len(found._known) == 0


def test_a_database_that_fails_once_is_asked_again(client, database, clock, monkeypatch):
    keep(database)
    extent = plans.extent
    monkeypatch.setattr(plans, "extent", lambda _connection: 1 / 0)
    assert_problem(client.get(PLACE, params=ASKED), 500)
    monkeypatch.setattr(plans, "extent", extent)
    assert match(client) == "exact"


def test_any_number_of_questions_takes_a_bounded_memory(database, clock, monkeypatch):
    monkeypatch.setattr(lookups, "_MOST", 3)
    found = Lookups(database)

    async def ask():
        for number in range(10):
            await found.answer(QUERY + f"&driver={number}".encode(), "default")

    asyncio.run(ask())
    assert len(found._known) == 3
