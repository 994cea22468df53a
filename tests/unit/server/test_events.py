"""A stream of events tells each trial once, replays what was missed, and ends with the run."""

import asyncio
import json
import threading
import time
from datetime import UTC, datetime, timedelta

import pytest

from server import admission
from server.app import create_app
from server.settings import ServerSettings
from tests.store.samples import a_plan, a_run, a_trial
from tests.unit.server.conftest import assert_problem, made, secret
from tests.unit.server.wire import Wire
from tuner.store import runs, tokens, trials
from tuner.store.tokens import Scope


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


def test_a_watcher_learns_of_what_happens_and_of_the_end(client, database, claimed):
    def work() -> None:
        for number in range(3):
            time.sleep(0.05)
            add(database, claimed, number)
        with database.begin() as connection:
            runs.heartbeat(connection, claimed)
        time.sleep(0.05)
        finish(database, claimed)

    worker = threading.Thread(target=work)
    worker.start()
    text = watch(client, claimed).text
    worker.join()
    events = told(text)
    assert [data["number"] for name, _, data in events if name == "trial"] == [0, 1, 2]
    assert [data["status"] for name, _, data in events if name == "run"] == ["running", "finished"]
    assert ": ping" in text


def test_a_cancelled_run_ends_its_streams(client, database, claimed):
    timer = threading.Timer(0.1, lambda: client.post(f"/api/v1/runs/{claimed.id}/cancel"))
    timer.start()
    events = told(watch(client, claimed).text)
    timer.join()
    assert [data["status"] for name, _, data in events if name == "run"] == ["running", "cancelled"]


@pytest.mark.parametrize("ending", ["revoked", "expired"])
def test_a_stream_ends_with_its_token(database, claimed, ending):
    """A second later at the latest, and with nothing that happened after it."""
    app = create_app(database, ServerSettings(events_poll_s=0.05))
    until = datetime.now(UTC) + timedelta(seconds=0.5) if ending == "expired" else None
    token, given = made(database, Scope.READ, expires_at=until)
    wire = Wire(app, ("authorization", f"Bearer {given}"), method="GET", path=f"/api/v1/runs/{claimed.id}/events")

    async def stay():
        await asyncio.sleep(0.5)
        if ending == "revoked":
            with database.begin() as connection:
                tokens.revoke(connection, token.id)
        await asyncio.sleep(admission.REMEMBERED_S)
        add(database, claimed, 0)
        await asyncio.sleep(60)

    begin = time.monotonic()
    assert [name for name, _, _ in told(wire.answer(stay)[2])] == ["run"]
    assert time.monotonic() - begin < 30


def test_streams_end_when_the_server_stops(database, claimed):
    stopping = threading.Event()
    app = create_app(database, ServerSettings(events_poll_s=0.01), is_stopping=stopping.is_set)
    token = ("authorization", f"Bearer {secret(database)}")
    wire = Wire(app, token, method="GET", path=f"/api/v1/runs/{claimed.id}/events")

    async def stay():
        await asyncio.sleep(0.1)
        stopping.set()
        await asyncio.sleep(60)

    begin = time.monotonic()
    assert [name for name, _, _ in told(wire.answer(stay)[2])] == ["run"]
    assert time.monotonic() - begin < 30


def test_silent_streams_hold_no_connection(database, claimed):
    """More streams than the pool has connections, and a request beside them."""
    app = create_app(database, ServerSettings(events_poll_s=0.2))
    token = ("authorization", f"Bearer {secret(database)}")

    async def stay():
        await asyncio.sleep(60)

    async def one(path: str) -> Wire:
        wire = Wire(app, token, method="GET", path=path)
        await app(wire.scope, stay, wire.note)
        return wire

    async def many() -> None:
        streams = [asyncio.create_task(one(f"/api/v1/runs/{claimed.id}/events")) for _ in range(40)]
        await asyncio.sleep(0.5)
        assert database.engine.pool.checkedout() < 15
        plain = await asyncio.wait_for(one(f"/api/v1/runs/{claimed.id}"), 5)
        assert plain.sent[0]["status"] == 200
        finish(database, claimed)
        done = await asyncio.wait_for(asyncio.gather(*streams), 10)
        assert all(told(wire.text())[-1][2]["status"] == "finished" for wire in done)

    asyncio.run(many())
