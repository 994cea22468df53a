"""HTTP servers that do what a test tells them: answers as they should be, and every way to misbehave."""

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Request:
    """What arrived: the names of headers in lower case."""

    method: str
    path: str
    query: str
    headers: dict[str, str]
    body: bytes


Play = Callable[[Request, socket.socket, threading.Event], None]


@dataclass
class ScriptedServer:
    """Plays its script for every connection; `seen` are the requests that arrived whole."""

    play: Play
    seen: list[Request] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)
    url: str = ""

    @contextlib.contextmanager
    def running(self, port: int = 0) -> Iterator["ScriptedServer"]:
        with socket.create_server(("127.0.0.1", port)) as listening:
            self.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
            thread = threading.Thread(target=self._accept, args=(listening,), daemon=True)
            thread.start()
            try:
                yield self
            finally:
                self.over.set()
                listening.shutdown(socket.SHUT_RDWR)
                thread.join(5)

    def _accept(self, listening: socket.socket) -> None:
        while not self.over.is_set():
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):  # a client that leaves is what is tested
            connection.settimeout(30)
            request = _read(connection)
            if request is not None:
                self.seen.append(request)
                self.play(request, connection, self.over)


def _read(connection: socket.socket) -> Request | None:
    data = b""
    while b"\r\n\r\n" not in data:
        chunk = connection.recv(65536)
        if not chunk:
            return None
        data += chunk
    head, _, body = data.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    while len(body) < int(headers.get("content-length", "0")):
        body += connection.recv(65536)
    method, target, _ = first.split(" ")
    path, _, query = target.partition("?")
    return Request(method, path, query, headers, body)


def raw(status: int, body: bytes, **headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status} X", f"Content-Length: {len(body)}", "Connection: close"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def of_json(value: Any, status: int = 200) -> bytes:
    return raw(status, json.dumps(value).encode(), Content_Type="application/json")


def problem(status: int, detail: str) -> bytes:
    content = {"type": "about:blank", "title": "No", "status": status, "detail": detail}
    return raw(status, json.dumps(content).encode(), Content_Type="application/problem+json")


def answers(routes: dict[str, bytes]) -> Play:
    """By "METHOD /path"; /healthz as it should be, anything else a problem of 404."""
    known = {"GET /healthz": raw(200, b"ok\n"), **routes}

    def play(request: Request, connection: socket.socket, _: threading.Event) -> None:
        connection.sendall(known.get(f"{request.method} {request.path}", problem(404, "there is no such thing")))

    return play


def drips(start: bytes, drop: bytes, every_s: float = 0.05) -> Play:
    """Never ends, but never falls silent for long either."""

    def play(_: Request, connection: socket.socket, over: threading.Event) -> None:
        connection.sendall(start)
        while not over.wait(every_s):
            connection.sendall(drop)

    return play


def hangs(start: bytes = b"") -> Play:
    def play(_: Request, connection: socket.socket, over: threading.Event) -> None:
        connection.sendall(start)
        over.wait(30)

    return play


def after_health(play: Play) -> Play:
    """Says that it is there, and then misbehaves."""

    def both(request: Request, connection: socket.socket, over: threading.Event) -> None:
        if request.path == "/healthz":
            connection.sendall(raw(200, b"ok\n"))
        else:
            play(request, connection, over)

    return both


@contextlib.contextmanager
def deaf() -> Iterator[str]:
    """The address of a server whose queue is full: a connection to it is never made."""
    with socket.socket() as listening, contextlib.ExitStack() as waiting:
        listening.bind(("127.0.0.1", 0))
        listening.listen(0)
        for _ in range(4):
            caller = waiting.enter_context(socket.socket())
            caller.setblocking(False)
            caller.connect_ex(listening.getsockname())
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


_RESERVED: list[socket.socket] = []


def absent() -> str:
    """An address where nobody listens, and where nobody will: the port stays ours."""
    reserved = socket.socket()
    reserved.bind(("127.0.0.1", 0))
    _RESERVED.append(reserved)
    return f"http://127.0.0.1:{reserved.getsockname()[1]}"
