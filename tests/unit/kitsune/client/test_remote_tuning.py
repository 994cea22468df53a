"""Fetching a plan costs a training script nothing when it fails; submitting says clearly why it cannot."""

import json
import logging
import socket
import threading
import time
import urllib.parse

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import kitsune
from kitsune.client import plan_lookup, remote_run
from kitsune.client.plan_lookup import NO_STEP
from kitsune.device.backend import environment
from kitsune.errors import ExportError, RefusedError, SettingsError, TuneError, UnfitError, UnreachableError
from kitsune.plan import Plan
from kitsune.submission.exporting.export import fingerprint_of, model_fingerprint_of
from kitsune.submission.format.archive import Archive
from kitsune.workload import Workload
from tests.scripted_server import (
    Play,
    Request,
    ScriptedServer,
    absent,
    after_health,
    answers,
    deaf,
    drips,
    hangs,
    of_json,
    problem,
    raw,
)
from tests.step_cases import Mlp

#: What the network may cost a training script is 2 s; the rest is for a machine that is busy with other tests. A
#: server that hangs would hold it for 30 s.
LIMIT_S = 7.0
LIMITS_S = {name: getattr(plan_lookup, name) for name in ("CALL_S", "NETWORK_S")}
PLANS = "GET /api/v1/plans"
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
CPU = environment(torch.device("cpu"))
NO_PLAN = {"match": "none", "reason": "it was never tuned here", "plan": None}


@pytest.fixture(autouse=True)
def fresh_warnings(monkeypatch):
    monkeypatch.setattr(plan_lookup, "_warned", set())


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """A busy machine may take longer for an answer than a training script would wait."""
    for name in LIMITS_S:
        monkeypatch.setattr(plan_lookup, name, 20.0)


@pytest.fixture
def limited(patience, monkeypatch):
    """As long as a training script waits."""
    for name, limit_s in LIMITS_S.items():
        monkeypatch.setattr(plan_lookup, name, limit_s)


@pytest.fixture
def soon_limited(patience, monkeypatch):
    """A quarter of that: what is waited out is the same, only shorter."""
    for name, limit_s in LIMITS_S.items():
        monkeypatch.setattr(plan_lookup, name, limit_s / 4)


@pytest.fixture(scope="module", autouse=True)
def exported_once():
    """The first export of a process loads half of torch."""
    model, optimizer, (x, _) = parts()
    model_fingerprint_of(model, optimizer, x)


def parts():
    torch.manual_seed(0)
    model = Mlp()
    return model, torch.optim.SGD(model.parameters(), lr=0.1), (torch.randn(4, 8), torch.randint(0, 4, (4,)))


def plan_for(knobs: dict[str, str] | None = None, **changes: object) -> Plan:
    here = CPU.model_copy(update=changes)
    return Plan(knobs={"precision": "bf16"} if knobs is None else knobs, fingerprint="f" * 64, environment=here)


def found(plan: Plan | None) -> bytes:
    value = {"match": "exact", "reason": "same machine type and software", "plan": plan.to_json()} if plan else NO_PLAN
    return of_json(value)


def knows(plan: Plan) -> Play:
    """As a server that was asked for this plan before: it has one for whatever model is asked for."""

    def play(request: Request, connection: socket.socket, over: threading.Event) -> None:
        asked = dict(urllib.parse.parse_qsl(request.query)).get("fingerprint", "")
        of_the_model = plan.model_copy(update={"model_fingerprint": asked}) if asked != NO_STEP.fingerprint else None
        answers({PLANS: found(of_the_model)})(request, connection, over)

    return play


def serves(plan: Plan) -> ScriptedServer:
    return ScriptedServer(knows(plan))


def fetch(url: str | None) -> Plan | None:
    model, optimizer, batch = parts()
    return kitsune.fetch_plan(model, optimizer, batch, server=url)


def warnings_in(caplog) -> list[str]:
    of_ours = [record for record in caplog.records if record.name == "kitsune"]
    return [record.getMessage() for record in of_ours if record.levelno >= logging.WARNING]


# fetch_plan ---------------------------------------------------------------------------------------------------------


def test_a_plan_is_fetched_for_the_model_and_the_machine():
    model, optimizer, batch = parts()
    with serves(plan_for()).running() as server:
        plan = kitsune.fetch_plan(model, optimizer, batch, server=server.url, token="ksn_1")
    asked = model_fingerprint_of(model, optimizer, batch[0])
    assert plan == plan_for().model_copy(update={"model_fingerprint": asked})
    question = server.seen[-1]
    assert f"fingerprint={asked}" in question.query
    assert "batch=4x8" in question.query.split("&")
    assert f"torch={torch.__version__.replace('+', '%2B')}" in question.query
    assert question.headers["authorization"] == "Bearer ksn_1"


