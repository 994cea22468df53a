"""The event stream sends each trial once, replays missed events, and ends with the run."""

import asyncio
import json
import threading
import time
from collections.abc import Callable

import pytest

from server.app import create_app
from server.http import token_cache
from server.settings import ServerSettings
from tests.store.samples import a_plan, a_run, a_trial, after
from tests.unit.server.conftest import assert_problem, made, secret
from tests.unit.server.wire import Wire
from tuner.store.queries import runs, tokens, trials
from tuner.store.queries.tokens import Scope, Token

PATIENCE_S = 60.0  # for what takes milliseconds, on a machine that is busy


@pytest.fixture
def claimed(database):
    with database.begin() as connection:
        run = runs.add(connection, a_run())
        return runs.claim_one(connection, run.id, "worker")


def add(database, claimed, *numbers: int) -> None:
    with database.begin() as connection:
        for number in numbers:
            trials.add(connection, claimed, a_trial(claimed, number))


def finish(database, claimed) -> None:
    with database.begin() as connection:
        runs.finish(connection, claimed, plan=a_plan())


def told(text: str) -> list[tuple[str, int, dict]]:
    """(event, id, data) of each event, after the grammar of the HTML standard."""
    found = []
    for block in text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
        if fields:
            found.append((fields["event"], int(fields["id"]), json.loads(fields["data"])))
    return found


def watch(client, run, **headers: str):
    return client.get(f"/api/v1/runs/{run.id}/events", headers=headers)


def test_the_events_of_a_run_that_has_ended(client, database, claimed):
    add(database, claimed, 0, 1, 2)
    finish(database, claimed)
    response = watch(client, claimed)
    assert response.headers["content-type"].startswith("text/event-stream")
    events = told(response.text)
    assert [(name, number) for name, number, _ in events] == [("trial", 1), ("trial", 2), ("trial", 3), ("run", 3)]
    assert [data["number"] for _, _, data in events[:3]] == [0, 1, 2]
    assert events[3][2] == client.get(f"/api/v1/runs/{claimed.id}").json()
    assert events[3][2]["status"] == "finished"


@pytest.mark.parametrize("seen", [0, 1, 60, 119, 120, 500])
def test_what_was_seen_is_not_told_again(client, database, claimed, seen):
    add(database, claimed, *range(120))
    finish(database, claimed)
    events = told(watch(client, claimed, **{"Last-Event-ID": str(seen)}).text)
    assert [data["number"] for name, _, data in events if name == "trial"] == list(range(seen, 120))
    assert [name for name, _, _ in events].count("run") == 1


@pytest.mark.parametrize("seen", ["-1", "x", "1.5", "9" * 30])
def test_an_id_that_is_not_ours_is_refused(client, claimed, seen):
    assert_problem(watch(client, claimed, **{"Last-Event-ID": seen}), 422, "last-event-id")


async def until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < end, "it did not come"
        await asyncio.sleep(0.01)


def watching(app, database, run) -> Wire:
    token = ("authorization", f"Bearer {secret(database)}")
    return Wire(app, token, method="GET", path=f"/api/v1/runs/{run.id}/events")


def test_a_watcher_learns_of_what_happens_and_of_the_end(app, database, claimed):
    wire = watching(app, database, claimed)

    async def work():
        await until(lambda: "event: run" in wire.text())
        for number in range(3):
            add(database, claimed, number)
            await until(lambda told=number + 1: f"id: {told}\n" in wire.text())
        with database.begin() as connection:
            runs.heartbeat(connection, claimed)
        await until(lambda: ": ping" in wire.text())
        finish(database, claimed)
        await asyncio.sleep(PATIENCE_S)

    events = told(wire.answer(work)[2])
    assert [data["number"] for name, _, data in events if name == "trial"] == [0, 1, 2]
    assert [data["status"] for name, _, data in events if name == "run"] == ["running", "finished"]


def test_a_cancelled_run_ends_its_streams(app, database, claimed):
    wire = watching(app, database, claimed)

    async def cancel():
        await until(lambda: "event: run" in wire.text())
        with database.begin() as connection:
            runs.cancel(connection, claimed.id)
        await asyncio.sleep(PATIENCE_S)

    events = told(wire.answer(cancel)[2])
    assert [data["status"] for name, _, data in events if name == "run"] == ["running", "cancelled"]


@pytest.mark.parametrize("ending", ["revoked", "expired"])
def test_a_stream_ends_with_its_token(app, database, claimed, ending, monkeypatch):
    """The stream ends within a second, without later events."""
    monkeypatch.setattr(tokens, "utcnow", lambda: after(59))
    monkeypatch.setattr(token_cache, "utcnow", lambda: after(59))
    token, given = made(database, Scope.READ, expires_at=after(60), now=after(0))
    wire = Wire(app, ("authorization", f"Bearer {given}"), method="GET", path=f"/api/v1/runs/{claimed.id}/events")
    door = app.state.context.token_cache
    token_of = door.token_of

    async def overtaken(given: str) -> Token | None:
        found = await token_of(given)
        if found is None:
            add(database, claimed, 0)  # at the very moment
        return found

    async def stay():
        await until(lambda: "event: run" in wire.text())
        if ending == "revoked":
            with database.begin() as connection:
                tokens.revoke(connection, token.id)
        else:
            monkeypatch.setattr(token_cache, "utcnow", lambda: after(60))
        await asyncio.sleep(PATIENCE_S)

    monkeypatch.setattr(door, "token_of", overtaken)
    begin = time.monotonic()
    assert [name for name, _, _ in told(wire.answer(stay)[2])] == ["run"]
    assert time.monotonic() - begin < PATIENCE_S / 2
    assert len(trials_of(database, claimed)) == 1


def trials_of(database, run):
    with database.read() as connection:
        return trials.list_of(connection, run.id)


def test_streams_end_when_the_server_stops(database, claimed):
    stopping = threading.Event()
    app = create_app(database, ServerSettings(events_poll_s=0.01), is_stopping=stopping.is_set)
    wire = watching(app, database, claimed)

    async def stay():
        await until(lambda: "event: run" in wire.text())
        stopping.set()
        await asyncio.sleep(PATIENCE_S)

    begin = time.monotonic()
    assert [name for name, _, _ in told(wire.answer(stay)[2])] == ["run"]
    assert time.monotonic() - begin < PATIENCE_S / 2


def test_silent_streams_hold_no_connection(database, claimed):
    """More streams than the pool has connections, and one more request."""
    app = create_app(database, ServerSettings(events_poll_s=2))
    token = ("authorization", f"Bearer {secret(database)}")

    async def stay():
        await asyncio.sleep(2 * PATIENCE_S)

    async def ask(wire: Wire) -> Wire:
        await app(wire.scope, stay, wire.note)
        return wire

    async def many() -> None:
        wires = [watching(app, database, claimed) for _ in range(40)]
        streams = [asyncio.create_task(ask(wire)) for wire in wires]
        await until(lambda: all("event: run" in wire.text() for wire in wires))
        await until(lambda: database.engine.pool.checkedout() == 0)
        plain = Wire(app, token, method="GET", path=f"/api/v1/runs/{claimed.id}")
        await asyncio.wait_for(ask(plain), PATIENCE_S)
        assert plain.sent[0]["status"] == 200
        finish(database, claimed)
        done = await asyncio.wait_for(asyncio.gather(*streams), PATIENCE_S)
        assert all(told(wire.text())[-1][2]["status"] == "finished" for wire in done)

    asyncio.run(many())
