"""PUT of an archive: valid ones are stored once and re-serialized; others are a 4xx, and nothing is stored."""

import hashlib
import threading

import pytest
from anyio import CapacityLimiter
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import func, select

from kitsune.submission.format.archive import Archive
from server.api import archives as archives_route
from tests.unit.kitsune.submission import hostile
from tests.unit.kitsune.submission.hostile_archives import CANARY, HOSTILE
from tests.unit.server.conftest import assert_problem
from tuner.store import tables
from tuner.store.queries import archives

GOOD = hostile.valid().to_bytes()


def put(client, content: bytes, name: str | None = None, **changes):
    name = name or hashlib.sha256(content).hexdigest()
    return client.put(f"/api/v1/archives/{name}", content=content, **changes)


def kept(database) -> int:
    with database.read() as connection:
        return connection.execute(select(func.count()).select_from(tables.archives)).scalar_one()


def test_an_archive_is_kept_once_under_the_name_of_its_bytes(client, database):
    first, again = put(client, GOOD), put(client, GOOD)
    assert (first.status_code, again.status_code) == (201, 200)
    assert {**first.json(), "created_at": ""} == {**again.json(), "created_at": ""}
    name = first.json()["sha256"]
    archive = Archive.from_bytes(GOOD)
    assert first.json()["sent_sha256"] == hashlib.sha256(GOOD).hexdigest()
    assert first.json()["fingerprint"] == archive.fingerprint
    assert first.json()["model_fingerprint"] == archive.model_fingerprint
    with database.read() as connection:
        content = archives.content(connection, name)
    assert hashlib.sha256(content).hexdigest() == name
    assert first.json()["size_bytes"] == len(content)
    assert kept(database) == 1


def test_what_is_kept_was_written_by_the_server_itself(client, database):
    """The client's own bytes (here with other white space) never reach a worker."""
    spaced = hostile.edited(lambda document: None)
    assert spaced != GOOD
    response = put(client, spaced)
    assert response.status_code == 201
    assert response.json()["sha256"] != response.json()["sent_sha256"]
    with database.read() as connection:
        content = archives.content(connection, response.json()["sha256"])
    assert content == Archive.from_bytes(spaced).to_bytes()
    assert put(client, content).status_code == 200


@pytest.mark.parametrize("name", sorted(HOSTILE))
def test_a_hostile_archive_is_refused_with_the_reason(client, database, name):
    content, reason = HOSTILE[name]
    response = put(client, content)
    problem = assert_problem(response, 413 if name == "too large" else 422)
    assert name == "too large" or reason in problem["detail"]
    assert kept(database) == 0
    assert not CANARY.exists()


@pytest.mark.parametrize("content", [b"", b"x", GOOD[:-1], GOOD + b"\n"])
def test_bytes_that_are_not_those_of_the_name_are_refused(client, database, content):
    problem = assert_problem(put(client, content, hashlib.sha256(GOOD).hexdigest()), 422, "SHA-256")
    assert hashlib.sha256(content).hexdigest() in problem["detail"]
    assert kept(database) == 0


@pytest.mark.parametrize(
    "name", ["0", "Z" * 64, "A" * 64, "0" * 65, "..%2f..%2fetc%2fpasswd", "%00" * 64, "0" * 64 + "%0a"]
)
def test_a_name_that_is_no_sha256_is_refused(client, database, name):
    response = put(client, GOOD, name)
    assert response.status_code in (404, 422)
    assert_problem(response, response.status_code)
    assert kept(database) == 0


def test_the_type_of_content_does_not_matter(client):
    assert put(client, GOOD, headers={"Content-Type": "application/json"}).status_code == 201


def test_many_clients_send_the_same_archive_at_once(client, database):
    codes: list[int] = []
    threads = [threading.Thread(target=lambda: codes.append(put(client, GOOD).status_code)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(codes) == [200] * 7 + [201]
    assert kept(database) == 1


def test_no_more_archives_arrive_at_once_than_there_are_places(client, monkeypatch):
    places = CapacityLimiter(1)
    monkeypatch.setattr(archives_route, "ARRIVALS", places)
    assert put(client, GOOD).status_code == 201
    places.acquire_on_behalf_of_nowait(somebody := object())
    response = put(client, GOOD)
    assert_problem(response, 503, "1 archives arrive already")
    assert response.headers["retry-after"] == "1"
    places.release_on_behalf_of(somebody)
    assert put(client, GOOD).status_code == 200


@st.composite
def mutated(draw) -> bytes:
    content = bytearray(GOOD)
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(content)))
        end = start + draw(st.integers(0, 8))
        content[start:end] = draw(st.binary(max_size=8))
    return bytes(content)


@given(st.binary(max_size=300) | mutated())
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_no_bytes_break_the_server(client, database, content):
    """Random bytes, and valid archives with some bytes replaced, inserted or removed."""
    response = put(client, content)
    if response.status_code in (200, 201):
        assert Archive.from_bytes(content)
        return
    before = kept(database)
    assert_problem(put(client, content), 422)
    assert kept(database) == before
