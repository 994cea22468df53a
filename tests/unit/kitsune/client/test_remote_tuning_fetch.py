"""Fetching a plan costs a training script nothing when it fails."""

import json
import socket
import threading
import time

import pytest
import torch

import kitsune
from kitsune.client import plan_lookup
from kitsune.plan import Plan
from kitsune.submission.exporting.export import model_fingerprint_of
from tests.scripted_server import (
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
from tests.unit.kitsune.client.plan_servers import (
    HEAD,
    LIMIT_S,
    PLANS,
    fetch,
    found,
    knows,
    parts,
    plan_for,
    serves,
    warnings_in,
)

pytestmark = pytest.mark.usefixtures("fresh_warnings", "patience", "exported_once")


# fetch_plan -----------------------------------------------------------------------------------------------------------


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


# The cache ------------------------------------------------------------------------------------------------------------


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
