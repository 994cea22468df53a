"""Checks of Host, Origin and bodies, on every method and before routing."""

import asyncio
import json

import pytest
from fastapi.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from kitsune.client.server_address import is_loopback
from kitsune.errors import SettingsError
from server.app import create_app
from server.http.guard import host_of, is_known_host, is_same_origin, parse_allowed_host
from server.settings import ServerSettings
from tests.unit.server.conftest import HERE, assert_problem, secret
from tests.unit.server.wire import Wire

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "BREW")
FOREIGN_HOSTS = (
    "evil.example",
    "evil.example:8537",
    "localhost.evil.example",
    "127.0.0.1.evil.example",
    "127.0.0.1.nip.io",
    "0.0.0.0:8537",
    "10.0.0.7",
    "[::ffff:10.0.0.7]",
    "2130706433",
    "0x7f.1",
    "localhost.",
)
BROKEN_HOSTS = (
    "",
    "localhost/healthz?",
    "localhost#",
    "localhost?x=",
    "localhost:8537:80",
    "localhost:port",
    "evil@localhost",
    "local host",
    "localhost,evil.example",
    "[::1",
    "lócalhost".encode(),
    "localhost\\",
)
FOREIGN_ORIGINS = (
    "https://evil.example",
    "http://localhost:3000",
    "http://localhost",
    "http://127.0.0.1:8537",
    "http://localhost:8537.evil.example",
    "http://localhost:8537@evil.example",
    "file://",
    "null",
    "",
)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("host", ["evil.example", "10.0.0.7:8537"])
def test_a_foreign_host_is_refused_on_every_method(client, method, host):
    response = client.request(method, "/healthz", headers={"Host": host})
    assert response.status_code == 421
    assert method == "HEAD" or assert_problem(response, 421, "--allow-host")


@pytest.mark.parametrize("method", METHODS)
def test_a_foreign_origin_is_refused_on_every_method(client, method):
    response = client.request(method, "/healthz", headers={"Origin": "https://evil.example"})
    assert response.status_code == 403
    assert method == "HEAD" or assert_problem(response, 403, "other origins")


@pytest.mark.parametrize("host", FOREIGN_HOSTS)
def test_names_that_look_like_ours_are_not_ours(client, host):
    assert_problem(client.get("/api/v1/runs", headers={"Host": host}), 421)


@pytest.mark.parametrize("host", BROKEN_HOSTS)
def test_a_host_that_is_no_name_is_refused(client, host):
    assert_problem(client.get("/api/v1/runs", headers={"Host": host}), 400, "Host")


def test_two_hosts_are_refused(client):
    assert_problem(client.get("/healthz", headers=[("Host", "localhost"), ("Host", "localhost")]), 400)


@pytest.mark.parametrize("origin", FOREIGN_ORIGINS)
def test_origins_that_look_like_ours_are_not_ours(client, origin):
    assert_problem(client.get("/api/v1/runs", headers={"Origin": origin}), 403)


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "127.0.0.1:8537", "127.8.9.1", "[::1]:8537", "[::1]"])
def test_our_own_names_and_our_own_origin_pass(client, host):
    assert client.get("/healthz", headers={"Host": host, "Origin": f"http://{host}"}).status_code == 200
    assert client.get("/healthz", headers={"Host": host, "Origin": f"https://{host}"}).status_code == 200


def test_beyond_this_machine_addresses_and_listed_names_pass(database):
    settings = ServerSettings(host="0.0.0.0", allow_remote=True, allowed_hosts=("Tuner.example",))
    with TestClient(create_app(database, settings), base_url=HERE) as client:
        for host in ("tuner.example", "TUNER.example:80", "10.0.0.7:8537", "[fe80::1]", "localhost"):
            assert client.get("/healthz", headers={"Host": host}).status_code == 200
        for host in ("evil.example", "tuner.example.evil.example", "0.0.0.0", "[::]"):
            assert_problem(client.get("/healthz", headers={"Host": host}), 421)


@pytest.mark.parametrize(
    ("given", "host"),
    [
        ("tuner.example.com", "tuner.example.com"),
        ("Tuner.Example.com:18544", "tuner.example.com"),
        ("10.0.0.7:80", "10.0.0.7"),
        ("[fe80::1]:80", "fe80::1"),
        ("fe80::1", "fe80::1"),
    ],
)
def test_a_name_to_go_by_may_have_a_port(given, host):
    assert parse_allowed_host(given) == host


@pytest.mark.parametrize(
    "given", ["", " ", "*", "*.example.com", "https://t2.example.com", "a/b", "a,b", ":80", "a:b", "é"]
)
def test_what_no_client_can_call_a_server_is_refused(given):
    with pytest.raises(SettingsError, match="--allow-host"):
        parse_allowed_host(given)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.5.5.5", "::1", "localhost", "LocalHost"])