def test_y_is_not_needed():
    model, optimizer, (x, _) = parts()
    with serves(plan_for()).running() as server:
        assert kitsune.fetch_plan(model, optimizer, (x, None), server=server.url).knobs == plan_for().knobs


def test_asking_leaves_model_and_random_state_as_they_were():
    model, optimizer, batch = parts()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    with serves(plan_for()).running() as server:
        kitsune.fetch_plan(model, optimizer, batch, server=server.url)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


TROUBLE = {
    "hangs at once": hangs(),
    "hangs in the headers": hangs(HEAD),
    "drips its headers": drips(HEAD + b"X-Slow: ", b"a"),
    "hangs at the question": after_health(hangs()),
    "hangs in the body": after_health(hangs(HEAD + b"Content-Length: 99\r\n\r\n{")),
    "drips its body": after_health(drips(HEAD + b"Content-Length: 99999\r\n\r\n{", b" ")),
    "sends without end": after_health(drips(HEAD + b"\r\n", b" " * 100_000, 0.0)),
    "500": answers({PLANS: raw(500, b"Internal Server Error", Content_Type="text/plain")}),
    "a problem of 503": answers({PLANS: problem(503, "the database cannot be used now")}),
    "garbage": answers({PLANS: raw(200, b"\x00\xff")}),
    "an expired token": answers({PLANS: problem(401, "the token has expired")}),
    "a plan for another GPU": knows(plan_for(device="cuda", gpu="NVIDIA H200")),
    "a plan for another CPU": knows(plan_for(gpu="Another CPU")),
    "a plan of no machine": knows(Plan.by_hand(precision="bf16")),
    "a plan of another model": answers({PLANS: found(plan_for())}),
    "a tampered plan": answers({PLANS: of_json({"plan": {**plan_for().to_json(), "knobs": {"precision": "fp16"}}})}),
    "a plan of the future": answers({PLANS: of_json({"plan": {**plan_for().to_json(), "format_version": 2}})}),
}


@pytest.mark.parametrize("name", TROUBLE)
@pytest.mark.usefixtures("soon_limited")
def test_trouble_costs_little_and_is_told_once(name, caplog, monkeypatch):
    monkeypatch.setattr(
        "kitsune.client.remote_tuning.model_fingerprint_of", lambda *_: "e" * 64
    )  # seconds on a busy machine
    with ScriptedServer(TROUBLE[name]).running() as server:
        began = time.monotonic()
        assert fetch(server.url) is None
        assert time.monotonic() - began < LIMIT_S
        assert fetch(server.url) is None
    (warning,) = warnings_in(caplog)
    assert "training goes on plain" in warning


def test_nobody_listens_and_nothing_is_exported(monkeypatch):
    monkeypatch.setattr(
        "kitsune.client.remote_tuning.model_fingerprint_of", lambda *_: pytest.fail("seconds for nothing")
    )
    began = time.monotonic()
    assert fetch(absent()) is None
    assert time.monotonic() - began < LIMIT_S


def test_each_server_is_told_of_once(monkeypatch, caplog):
    urls = [absent() for _ in range(3)]
    for url in (*urls[:2], *urls[:2]):
        fetch(url)
    for _ in range(2):
        monkeypatch.setenv("KITSUNE_SERVER", urls[2])
        fetch(None)
    told = warnings_in(caplog)
    assert len(told) == 3
    assert all(url in text for url, text in zip(urls, told, strict=True))


@pytest.mark.usefixtures("limited")
def test_a_connection_that_is_never_made():
    with deaf() as url:
        began = time.monotonic()
        assert fetch(url) is None
        assert time.monotonic() - began < LIMIT_S


@pytest.mark.usefixtures("limited")
def test_a_name_that_is_looked_up_for_ever(monkeypatch, caplog):
    over = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: over.wait(20) and [])
    began = time.monotonic()
    assert fetch("http://a.server.test:8537") is None
    assert time.monotonic() - began < LIMIT_S
    over.set()
    assert "no whole answer" in caplog.text


def test_a_redirect_to_another_host_is_not_followed():
    with serves(plan_for()).running() as thief:
        away = raw(307, b"", Location=f"{thief.url}/api/v1/plans")
        with ScriptedServer(answers({PLANS: away})).running() as server:
            assert fetch(server.url) is None
        assert thief.seen == []


@pytest.mark.parametrize("url", ["nonsense", "http://me:secret@host", "ftp://x"])
def test_an_address_without_sense_is_no_error_either(url, caplog):
    assert fetch(url) is None
    assert "SettingsError" in caplog.text
    assert "me:secret" not in caplog.text


