"""Submitting a step says clearly why it cannot, and what it starts can be waited for."""

import json
import threading

import pytest
import torch
import torch.nn.functional as F

import kitsune
from kitsune.client import remote_run
from kitsune.errors import ExportError, RefusedError, SettingsError, TuneError, UnfitError, UnreachableError
from kitsune.submission.exporting.export import fingerprint_of, model_fingerprint_of
from kitsune.submission.format.archive import Archive
from kitsune.workload import Workload
from tests.scripted_server import ScriptedServer, absent, answers, of_json, raw
from tests.unit.kitsune.client.plan_servers import parts, plan_for

pytestmark = pytest.mark.usefixtures("fresh_warnings", "patience", "exported_once")

RUN = {"id": "06g0t3n8q4v0", "status": "queued", "plan_id": None, "error": None}
RUN_PATH = f"/api/v1/runs/{RUN['id']}"


class Service:
    """A server that takes archives and starts a run; `run` is what it then says of it."""

    def __init__(self, **changes: object) -> None:
        self.run = {**RUN, **changes}
        self.server = ScriptedServer(self.play)
        self.failures: list[bytes] = []

    def play(self, request, connection, _):
        if request.method == "PUT":
            reply = of_json({"sha256": "ab" * 32}, 201)
        elif request.path == "/api/v1/runs" and self.failures:
            reply = self.failures.pop(0)
        elif request.path in ("/api/v1/runs", RUN_PATH, f"{RUN_PATH}/cancel"):
            reply = of_json(self.run)
        elif request.path == f"/api/v1/plans/{self.run.get('plan_id')}":
            reply = of_json(plan_for().to_json())
        else:
            reply = raw(200, b"ok\n")
        connection.sendall(reply)

    def requests(self, path: str):
        return [request for request in self.server.seen if request.path.startswith(path)]


def submit(url: str, **options: object) -> remote_run.RemoteRun:
    model, optimizer, batch = parts()
    return kitsune.submit(model, F.cross_entropy, optimizer, batch, server=url, **options)


def test_what_is_sent_is_an_archive_of_the_step_without_its_weights():
    service = Service()
    with service.server.running():
        run = submit(service.server.url, budget="5m", trials=7, memory_limit="4GiB", token="ksn_x")
        assert run.id == RUN["id"]
    (put,) = service.requests("/api/v1/archives")
    archive = Archive.from_bytes(put.body)
    model, optimizer, batch = parts()
    assert archive.fingerprint == fingerprint_of(Workload(model, F.cross_entropy, optimizer, batch))
    assert archive.model_fingerprint == model_fingerprint_of(model, optimizer, batch[0])
    assert archive.buffers == ()
    assert model.first.weight.detach().numpy().tobytes()[:64] not in put.body
    (post,) = service.requests("/api/v1/runs")
    assert json.loads(post.body) == {
        "archive": "ab" * 32, "budget_s": 300.0, "trials": 7, "memory_limit_bytes": 2**32,
        "device": "", "seed": 0, "name": "",
    }  # fmt: skip
    assert post.headers["authorization"] == "Bearer ksn_x"


def test_an_answer_that_is_lost_is_asked_for_again_with_the_same_key():
    service = Service()
    service.failures = [b"", raw(502, b"<html>")]
    with service.server.running():
        assert submit(service.server.url).id == RUN["id"]
    keys = [request.headers["idempotency-key"] for request in service.requests("/api/v1/runs")]
    assert len(keys) == 3
    assert len(set(keys)) == 1


def test_two_submits_have_two_keys():
    service = Service()
    with service.server.running():
        submit(service.server.url)
        submit(service.server.url)
    assert len({request.headers["idempotency-key"] for request in service.requests("/api/v1/runs")}) == 2


