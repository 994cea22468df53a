"""`kitsune serve` as users run it: a process of its own, spoken to over TCP, stopped by signals."""

import contextlib
import hashlib
import json
import os
import re
import signal
import socket
import subprocess
import sysconfig
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from kitsune.plan import Plan
from tests.store.samples import a_plan, a_trial
from tests.test_docs import blocks
from tests.unit.kitsune.submission import hostile
from tuner.records import Run, RunStatus
from tuner.store.engine import open_database
from tuner.store.queries import runs, trials

KITSUNE = Path(sysconfig.get_path("scripts")) / "kitsune"
PAGE = Path(__file__).parents[2] / "docs" / "server.md"

TRAIN = """
import torch
from kitsune import Workload


def make_workload():
    model = torch.nn.Linear(4, 2)
    batch = torch.randn(8, 4), torch.randn(8, 2)
    return Workload(model, torch.nn.functional.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1), batch)
"""


@dataclass
class Serving:
    """A server that runs."""

    process: subprocess.Popen[str]
    url: str
    home: Path

    @property
    def token(self) -> str:
        return (self.home / "token").read_text().strip()

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, headers={"Authorization": f"Bearer {self.token}"}, timeout=20)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(60)


@contextlib.contextmanager
def serving(home: Path, *words: str) -> Iterator[Serving]:
    process = subprocess.Popen(
        [KITSUNE, "serve", "--port", "0", *words],
        env={**os.environ, "KITSUNE_HOME": str(home)},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        url = re.search(r"http://\S+:\d+", line)
        assert url, line + process.stderr.read()
        yield Serving(process, url[0], home)
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """One for all that leave it as it is: to start it takes 1.5 s."""
    with serving(tmp_path_factory.mktemp("server") / "home") as running:
        yield running


@pytest.fixture(scope="module", autouse=True)
def slow_clients(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Future[Any]]:
    """They mostly wait, 10 s: they are started first and looked at last, on a server of their own."""
    with serving(tmp_path_factory.mktemp("held") / "home") as running, ThreadPoolExecutor(1) as pool:
        yield pool.submit(hold_up, running)


@pytest.fixture
def new_server(tmp_path: Path) -> Iterator[Serving]:
    """One with an empty database."""
    with serving(tmp_path / "home") as running:
        yield running


def send_archive(client: httpx.Client) -> str:
    content = hostile.valid().to_bytes()
    response = client.put(f"/api/v1/archives/{hashlib.sha256(content).hexdigest()}", content=content)
    assert response.status_code in (200, 201), response.text
    return response.json()["sha256"]


def work_once(home: Path) -> None:
    """What a worker does, without the measuring: claims the next run, tries twice, finishes with a plan."""
    with open_database(f"sqlite:///{home}/kitsune.db") as database:
        claimed: Run | None = None
        while claimed is None:
            time.sleep(0.05)
            with database.begin() as connection:
                queued = runs.page(connection, status=RunStatus.QUEUED).runs
                claimed = runs.claim_one(connection, queued[0].id, "worker") if queued else None
        for number in range(2):
            time.sleep(0.1)
            with database.begin() as connection:
                trials.add(connection, claimed, a_trial(claimed, number))
        with database.begin() as connection:
            runs.finish(connection, claimed, plan=a_plan(fingerprint=claimed.fingerprint))


def test_the_flow_of_the_page_by_curl_alone(new_server, tmp_path):
    """The commands of docs/server.md, as printed but for the port, and the version of torch that the plan names."""
    flow = next(block.text for block in blocks("server.md", PAGE.read_text("utf-8")) if "sha256sum" in block.text)
    here = "$(python -c 'import torch; print(torch.__version__)')"
    assert here in flow
    flow = flow.replace(here, "2.13.0").replace("http://127.0.0.1:8537", new_server.url)
    (tmp_path / "train.py").write_text(TRAIN)
    worker = threading.Thread(target=work_once, args=(new_server.home,), daemon=True)
    worker.start()
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", flow],
        cwd=tmp_path,
        env={**os.environ, "KITSUNE_HOME": str(new_server.home), "PATH": f"{KITSUNE.parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    worker.join(5)
    events = (tmp_path / "events.txt").read_text()
    assert re.findall(r"^event: (\w+)", events, re.MULTILINE)[-1] == "run"
    assert events.count("event: trial") == 2
    assert len(json.loads((tmp_path / "trials.json").read_text())["trials"]) == 2
    found = json.loads((tmp_path / "plan.json").read_text())
    assert found["match"] == "exact"
    assert Plan.from_json(found["plan"]).evidence is not None


def test_a_server_on_loopback_needs_no_set_up_and_tells_its_name_to_nobody(new_server):
    """Nor does it load torch or optuna, for all that it is asked here."""
    server = new_server
    assert (server.home / "token").stat().st_mode & 0o777 == 0o600
    with server.client() as client:
        response = client.get("/api/v1/runs")
        assert response.json() == {"runs": [], "after": None}
        assert "server" not in response.headers
        assert client.get("/openapi.json").json()["openapi"].startswith("3.")
        send_archive(client)
    assert httpx.get(f"{server.url}/api/v1/runs").status_code == 401
    maps = Path(f"/proc/{server.process.pid}/maps").read_text()
    assert "libtorch" not in maps and "optuna" not in maps


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 0), pytest.param(signal.SIGINT, 130, marks=pytest.mark.minutes)]
)
def test_told_to_stop_it_ends_its_streams_and_leaves(tmp_path, number, code):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with serving(tmp_path) as server, server.client() as client:
            run = client.post("/api/v1/runs", json={"archive": send_archive(client)}).json()
            with client.stream("GET", run["links"]["events"]) as stream:
                lines = stream.iter_lines()
                assert next(lines) == "event: run"
                begin = time.monotonic()
                server.process.send_signal(number)
                rest = list(lines)
            assert server.process.wait(60) == code
            assert time.monotonic() - begin < 30
            assert rest
    finally:
        signal.signal(signal.SIGINT, before)


