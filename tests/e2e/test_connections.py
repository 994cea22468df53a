"""What connections may cost a real server: how many there are, what waits on one, and how small its pieces are."""

import contextlib
import socket
from collections.abc import Iterator

import httpx
import pytest

from benchmarks.connections import exchange, status_of
from benchmarks.serving import KITSUNE, Serving, serving
from server.http.protocol import MAX_OVERHEAD, MAX_PIPELINED, SMALL_CHUNK

FILES = 200
CLOSING = "Connection: close\r\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """One that may open few files, and so have few connections."""
    home = tmp_path_factory.mktemp("home")
    with serving(home, f"sqlite:///{home}/kitsune.db", ("prlimit", f"--nofile={FILES}:{FILES}", KITSUNE)) as running:
        yield running


def health(*headers: str) -> bytes:
    return f"GET /healthz HTTP/1.1\r\nHost: localhost\r\n{''.join(headers)}\r\n".encode()


def connect(server: Serving) -> socket.socket:
    return socket.create_connection((server.host, server.port), timeout=60)


def test_silent_connections_shut_nobody_out(server):
    with contextlib.ExitStack() as opened:
        silent = [opened.enter_context(connect(server)) for _ in range(FILES * 2)]
        for _ in range(5):
            assert status_of(exchange(server.host, server.port, health(CLOSING))) == 200
        assert silent[0].recv(1) == b""  # long before the 10 s in which others may be silent
        silent[-1].setblocking(False)
        with pytest.raises(BlockingIOError):
            silent[-1].recv(1)


def test_some_requests_may_wait_for_their_answers_and_no_more(server):
    several = health() * (MAX_PIPELINED - 1) + health(CLOSING)
    assert exchange(server.host, server.port, several).count(b"HTTP/1.1 200") == MAX_PIPELINED
    many = health() * 6000
    assert exchange(server.host, server.port, many).count(b"HTTP/1.1 200") <= MAX_PIPELINED


def chunked(server: Serving, chunks: bytes, method: str = "POST") -> bytes:
    head = f"{method} /healthz HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n{CLOSING}\r\n"
    return exchange(server.host, server.port, head.encode() + chunks + b"0\r\n\r\n")


def test_small_chunks_are_taken_until_there_are_too_many(server):
    number = MAX_OVERHEAD // SMALL_CHUNK
    assert status_of(chunked(server, b"1\r\nx\r\n" * (number // 2))) == 405
    assert status_of(chunked(server, b"80\r\n" + b"x" * 128 + b"\r\n" + b"1\r\nx\r\n")) == 405
    assert status_of(chunked(server, b"1\r\nx\r\n" * number * 2)) in (0, 400)


def test_chunks_of_earlier_requests_do_not_count(server):
    with httpx.Client(base_url=server.url, timeout=60) as client:
        answers = [
            client.post("/healthz", content=iter([b"x"])).status_code for _ in range(MAX_OVERHEAD // SMALL_CHUNK + 9)
        ]
    assert set(answers) == {405}
