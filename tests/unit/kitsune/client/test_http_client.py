"""The client against servers that misbehave: every call ends in time, with one of two errors, and nothing leaks."""

import hashlib
import json
import logging
import socket
import threading
import time

import pytest

from kitsune.client.http_client import MACHINE, Client, FoundPlan
from kitsune.client.server_address import Server
from kitsune.errors import RefusedError, UnreachableError
from kitsune.plan import MAX_PLAN_BYTES, Environment, Plan, PlanQuery
from tests.scripted_server import (
    Play,
    ScriptedServer,
    absent,
    answers,
    deaf,
    drips,
    hangs,
    of_json,
    problem,
    raw,
)

#: Longer than any answer takes on a machine that is busy with other tests.
CALL_S = 20.0
#: Of a call to a server that will not answer, and what a busy machine may add to it.
HURRIED_S, SLACK_S = 0.3, 15.0
SECRET = "ksn_" + "s3cret" * 7
HERE = Environment(device="cpu", gpu="Some CPU", memory_bytes=2**34, torch="2.13.0", python="3.11.7", kitsune="0.1.0")
PLAN = Plan(knobs={"precision": "bf16"}, fingerprint="f" * 64, environment=HERE)
ASKED = PlanQuery("f" * 64)
PLANS = "GET /api/v1/plans"
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"


def client_of(url: str, **options: float) -> Client:
    return Client(Server(url, SECRET), **{"call_s": CALL_S, **options})


def hurried(url: str) -> Client:
    return client_of(url, call_s=HURRIED_S)


def found(plan: Plan | None, reason: str = "same machine type and software") -> bytes:
    return of_json({"match": "exact" if plan else "none", "reason": reason, "plan": plan.to_json() if plan else None})


def tampered() -> bytes:
    return of_json({"match": "exact", "reason": "", "plan": {**PLAN.to_json(), "knobs": {"precision": "fp16"}}})


ENDLESS: dict[str, Play] = {
    "hangs at once": hangs(),
    "hangs in the headers": hangs(HEAD),
    "hangs in the body": hangs(HEAD + b"Content-Length: 100\r\n\r\n{"),
    "drips its headers": drips(HEAD + b"X-Slow: ", b"a"),
    "drips its body": drips(HEAD + b"Content-Length: 100000\r\n\r\n{", b" "),
}
MISBEHAVIOUR: dict[str, tuple[Play, str]] = {
    "sends without end": (drips(HEAD + b"\r\n", b" " * 100_000, 0.0), "larger than"),
    "announces too much": (
        answers({PLANS: raw(200, b" " * (2 * MAX_PLAN_BYTES + 1), Content_Type="application/json")}), "larger than"),
    "a compressed bomb": (answers({PLANS: raw(200, b"\x1f\x8b\x08" + bytes(100), Content_Encoding="gzip")}), "JSON"),
    "leaves": (lambda *_: None, "disconnected"),
    "does not speak HTTP": (lambda _, c, __: c.sendall(b"220 ftp ready\r\n\r\n"), "illegal"),
    "garbage": (answers({PLANS: raw(200, b"\xff\xfe{{{")}), "not a JSON object"),
    "a list": (answers({PLANS: of_json([1])}), "not a JSON object"),
    "deep": (answers({PLANS: raw(200, b"[" * 100_000)}), "not a JSON object"),
    "another object": (answers({PLANS: of_json({"hello": 1})}), "has no field plan"),
    "a plan that is a list": (answers({PLANS: of_json({"plan": [1]})}), "refused"),
    "an unknown knob": (answers({PLANS: of_json({"plan": {**PLAN.to_json(), "knobs": {"x": 1}}})}), "refused"),
    "a plan that was altered": (answers({PLANS: tampered()}), "altered after it was written"),
    "a plan of another step": (
        answers({PLANS: found(PLAN.model_copy(update={"fingerprint": "e" * 64}))}), "for another workload"),
    "a database that is away": (answers({PLANS: problem(503, "try again")}), r"cannot answer now \(503\): try again"),
    "too many of us": (answers({PLANS: problem(429, "slow down")}), r"cannot answer now \(429\)"),
    "a web page": (answers({PLANS: raw(200, b"<html>", Content_Type="text/html")}), "not a JSON object"),
    "an error of a proxy": (answers({PLANS: raw(502, b"<html>", Content_Type="text/html")}), "answered 502"),
    "an error that is not ours": (answers({PLANS: of_json({"detail": "x"}, 500)}), "answered 500"),
    "a problem that is no JSON": (
        answers({PLANS: raw(500, b"{", Content_Type="application/problem+json")}), "answered 500"),
}  # fmt: skip


