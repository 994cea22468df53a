"""A run on a server that is there, but for a while cannot answer: its database is away, or it has too much to do."""

import time

import pytest

from kitsune.client import remote_run
from kitsune.client.http_client import Client
from kitsune.client.remote_run import RemoteRun, check_budget, send
from kitsune.client.server_address import Server
from kitsune.errors import RefusedError, SettingsError, UnreachableError
from tests.scripted_server import ScriptedServer, of_json, problem
from tests.unit.kitsune.submission.hostile import valid

AWAY = problem(503, "the database cannot be used now")


class Service:
    """A server that answers with each of `troubles` once, to questions about runs, before it does as it should."""

    def __init__(self, *troubles: bytes, status: str = "finished") -> None:
        self.server = ScriptedServer(self.play)
        self.troubles = list(troubles)
        self.status = status

    def play(self, request, connection, _):
        if request.method == "PUT":
            reply = of_json({"sha256": "ab" * 32}, 201)
        elif self.troubles:
            reply = self.troubles.pop(0)
        else:
            reply = of_json({"id": "r1", "status": self.status})
        connection.sendall(reply)

    def run(self) -> RemoteRun:
        return RemoteRun(self.client(), "r1")

    def client(self) -> Client:
        return Client(Server(self.server.url))


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(remote_run, "SHORTEST_PAUSE_S", 0.02)


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503])
def test_waiting_outlasts_a_server_that_cannot_answer_now(status):
    service = Service(*[problem(status, "not now")] * 3)
    with service.server.running():
        assert service.run().wait(timeout=60) == "finished"
    assert len(service.server.seen) == 4


def test_waiting_ends_with_the_reason_when_the_server_stays_so(monkeypatch):
    monkeypatch.setattr(remote_run, "PATIENCE_S", 0.2)
    service = Service(*[AWAY] * 1000)
    with service.server.running(), pytest.raises(UnreachableError, match="the database cannot be used now"):
        service.run().wait()


def test_waiting_for_a_run_that_the_server_refuses_ends_at_once():
    service = Service(problem(404, "there is no run r1"))
    with service.server.running(), pytest.raises(RefusedError, match="there is no run"):
        service.run().wait()
    assert len(service.server.seen) == 1


@pytest.mark.parametrize("status", [429, 503])
def test_a_run_is_asked_for_again_with_the_same_key(status):
    service = Service(*[problem(status, "not now")] * 2)
    with service.server.running():
        assert send(service.client(), valid(), trials=1).id == "r1"
    keys = [request.headers["idempotency-key"] for request in service.server.seen if request.method == "POST"]
    assert len(keys) == 3
    assert len(set(keys)) == 1


def test_a_run_is_not_asked_for_for_ever():
    service = Service(*[AWAY] * 1000)
    began = time.monotonic()
    with service.server.running(), pytest.raises(UnreachableError, match="the database cannot be used now"):
        send(service.client(), valid(), trials=1)
    assert time.monotonic() - began < 60


@pytest.mark.parametrize("given", [{"trials": True}, {"trials": False}, {"budget": True}, {"budget": False}])
def test_yes_and_no_are_no_numbers(given):
    with pytest.raises(SettingsError, match=next(iter(given))):
        check_budget(**{"trials": None, "budget": None, **given})


@pytest.mark.parametrize("timeout", ["10", float("nan"), -1])
def test_what_is_no_number_of_seconds_is_refused(timeout):
    with pytest.raises(SettingsError, match="timeout is"):
        Service().run().wait(timeout)