@pytest.mark.parametrize("error", [RuntimeError("boom"), AssertionError(), KeyError("x"), RecursionError("deep")])
def test_an_error_in_the_export(monkeypatch, error, caplog):
    def fails(*_: object) -> str:
        raise error

    monkeypatch.setattr("kitsune.client.remote_tuning.model_fingerprint_of", fails)
    with serves(plan_for()).running() as server:
        assert fetch(server.url) is None
    assert type(error).__name__ in caplog.text


@pytest.mark.parametrize("batch", [None, (), (torch.ones(4, 3), None), (lambda: 0, None), ({"z": torch.ones(4, 8)}, 0)])
def test_a_batch_that_does_not_fit(batch):
    model, optimizer, _ = parts()
    with serves(plan_for()).running() as server:
        assert kitsune.fetch_plan(model, optimizer, batch, server=server.url) is None


def test_a_model_that_is_none():
    with serves(plan_for()).running() as server:
        assert kitsune.fetch_plan(object(), None, None, server=server.url) is None  # type: ignore[arg-type]


def test_ctrl_c_is_not_swallowed(monkeypatch):
    def interrupted(*_: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("kitsune.client.remote_tuning.model_fingerprint_of", interrupted)
    with serves(plan_for()).running() as server, pytest.raises(KeyboardInterrupt):
        fetch(server.url)


def test_switched_off_nobody_is_asked(monkeypatch):
    monkeypatch.setenv("KITSUNE_DISABLE", "1")
    with serves(plan_for()).running() as server:
        assert fetch(server.url) is None
    assert server.seen == []


def test_no_plan_yet_is_no_trouble(caplog):
    with ScriptedServer(
        answers({PLANS: of_json({"match": "none", "reason": "not yet", "plan": None})})
    ).running() as server:
        assert fetch(server.url) is None
    assert warnings_in(caplog) == []


# The cache ----------------------------------------------------------------------------------------------------------


def outlived(monkeypatch) -> str:
    """A server that gave a plan, and then was gone."""
    server = serves(plan_for())
    with server.running():
        monkeypatch.setenv("KITSUNE_SERVER", server.url)
        assert fetch(None).knobs == plan_for().knobs
    return server.url


def test_a_server_that_is_gone_is_replaced_by_what_it_gave(monkeypatch, caplog):
    url = outlived(monkeypatch)
    assert fetch(None).knobs == plan_for().knobs
    assert url in caplog.text
    assert "the one it gave earlier" in caplog.text


def test_another_model_has_no_part_in_it(monkeypatch):
    outlived(monkeypatch)
    model = Mlp(dropout=0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert kitsune.fetch_plan(model, optimizer, (torch.randn(4, 8), None)) is None


def test_a_kept_plan_that_was_altered_is_ignored(monkeypatch, kitsune_home):
    outlived(monkeypatch)
    (file,) = kitsune_home.rglob("*.json")
    file.write_text(json.dumps({**json.loads(file.read_text()), "knobs": {"precision": "fp16"}}))
    assert fetch(None) is None


def test_a_server_that_forgot_is_believed(monkeypatch, kitsune_home):
    outlived(monkeypatch)
    play = answers({PLANS: of_json({"match": "none", "reason": "not yet", "plan": None})})
    outlived_url = plan_lookup.server_of().url
    port = int(outlived_url.rpartition(":")[2])
    with ScriptedServer(play).running(port):
        assert fetch(None) is None
    assert list(kitsune_home.rglob("*.json")) == []


# plan="auto" --------------------------------------------------------------------------------------------------------


def losses(step, batch, steps: int = 4) -> list[float]:
    return [float(step(*batch)) for _ in range(steps)]


def test_a_step_asks_for_its_own_plan_and_trains_by_it(monkeypatch):
    model, optimizer, batch = parts()
    with serves(plan_for({"update": "fused"})).running() as server:
        monkeypatch.setenv("KITSUNE_SERVER", server.url)
        with kitsune.TrainStep(model, F.cross_entropy, optimizer, plan="auto") as step:
            assert server.seen == []
            seen = losses(step, batch)
            assert step.report.applied == {"update": "fused"}
            assert step.plan.knobs == {"update": "fused"}
    assert [request.path for request in server.seen] == ["/healthz", "/api/v1/plans", "/api/v1/plans"]
    model, optimizer, batch = parts()
    asked = fingerprint_of(Workload(model, F.cross_entropy, optimizer, batch))
    assert f"fingerprint={asked}&" in server.seen[2].query + "&"
    assert seen == pytest.approx(losses(kitsune.TrainStep(model, F.cross_entropy, optimizer), batch), rel=1e-4)


def test_a_step_without_a_server_trains_plain(monkeypatch):
    monkeypatch.setenv("KITSUNE_SERVER", absent())
    model, optimizer, batch = parts()
    step = kitsune.TrainStep(model, F.cross_entropy, optimizer, plan="auto")
    began = time.monotonic()
    first = float(step(*batch))
    assert time.monotonic() - began < LIMIT_S
    assert step.report.applied == {}
    assert "plan='auto': UnreachableError" in str(step.report)
    model, optimizer, batch = parts()
    assert first == float(kitsune.TrainStep(model, F.cross_entropy, optimizer)(*batch))


def test_a_step_that_is_switched_off_asks_nobody(monkeypatch):
    monkeypatch.setenv("KITSUNE_DISABLE", "1")
    with serves(plan_for()).running() as server:
        monkeypatch.setenv("KITSUNE_SERVER", server.url)
        model, optimizer, batch = parts()
        kitsune.TrainStep(model, F.cross_entropy, optimizer, plan="auto")(*batch)
    assert server.seen == []


def train(optimizer, model, batch, steps: int = 4) -> list[float]:
    x, y = batch
    seen = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        seen.append(loss.item())
    return seen


def test_the_drop_in_asks_by_its_model_and_trains_by_the_plan(monkeypatch):
    model, optimizer, batch = parts()
    with serves(plan_for({"update": "fused"})).running() as server:
        monkeypatch.setenv("KITSUNE_SERVER", server.url)
        wrapped = kitsune.KitsuneOptimizer(optimizer, plan="auto")
        seen = train(wrapped, model, batch)
        assert wrapped.report.applied == {"update": "fused"}
        wrapped.close()
    assert [request.path for request in server.seen] == ["/healthz", "/api/v1/plans", "/api/v1/plans"]
    plain, optimizer, batch = parts()
    assert f"fingerprint={model_fingerprint_of(plain, optimizer, batch[0])}&" in server.seen[2].query + "&"
    assert seen == pytest.approx(train(optimizer, plain, batch), rel=1e-4)


def test_the_drop_in_without_a_server_trains_plain_with_what_was_chosen_by_hand(monkeypatch):
    monkeypatch.setenv("KITSUNE_SERVER", absent())
    model, optimizer, batch = parts()
    wrapped = kitsune.KitsuneOptimizer(optimizer, plan="auto")
    seen = train(wrapped, model, batch)
    assert wrapped.report.applied == {}
    assert "plan='auto': UnreachableError" in str(wrapped.report)
    plain, optimizer, batch = parts()
    assert seen == train(optimizer, plain, batch)
    model, optimizer, batch = parts()
    by_hand = kitsune.KitsuneOptimizer(optimizer, plan="auto", enable_amp=True)
    train(by_hand, model, batch)
    assert by_hand.report.applied == {"precision": "bf16"}


def test_the_drop_in_waits_for_a_forward_of_training(monkeypatch):
    model, optimizer, batch = parts()
    with serves(plan_for({"update": "fused"})).running() as server:
        monkeypatch.setenv("KITSUNE_SERVER", server.url)
        wrapped = kitsune.KitsuneOptimizer(optimizer, plan="auto")
        train(wrapped, model, batch, steps=1)
        with torch.no_grad():
            model(batch[0])
        model.eval()
        model(batch[0])
        assert server.seen == []
        model.train()
        train(wrapped, model, batch, steps=1)
        assert len(server.seen) == 3
        train(wrapped, model, batch, steps=2)
        assert len(server.seen) == 3


def test_the_drop_in_names_what_is_called_by_name(monkeypatch):
    class ByName(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(8, 4)

        def forward(self, x, *, scale):
            return self.inner(x) * scale

    torch.manual_seed(0)
    model = ByName()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = {"x": torch.randn(4, 8), "scale": torch.ones(1)}
    with serves(plan_for({"update": "fused"})).running() as server:
        monkeypatch.setenv("KITSUNE_SERVER", server.url)
        wrapped = kitsune.KitsuneOptimizer(optimizer, plan="auto")
        for _ in range(2):
            model(x["x"], scale=x["scale"]).sum().backward()
            wrapped.step()
        wrapped.close()
    assert f"fingerprint={model_fingerprint_of(model, optimizer, x)}&" in server.seen[2].query + "&"


# submit -------------------------------------------------------------------------------------------------------------

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
        run = submit(service.server.url, budget="5m", trials=7, token="ksn_x")
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
        "archive": "ab" * 32, "budget_s": 300.0, "trials": 7, "device": "", "seed": 0, "name": "",
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


@pytest.mark.parametrize("options", [{"trials": 0}, {"trials": "5"}, {"budget": "soon"}, {"budget": -1}])
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
