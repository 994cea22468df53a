"""The request log: a record for each request, without secrets."""

import json
import logging

import pytest
from fastapi.testclient import TestClient

from kitsune.base.json_logging import JsonLines
from server.app import create_app
from server.http.request_log import RequestLog
from server.settings import ServerSettings
from tests.store.samples import a_run
from tests.unit.server.conftest import HERE, bearer, secret
from tuner.store.queries import runs, shares


class Lines(logging.Handler):
    """Formats at once, as a server does, while the context of the record exists."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.setFormatter(JsonLines())

    def emit(self, record):
        self.lines.append(self.format(record))


@pytest.fixture
def lines():
    handler, log = Lines(), logging.getLogger("kitsune.server")
    before = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    yield handler.lines
    log.removeHandler(handler)
    log.setLevel(before)


@pytest.fixture
def client(database):
    app = RequestLog(create_app(database, ServerSettings()))
    headers = bearer(secret(database))
    with TestClient(app, base_url=HERE, headers=headers, raise_server_exceptions=False) as made:
        yield made


def test_a_request_is_told_with_what_came_of_it(client, lines, database):
    with database.begin() as connection:
        run = runs.add(connection, a_run())
    answer = client.get(f"/api/v1/runs/{run.id}?trials=1")
    told = json.loads(lines[-1])
    assert told["duration_ms"] > 0
    assert told.pop("utc").endswith("+00:00")
    assert told == {
        "level": "info",
        "logger": "kitsune.server.requests",
        "message": f"GET /api/v1/runs/{run.id} 422",
        "request_id": answer.headers["x-request-id"],
        "method": "GET",
        "path": f"/api/v1/runs/{run.id}",
        "run_id": run.id,
        "status": 422,
        "duration_ms": told["duration_ms"],
    }


def test_what_the_guard_refuses_is_told_too(client, lines):
    client.get("/", headers={"Host": "evil.example"})
    assert json.loads(lines[-1])["status"] == 421


def test_an_error_inside_has_the_name_of_its_request(client, lines, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("out of order")

    monkeypatch.setattr(runs, "page", fail)
    answer = client.get("/api/v1/runs")
    error, request = map(json.loads, lines[-2:])
    assert answer.headers["x-request-id"] == request["request_id"]
    assert (error["level"], request["status"]) == ("error", 500)
    assert answer.json()["instance"] in error["message"] and "out of order" in error["message"]
    assert error["request_id"] == request["request_id"]
    assert error["path"] == "/api/v1/runs"


def test_no_secret_is_told(client, lines, database):
    with database.begin() as connection:
        run = runs.add(connection, a_run())
        _, link = shares.create(connection, run.id, team="default")
    token = client.headers["authorization"].partition(" ")[2]
    assert client.get(f"/shared/{link}").status_code == 200
    client.get(f"/shared/{link}/live")
    client.get(f"/shared/{link})")
    client.get(f"/{token}")
    client.get(f"/api/v1/runs/{token}?token={token}")
    form = {"token": token, "next": f"/{token}"}
    client.post("/login", data=form, headers={"Cookie": f"kitsune_session={token}"}, follow_redirects=False)
    client.post("/api/v1/runs", json={"archive": token})
    assert len(lines) == 7
    for line in lines:
        assert link not in line and token not in line and token[4:] not in line
    assert json.loads(lines[0])["path"] == "/shared/***"


def test_a_path_cannot_break_a_line(client, lines):
    client.get("/api/v1/%0A%7B%22level%22:%22error%22%7D")
    assert len(lines) == 1 and "\n" not in lines[0]
    assert json.loads(lines[0])["level"] == "info"
