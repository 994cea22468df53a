"""Logs for programs: whatever a real server and a real worker say on stderr is one JSON object a line."""

import json
import re
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.command import Command
from tests.e2e.test_server import send_archive
from tests.store.samples import a_run, after
from tuner.records import RunStatus
from tuner.store.engine import open_database
from tuner.store.queries import runs


def lines_of(command: Command) -> list[dict[str, Any]]:
    """Every line of stderr, as a program reads it; each has what all have."""
    found = [json.loads(line) for line in command.err.read_text("utf-8").splitlines()]
    assert found
    for told in found:
        assert {"utc", "level", "logger", "message"} <= set(told)
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", told["utc"])
    return found


@pytest.fixture
def start(tmp_path: Path):
    """Starts `kitsune` processes that share a home and its database."""
    started: list[Command] = []

    def command(*words: str, **variables: str) -> Command:
        folder = tmp_path / f"{words[0]}{len(started)}"
        started.append(Command(folder, *words, KITSUNE_HOME=str(tmp_path / "home"), **variables))
        return started[-1]

    yield command
    for running in started:
        running.close()


@pytest.mark.timeout(400)
def test_a_server_and_a_worker_say_only_json(start, tmp_path):
    old = add_old(tmp_path)
    server = start("serve", "--port", "0", "--log-format", "json", "--retention-days", "30")
    server.wait_for("http://")
    token = (tmp_path / "home" / "token").read_text().strip()
    url = re.search(r"http://[0-9.]+:\d+", lines_of(server)[0]["message"])
    assert url
    server.wait_for("1 deleted")
    with httpx.Client(base_url=url[0], headers={"Authorization": f"Bearer {token}"}, timeout=20) as client:
        run = client.post("/api/v1/runs", json={"archive": send_archive(client), "trials": 1, "device": "cpu"}).json()
        link = client.post(f"/api/v1/runs/{run['id']}/share").json()["path"].rpartition("/")[2]
        assert client.get(f"/shared/{link}").status_code == 200
        assert client.get(f"/api/v1/runs/{old}").status_code == 404
        worker = start("worker", "--device", "cpu", KITSUNE_LOG_FORMAT="json")
        worker.wait_for(run["id"], 150)
        cancelled = client.post(f"/api/v1/runs/{run['id']}/cancel").json()
        assert cancelled["status"] == "cancelled"
        worker.wait_for("is no longer ours", 150)
    for command in (worker, server):
        command.process.send_signal(signal.SIGTERM)
        assert command.wait()[0] == 0
    check_requests(lines_of(server), run["id"])
    check_worker(lines_of(worker), run["id"])
    for command in (server, worker):
        assert token not in command.err.read_text() and link not in command.err.read_text()
        assert command.out.read_text() == ""


def add_old(tmp_path: Path) -> str:
    with open_database(f"sqlite:///{tmp_path}/home/kitsune.db") as database, database.begin() as connection:
        moment = after(-400 * 86400)
        return runs.add(connection, a_run(status=RunStatus.FAILED, created_at=moment, finished_at=moment)).id


def check_requests(told: list[dict[str, Any]], run_id: str) -> None:
    requests = [line for line in told if line["logger"] == "kitsune.server.requests"]
    known = [(line["method"], line["path"], line["status"], line.get("run_id")) for line in requests]
    assert known[1:4] == [
        ("POST", "/api/v1/runs", 201, None),
        ("POST", f"/api/v1/runs/{run_id}/share", 201, run_id),
        ("GET", "/shared/***", 200, None),
    ]
    assert len({line["request_id"] for line in requests}) == len(requests)
    assert all(0 < line["duration_ms"] < 60_000 for line in requests)


def check_worker(told: list[dict[str, Any]], run_id: str) -> None:
    first, *rest = told
    assert "it serves sqlite:///" in first["message"]
    assert "run_id" not in first
    about = [line for line in rest if run_id in line["message"]]
    assert len(about) >= 2
    assert {line["run_id"] for line in about} == {run_id}


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("serve", "--log-format", "json", "--database", "mysql://host/name"), 11),
        (("worker", "--log-format", "json", "--lease", "soon"), 2),
    ],
    ids=str,
)
def test_what_ends_a_command_is_a_line_too(start, words, code):
    command = start(*words)
    assert command.wait()[0] == code
    (told,) = lines_of(command)
    assert told["level"] == "error"
    assert re.match(r"(Settings|Store)Error: ", told["message"])