def test_loopback(host):
    assert is_loopback(host)
    assert is_known_host(host, (), any_address=False)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "localhost.example", "", "127.0.0.1:80", "127.1"])
def test_not_loopback(host):
    assert not is_loopback(host)


def test_the_parts_of_an_authority():
    assert host_of("a.b:80") == "a.b"
    assert host_of("[::1]:80") == "::1"
    assert host_of("a.b:80\n") is None
    assert is_same_origin("http://a.b:80", "a.b:80")
    assert not is_same_origin("http://a.b:80\n", "a.b:80")


def test_every_answer_forbids_sniffing_framing_and_keeping(client, stranger):
    for response in (client.get("/healthz"), stranger.get("/api/v1/runs"), client.get("/", headers={"Host": "evil"})):
        assert response.headers["x-content-type-options"] == "nosniff"
        assert "default-src 'none'" in response.headers["content-security-policy"]
        assert response.headers["cache-control"] == "no-store"


# Bodies ---------------------------------------------------------------------------------------------------------------

ROUTES = (("POST", "/api/v1/runs"), ("POST", "/api/v1/runs/x/cancel"), ("GET", "/healthz"), ("DELETE", "/nothing"))


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_a_body_may_not_be_larger_than_the_limit_on_any_route(client, method, path):
    assert_problem(client.request(method, path, content=bytes(64 * 2**10 + 1)), 413, "65536 bytes")
    assert_problem(client.request(method, path, content=iter([bytes(2**15)] * 3)), 413, "65536 bytes")


@pytest.mark.parametrize("length", ["-1", "1e3", "٣", "9" * 30, " "])
def test_a_length_that_is_no_number_is_refused(client, length):
    headers = {"Content-Length": length.encode()}
    assert_problem(client.request("POST", "/api/v1/runs", content=b"", headers=headers), 400, "Content-Length")


@pytest.mark.parametrize(("method", "path"), [("POST", "/api/v1/runs"), ("GET", "/healthz"), ("PUT", "archive")])
@pytest.mark.parametrize("pause_s", [0.02, 3600])
def test_a_slow_body_ends_at_the_time_limit(database, method, path, pause_s):
    app = create_app(database, ServerSettings(json_timeout_s=0.2, archive_timeout_s=0.2))
    path = f"/api/v1/archives/{'0' * 64}" if path == "archive" else path
    token = ("authorization", f"Bearer {secret(database)}")
    wire = Wire(app, ("transfer-encoding", "chunked"), token, method=method, path=path)

    async def drip():
        await asyncio.sleep(pause_s)
        return {"type": "http.request", "body": b" ", "more_body": True}

    status, headers, problem = wire.answer(drip)
    assert (status, headers["connection"]) == (408, "close")
    assert "0.2 s" in json.loads(problem)["detail"]


def test_an_endless_archive_ends_at_the_limit_and_leaves_nothing(database):
    app = create_app(database, ServerSettings(max_archive_bytes=2**22))
    token = ("authorization", f"Bearer {secret(database)}")
    wire = Wire(app, ("transfer-encoding", "chunked"), token, method="PUT", path=f"/api/v1/archives/{'0' * 64}")

    async def flood():
        return {"type": "http.request", "body": bytes(2**18), "more_body": True}

    status, headers, problem = wire.answer(flood)
    assert (status, headers["connection"]) == (413, "close")
    assert "4194304 bytes" in json.loads(problem)["detail"]


def test_a_stranger_uploads_nothing_before_being_refused(database):
    wire = Wire(
        create_app(database, ServerSettings()), ("content-length", "99"), method="PUT", path="/api/v1/archives/0"
    )

    async def never():
        raise AssertionError("the body was asked for")

    status, headers, _ = wire.answer(never)
    assert (status, headers["connection"]) == (401, "close")


@pytest.mark.parametrize("method", ["POST", "PUT"])
def test_a_client_that_goes_away_leaves_nothing(database, method):
    app = create_app(database, ServerSettings())
    token = ("authorization", f"Bearer {secret(database)}")
    path = "/api/v1/runs" if method == "POST" else f"/api/v1/archives/{'0' * 64}"
    wire = Wire(app, ("content-length", "99"), token, method=method, path=path)

    async def gone():
        return {"type": "http.disconnect"}

    status, _, problem = wire.answer(gone)
    assert status == 400
    assert "went away" in json.loads(problem)["detail"]


def test_a_web_socket_is_closed(stranger):
    with pytest.raises(WebSocketDisconnect) as caught, stranger.websocket_connect("/api/v1/runs"):
        pass
    assert caught.value.code == 1008