def test_what_was_acknowledged_survives_a_kill(tmp_path):
    known: dict[str, str] = {}
    for attempt in range(2):
        with serving(tmp_path) as server:
            killer = threading.Timer(0.1, server.process.kill)
            with server.client() as client, contextlib.suppress(httpx.TransportError):
                archive = send_archive(client)
                for number in range(10_000):
                    if number == 5:
                        killer.start()
                    key = f"{attempt}-{number}"
                    response = client.post(
                        "/api/v1/runs", json={"archive": archive, "seed": number}, headers={"Idempotency-Key": key}
                    )
                    assert response.status_code in (200, 201)
                    known[key] = response.json()["id"]
            assert server.process.wait(60) == -signal.SIGKILL
    assert len(known) >= 10
    with serving(tmp_path) as server, server.client() as client:
        archive = send_archive(client)
        for key, run in known.items():
            assert client.get(f"/api/v1/runs/{run}").status_code == 200
            again = client.post(
                "/api/v1/runs",
                json={"archive": archive, "seed": int(key.partition("-")[2])},
                headers={"Idempotency-Key": key},
            )
            assert (again.status_code, again.json()["id"]) == (200, run)


# Bad clients ----------------------------------------------------------------------------------------------------------


def talk(server: Serving, start: str, body: Iterator[bytes], within_s: float = 60) -> tuple[int, dict[str, object]]:
    """Sends a request byte by byte as told, whatever comes back; gives status and problem."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=within_s) as wire:
        wire.sendall(start.encode())
        with contextlib.suppress(ConnectionError):
            for part in body:
                wire.sendall(part)
        answer = b""
        with contextlib.suppress(ConnectionError):
            while part := wire.recv(65536):
                answer += part
    above, _, text = answer.partition(b"\r\n\r\n")
    assert b"application/problem+json" in above, answer[:500]
    return int(above.split()[1]), json.loads(text)


def head(server: Serving, line: str, *headers: str, host: str | None = None, token: bool = True) -> str:
    given = [f"Host: {host or f'127.0.0.1:{server.port}'}", "Connection: close", *headers]
    given += [f"Authorization: Bearer {server.token}"] if token else []
    return "\r\n".join([f"{line} HTTP/1.1", *given, "", ""])


def chunks(size: int) -> Iterator[bytes]:
    while True:
        yield f"{size:x}\r\n".encode() + bytes(size) + b"\r\n"


ARCHIVE = "PUT /api/v1/archives/" + "0" * 64


@pytest.mark.parametrize(
    ("line", "token", "status"),
    [
        ("POST /api/v1/runs", True, 413),
        ("GET /healthz", False, 413),
        (ARCHIVE, True, 413),
        (ARCHIVE, False, 401),
    ],
)
def test_an_endless_body_ends(server, line, token, status):
    found, problem = talk(server, head(server, line, "Transfer-Encoding: chunked", token=token), chunks(2**16))
    assert found == problem["status"] == status
    assert httpx.get(f"{server.url}/healthz").status_code == 200


def test_a_length_beyond_the_limit_is_refused_before_the_body(server):
    line = head(server, ARCHIVE, f"Content-Length: {2**40}", "Expect: 100-continue")
    found, problem = talk(server, line, iter(()))
    assert found == problem["status"] == 413


def drip(text: bytes) -> Iterator[bytes]:
    while True:
        yield text
        time.sleep(1)


def endless(text: bytes) -> Iterator[bytes]:
    while True:
        yield text * 1000


@pytest.mark.parametrize(
    ("start", "status"),
    [
        ("GET /", 431),
        ("GET / HTTP/1.1\r\nX: ", 431),
        ("GET / HTTP/1.1\r\n", 431),
        ("nonsense\r\n\r\n", 400),
        ("\x16\x03\x01\x02\x00\x01", 400),
    ],
)
def test_an_endless_head_and_what_is_no_http_end(server, start, status):
    found, problem = talk(server, start, endless(b"x"))
    assert found == problem["status"] == status


def test_endless_headers_end(server):
    found, problem = talk(server, "GET / HTTP/1.1\r\n", endless(b"X: y\r\n"))
    assert found == problem["status"] == 431


@pytest.mark.parametrize(("once", "ever"), [(b"0\r\n", b"X: y\r\n" * 1000), (b"", b"1;" + b"x" * 1000 + b"\r\n \r\n")])
def test_endless_trailers_and_framing_end(server, once, ever):
    """What surrounds a body is bounded too: the connection closes, with whatever answer had begun."""
    sent = 0
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as wire:
        wire.sendall(head(server, ARCHIVE, "Transfer-Encoding: chunked").encode() + once)
        with contextlib.suppress(ConnectionError):
            while sent < 2**26:
                wire.sendall(ever)
                sent += len(ever)
    assert sent < 2**26


def trailed(server: Serving, line: str, trailer: str, *headers: str, **changes: object) -> tuple[int, str]:
    """Status and text of the answer to a request whose body is one object, and which ends with a trailer."""
    start = head(server, line, "Transfer-Encoding: chunked", "Content-Type: application/json", *headers, **changes)
    return said(server, f"{start}2\r\n{{}}\r\n0\r\n{trailer}\r\n\r\n")


def said(server: Serving, request: str) -> tuple[int, str]:
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as wire:
        wire.sendall(request.encode())
        answer = b""
        while part := wire.recv(65536):
            answer += part
    return int(answer.split()[1]), answer.decode()


def test_trailers_are_no_headers(server):
    """Neither who asks, nor whom, nor for which page is said after the body."""
    token = f"Authorization: Bearer {server.token}"
    assert trailed(server, "POST /api/v1/runs", token, token=False)[0] == 401
    assert trailed(server, "POST /api/v1/runs", token)[0] == 422, "a second token would be none"
    assert trailed(server, "GET /healthz", "Host: evil.example")[0] == 200
    assert trailed(server, "GET /healthz", "Origin: https://evil.example")[0] == 200
    assert trailed(server, "GET /healthz", "Host: localhost", host="evil.example")[0] == 421
    without = (
        "GET /healthz HTTP/1.1\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n0\r\nHost: localhost\r\n\r\n"
    )
    assert said(server, without)[0] == 400


def test_headers_after_a_trailer_are_those_of_the_next_request(server):
    first = head(server, "POST /api/v1/runs/x/cancel", "Transfer-Encoding: chunked", token=False)
    first = first.replace("Connection: close\r\n", "") + "0\r\nX: y\r\n\r\n"
    status, text = said(server, first + head(server, "GET /api/v1/runs"))
    assert status == 401
    assert re.findall(r"HTTP/1.1 (\d+) ", text) == ["401", "200"]


def test_another_protocol_is_neither_spoken_nor_logged(tmp_path):
    with serving(tmp_path) as server:
        for name in ("websocket", "h2c"):
            asked = head(server, "GET /healthz", f"Upgrade: {name}").replace(
                "Connection: close", "Connection: Upgrade, close"
            )
            assert said(server, asked)[0] == 200
        assert server.stop() == 0
        assert server.process.stderr is not None
        assert server.process.stderr.read() == ""


def test_health_by_head_has_no_body(server):
    for path in ("/healthz", "/readyz"):
        status, text = said(server, head(server, f"HEAD {path}", token=False))
        assert status == 200
        assert text.endswith("\r\n\r\n") and "content-length: 3" in text


def test_a_foreign_host_and_an_absolute_address_are_refused(server):
    assert talk(server, head(server, "GET /api/v1/runs", host="evil.example"), iter(()))[0] == 421
    line = head(server, "GET http://localhost/api/v1/runs", host="evil.example")
    assert talk(server, line, iter(()))[0] == 421


def hold_up(server: Serving) -> tuple[list[int], list[float], list[bytes]]:
    """20 clients send a body of a byte a second, one such a head, and 30 say nothing; somebody asks for its health.

    What the slow ones were answered, what each question took, and what the silent ones were told at last.
    """
    found: list[int] = []

    def slow(line: str, text: bytes) -> None:
        found.append(talk(server, line, drip(text))[0])

    body = head(server, "POST /api/v1/runs", "Transfer-Encoding: chunked", "Content-Type: application/json")
    clients = [threading.Thread(target=slow, args=(body, b"1\r\n \r\n")) for _ in range(20)]
    clients.append(threading.Thread(target=slow, args=("GET / HTTP/1.1\r\nX: ", b"x")))
    with contextlib.ExitStack() as stack:
        silent = [
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=20)) for _ in range(30)
        ]
        for client in clients:
            client.start()
        waits = []
        for _ in range(20):
            begin = time.monotonic()
            assert httpx.get(f"{server.url}/healthz", timeout=20).status_code == 200
            waits.append(time.monotonic() - begin)
            time.sleep(0.05)
        for client in clients:
            client.join()
        told = [wire.recv(65536) for wire in silent]
        assert [wire.recv(1) for wire in silent] == [b""] * 30
    return found, waits, told


def test_slow_heads_and_bodies_end_and_hold_nobody_up(slow_clients):
    found, waits, told = slow_clients.result(120)
    assert found == [408] * 21
    assert max(waits) < 8  # a server that is held up answers after 10 s
    assert all(text.startswith(b"HTTP/1.1 408 ") for text in told)