def test_waiting_for_the_plan(monkeypatch):
    monkeypatch.setattr(remote_run, "SHORTEST_PAUSE_S", 0.05)
    service = Service()
    with service.server.running():
        run = submit(service.server.url)
        assert run.status() == "queued"
        assert run.wait(timeout=0.2) == "queued"
        with pytest.raises(TuneError, match="it is queued; wait"):
            run.plan()
        threading.Timer(0.3, lambda: service.run.update(status="finished", plan_id=plan_for().plan_id)).start()
        assert run.wait(timeout=60) == "finished"
        assert run.plan() == plan_for()


def test_waiting_outlasts_a_server_that_starts_anew(monkeypatch):
    monkeypatch.setattr(remote_run, "SHORTEST_PAUSE_S", 0.05)
    service = Service()
    with service.server.running():
        run = submit(service.server.url)
        port = int(service.server.url.rpartition(":")[2])
    service.run["status"] = "finished"
    second = ScriptedServer(service.play)
    context = second.running(port)
    starting = threading.Timer(0.4, context.__enter__)
    starting.start()
    assert run.wait(timeout=60) == "finished"
    starting.join()
    context.__exit__(None, None, None)


def test_waiting_for_a_server_that_stays_away(monkeypatch):
    monkeypatch.setattr(remote_run, "SHORTEST_PAUSE_S", 0.05)
    monkeypatch.setattr(remote_run, "PATIENCE_S", 0.3)
    service = Service()
    with service.server.running():
        run = submit(service.server.url)
    with pytest.raises(UnreachableError):
        run.wait()


def test_a_run_that_failed_says_why():
    service = Service(status="failed", error="every trial failed")
    with service.server.running():
        run = submit(service.server.url)
        assert run.wait() == "failed"
        with pytest.raises(TuneError, match="it is failed: every trial failed"):
            run.plan()


def test_cancelling():
    service = Service(status="cancelled")
    with service.server.running():
        assert submit(service.server.url).cancel() == "cancelled"
    assert service.requests(f"{RUN_PATH}/cancel")[0].method == "POST"


def test_a_run_in_a_way_that_we_do_not_know():
    service = Service(status="asleep")
    with service.server.running(), pytest.raises(UnreachableError, match="has an unknown status"):
        submit(service.server.url).status()


@pytest.mark.parametrize("answer", [{}, {"id": 7}, {"id": "../../plans"}, {"id": ""}])
def test_a_run_without_an_id(answer):
    service = Service()
    service.run = answer
    with service.server.running(), pytest.raises(UnreachableError, match="no id"):
        submit(service.server.url)


def test_submitting_without_a_server_says_so_before_exporting(monkeypatch):
    monkeypatch.setattr("kitsune.client.remote_tuning.to_archive", lambda *_: pytest.fail("seconds for nothing"))
    url = absent()
    with pytest.raises(UnreachableError, match=url):
        submit(url)


def test_submitting_without_permission():
    with ScriptedServer(answers({})).running() as server, pytest.raises(RefusedError, match="no such thing"):
        submit(server.url)


@pytest.mark.parametrize(
    "options", [{"trials": 0}, {"trials": "5"}, {"budget": "soon"}, {"budget": -1}, {"memory_limit": "much"}]
)
def test_options_without_sense_reach_no_server(options):
    with ScriptedServer(answers({})).running() as server:
        with pytest.raises(SettingsError):
            submit(server.url, **options)
        assert server.seen == []


def test_a_model_that_cannot_travel():
    model, _, batch = parts()
    optimizer = torch.optim.SparseAdam(model.parameters())
    service = Service()
    with service.server.running(), pytest.raises(ExportError, match="cannot be exported"):
        kitsune.submit(model, F.cross_entropy, optimizer, batch, server=service.server.url)
    assert service.requests("/api") == []


def test_submitting_while_switched_off(monkeypatch):
    monkeypatch.setenv("KITSUNE_DISABLE", "1")
    with pytest.raises(UnfitError, match="KITSUNE_DISABLE"):
        submit("http://127.0.0.1:1")