@pytest.mark.parametrize("name", ENDLESS)
def test_a_server_that_never_ends_is_unreachable_in_time(name):
    with ScriptedServer(ENDLESS[name]).running() as server:
        began = time.monotonic()
        with pytest.raises(UnreachableError, match=r"no whole answer came within 0\.3 s") as caught:
            hurried(server.url).find_plan(ASKED, HERE)
        assert time.monotonic() - began < HURRIED_S + SLACK_S
    assert server.url in str(caught.value)


@pytest.mark.parametrize("name", MISBEHAVIOUR)
def test_a_server_that_misbehaves_is_unreachable_at_once(name):
    play, expected = MISBEHAVIOUR[name]
    with ScriptedServer(play).running() as server, pytest.raises(UnreachableError, match=expected) as caught:
        client_of(server.url).find_plan(ASKED, HERE)
    assert server.url in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1500


def test_nobody_listens():
    began = time.monotonic()
    with pytest.raises(UnreachableError, match="refused"):
        client_of(absent()).check_presence()
    assert time.monotonic() - began < SLACK_S


def test_a_connection_that_is_never_made():
    with deaf() as url:
        began = time.monotonic()
        with pytest.raises(UnreachableError):
            hurried(url).check_presence()
        assert time.monotonic() - began < HURRIED_S + SLACK_S


def test_a_name_that_is_looked_up_for_ever(monkeypatch):
    over = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: over.wait(20) and [])
    began = time.monotonic()
    with pytest.raises(UnreachableError, match="no whole answer"):
        hurried("http://a.server.test:8537").check_presence()
    assert time.monotonic() - began < HURRIED_S + SLACK_S
    over.set()


def test_a_name_that_does_not_exist(monkeypatch):
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(UnreachableError, match="not known"):
        client_of("http://a.server.test:8537").check_presence()


def test_what_is_left_behind_ends_soon():
    """A thread that a hanging server holds is cut off with its call."""
    with ScriptedServer(drips(HEAD + b"X-Slow: ", b"a")).running() as server:
        with pytest.raises(UnreachableError):
            hurried(server.url).check_presence()
        end = time.monotonic() + SLACK_S
        while time.monotonic() < end and any(t.name == "kitsune-exchange" for t in threading.enumerate()):
            time.sleep(0.02)
        assert not any(thread.name == "kitsune-exchange" for thread in threading.enumerate())


def test_all_calls_together_have_a_limit():
    with ScriptedServer(hangs()).running() as server:
        client = client_of(server.url, call_s=0.4, in_all_s=0.6)
        began = time.monotonic()
        for _ in range(5):
            with pytest.raises(UnreachableError):
                client.check_presence()
        assert time.monotonic() - began < 0.6 + SLACK_S


# What leaves --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_a_redirect_is_not_followed_and_the_token_stays(status):
    with ScriptedServer(answers({PLANS: found(PLAN)})).running() as thief:
        away = raw(status, b"", Location=f"{thief.url}/api/v1/plans")
        server = ScriptedServer(answers({PLANS: away}))
        with server.running(), pytest.raises(UnreachableError, match="redirects are not followed"):
            client_of(server.url).find_plan(ASKED, HERE)
        assert thief.seen == []


def test_the_token_goes_with_questions_but_not_with_the_knock():
    with ScriptedServer(answers({PLANS: found(None)})).running() as server:
        client = client_of(server.url)
        client.check_presence()
        client.find_plan(ASKED, HERE)
    knock, question = server.seen
    assert "authorization" not in knock.headers
    assert question.headers["authorization"] == f"Bearer {SECRET}"


def test_a_proxy_never_sees_what_is_meant_for_this_machine(monkeypatch):
    with (
        ScriptedServer(answers({})).running() as proxy,
        ScriptedServer(answers({PLANS: found(PLAN)})).running() as server,
    ):
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
            monkeypatch.setenv(name, proxy.url)
        assert client_of(server.url).find_plan(ASKED, HERE).plan == PLAN
        assert proxy.seen == []


