"""Requests as bytes in, status, body and time of each answer out: a client that costs little beside the server."""

import asyncio
import contextlib
import re
import socket
import time
from collections.abc import Callable
from typing import Final, NamedTuple, cast

_LENGTH: Final = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_NO_BODY: Final = frozenset({204, 304})


class Answer(NamedTuple):
    """What came back, and how long after the request was handed to the kernel its last byte was read."""

    status: int
    head: bytes
    body: bytes
    seconds: float


class Connection(asyncio.Protocol):
    """One connection that is kept: a request is sent when the answer to the one before has arrived, never earlier."""

    def __init__(self) -> None:
        self._received = b""
        self._begin = 0.0
        self._answered: asyncio.Future[Answer] | None = None

    @classmethod
    async def open(cls, host: str, port: int) -> "Connection":
        _, made = await asyncio.get_running_loop().create_connection(cls, host, port)
        return made

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    async def ask(self, request: bytes) -> Answer:
        """Raises ConnectionResetError when the server closes before its answer is whole."""
        self._answered = asyncio.get_running_loop().create_future()
        self._begin = time.perf_counter()
        self._transport.write(request)
        return await self._answered

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, found, rest = self._received.partition(b"\r\n\r\n")
        if not found or self._answered is None:
            return
        status, length = int(head[9:12]), _LENGTH.search(head)
        size = int(length[1]) if length and status not in _NO_BODY else 0
        if len(rest) >= size:
            self._received = rest[size:]
            self._answered.set_result(Answer(status, head, rest[:size], time.perf_counter() - self._begin))

    def connection_lost(self, error: Exception | None) -> None:
        if self._answered is not None and not self._answered.done():
            self._answered.set_exception(ConnectionResetError("the server closed the connection"))

    def close(self) -> None:
        self._transport.close()


async def keep_asking(
    host: str, port: int, clients: int, following: Callable[[], bytes | None]
) -> tuple[list[Answer], float]:
    """Every client asks what `following` gives it next, until that is None. All answers, and the seconds it took."""
    answers: list[Answer] = []
    connections = [await Connection.open(host, port) for _ in range(clients)]

    async def client(connection: Connection) -> None:
        while (request := following()) is not None:
            answers.append(await connection.ask(request))

    begin = time.perf_counter()
    await asyncio.gather(*map(client, connections))
    seconds = time.perf_counter() - begin
    for connection in connections:
        connection.close()
    return answers, seconds


def exchange(host: str, port: int, request: bytes, timeout_s: float = 10.0) -> bytes:
    """All that comes back on a connection of its own until the server closes it: ask it to, with `Connection: close`.

    For requests that no library would send.
    """
    parts = []
    refused = contextlib.suppress(ConnectionResetError, BrokenPipeError)  # before it was all sent
    with socket.create_connection((host, port), timeout_s) as connection, refused:
        connection.sendall(request)
        while part := connection.recv(2**16):
            parts.append(part)
    return b"".join(parts)


def status_of(answer: bytes) -> int:
    """0 for none."""
    return int(answer[9:12]) if answer.startswith(b"HTTP/1.1 ") else 0