def test_no_error_and_no_log_line_shows_the_token(caplog):
    caplog.set_level(logging.DEBUG)
    with ScriptedServer(answers({PLANS: problem(401, "the token has expired")})).running() as server:
        client = client_of(server.url)
        with pytest.raises(RefusedError) as caught:
            client.find_plan(ASKED, HERE)
    assert SECRET not in repr(client.server) + str(caught.value) + caplog.text


# What is asked, and what comes back ---------------------------------------------------------------------------------


def test_the_machine_is_part_of_the_question():
    with ScriptedServer(answers({PLANS: found(PLAN)})).running() as server:
        assert client_of(server.url).find_plan(ASKED, HERE) == FoundPlan(PLAN, "same machine type and software")
    query = dict(part.split("=") for part in server.seen[0].query.split("&"))
    assert query == {
        "fingerprint": "f" * 64, "device": "cpu", "gpu": "Some+CPU", "memory_bytes": str(2**34), "torch": "2.13.0",
    }  # fmt: skip


def test_the_batch_is_part_of_the_question_where_it_is_known():
    with ScriptedServer(answers({PLANS: found(PLAN)})).running() as server:
        client_of(server.url).find_plan(PlanQuery("f" * 64, "16x128,16x128"), HERE)
    assert "batch=16x128%2C16x128" in server.seen[0].query.split("&")


def test_a_plan_of_the_model_under_another_loss_is_one_that_was_asked_for():
    plan = PLAN.model_copy(update={"fingerprint": "e" * 64, "model_fingerprint": "f" * 64})
    with ScriptedServer(answers({PLANS: found(plan)})).running() as server:
        assert client_of(server.url).find_plan(ASKED, HERE).plan == plan


def test_no_plan_yet_is_an_answer():
    with ScriptedServer(answers({PLANS: found(None, "no run of this model has finished")})).running() as server:
        assert client_of(server.url).find_plan(ASKED, HERE) == FoundPlan(None, "no run of this model has finished")


def test_a_refusal_has_the_servers_status_and_reason_in_one_clean_line():
    text = "the token\x1b[2J has expired;\nmake a new one" + "!" * 5000
    server = ScriptedServer(answers({PLANS: problem(401, text)}))
    with server.running(), pytest.raises(RefusedError) as caught:
        client_of(server.url).find_plan(ASKED, HERE)
    assert caught.value.status == 401
    assert caught.value.detail.startswith("the token\N{REPLACEMENT CHARACTER}[2J has expired; make a new one!")
    assert len(caught.value.detail) <= 1000


def test_another_service_is_not_taken_for_ours():
    server = ScriptedServer(answers({"GET /healthz": raw(200, b"<html>Welcome</html>")}))
    with server.running(), pytest.raises(UnreachableError, match="something else than a Kitsune server"):
        client_of(server.url).check_presence()


def test_a_plan_under_anothers_name():
    other = Plan(knobs={"precision": "fp16"}, environment=HERE)
    server = ScriptedServer(answers({f"GET /api/v1/plans/{PLAN.plan_id}": of_json(other.to_json())}))
    with server.running(), pytest.raises(UnreachableError, match="was requested, but"):
        client_of(server.url).plan(PLAN.plan_id)


def test_an_archive_is_put_under_its_digest_and_has_the_name_that_the_server_gives():
    content = b"PK" + bytes(1000)
    name = hashlib.sha256(content).hexdigest()
    with ScriptedServer(
        answers({f"PUT /api/v1/archives/{name}": of_json({"sha256": "ab" * 32}, 201)})
    ).running() as server:
        assert client_of(server.url).put_archive(content) == "ab" * 32
    assert server.seen[0].body == content


def test_a_run_is_asked_for_with_its_key():
    with ScriptedServer(answers({"POST /api/v1/runs": of_json({"id": "r1"}, 201)})).running() as server:
        assert client_of(server.url).start_run({"archive": "ab", "trials": 3}, "key-1") == {"id": "r1"}
    (request,) = server.seen
    assert request.headers["idempotency-key"] == "key-1"
    assert request.headers["content-type"] == "application/json"
    assert json.loads(request.body) == {"archive": "ab", "trials": 3}


def test_what_a_match_looks_at_is_asked_for():
    assert Environment.model_fields.keys() - set(MACHINE) == {"python", "kitsune"}
