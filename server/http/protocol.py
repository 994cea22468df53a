"""Bytes of a connection in, requests or a refusal out: uvicorn's fast parser, with the bounds that it lacks.

It would keep any number of bytes of a head, of trailers or of the framing of chunks, and wait for them for ever; it
would hold any number of requests and of connections, until the process may open no file more; and it would take
trailers for headers. What is not HTTP at all is refused here, as a problem like every other error.
"""

import asyncio
import resource
from http import HTTPStatus
from typing import Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from server.payloads.problems import refusal

#: A head arrives within it, as long as the connection is open.
HEAD_S: Final = 10.0
#: Bytes of a request that are not its body: head, framing of chunks, trailers. What came in one read with the first
#: byte of the request (256 KiB at most) is not counted, and every byte of body lets one more pass.
MAX_AROUND: Final = 64 * 2**10
#: What chunks lack of so many bytes is summed up, to no more than MAX_AROUND. A small one takes as long as a large one:
#: 43 000 of one byte, which came in one read, took 40 ms; from 16 connections, over and over, nobody else was answered.
SMALL_CHUNK: Final = 64
#: Requests of a connection that wait for their answers. 5 000 came in one read, and took 3.5 MB.
MAX_PIPELINED: Final = 8
#: Connections at once, of 6 kB each while they say nothing.
MAX_CONNECTIONS: Final = 2000
#: Beside them the database and a few answers have files open.
_SPARE_FILES: Final = 100


class BoundedProtocol(HttpToolsProtocol):
    """One connection."""

    _around = 0
    _lacking = 0
    _is_in_head = True
    _since = 0.0
    _timer: asyncio.TimerHandle | None = None
    _unanswered: tuple[RequestResponseCycle, ...] = ()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._since = self.loop.time()
        self._expect_head()
        most = most_connections()
        if len(self.connections) > most:
            self._make_room(most // 10)

    def _make_room(self, number: int) -> None:
        """Closes so many connections, those that we wait for longest. Those that wait for us stay.

        Many at once: to look for one each time took as long as all else that a new connection needs.
        """
        waited_for = [one for one in self.connections if isinstance(one, BoundedProtocol) and one._is_waited_for()]
        for one in sorted(waited_for, key=lambda one: one._since)[: max(1, number)]:
            one._drop()

    def _is_waited_for(self) -> bool:
        """Whether the client is to send something: a request, or the rest of one."""
        return self.cycle is None or self.cycle.response_complete or self.cycle.more_body

    def _drop(self) -> None:
        self._answer_no_more()
        self.transport.abort()

    def _answer_no_more(self) -> None:
        """Tells all requests that are still being answered, or they would write into nothing, and say so in the log."""
        for cycle in self._unanswered:
            cycle.disconnected = True
            cycle.message_event.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._expect_nothing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._around += len(data)
        super().data_received(data)
        if self._around > MAX_AROUND and not self.transport.is_closing():
            if self._is_in_head:
                self._refuse(431, f"the head of a request may have {MAX_AROUND} bytes")
            else:
                self._drop()

    def on_message_begin(self) -> None:
        self._around, self._lacking, self._since = 0, 0, self.loop.time()
        self._is_in_head = True
        if self._timer is None:
            self._expect_head()
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Trailers are left out: what comes after the body may not say who asks, nor whom (RFC 9110 §6.5.1)."""
        if self._is_in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Raises ValueError, as `on_chunk_header` does."""
        self._is_in_head = False
        self._expect_nothing()
        super().on_headers_complete()
        self._unanswered = (*(cycle for cycle in self._unanswered if not cycle.response_complete), self.cycle)
        if len(self._unanswered) > MAX_PIPELINED:
            raise ValueError("more requests than answers were waited for")

    def on_chunk_header(self) -> None:
        """Raises ValueError, which ends the reading of what has arrived, and the connection."""
        self._lacking += SMALL_CHUNK
        if self._lacking > MAX_AROUND:
            raise ValueError("the chunks are too small")

    def on_body(self, body: bytes) -> None:
        self._lacking = max(self._lacking - len(body), 0)
        self._around = max(self._around - 2 * len(body), -MAX_AROUND)
        super().on_body(body)

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "this is not HTTP/1.1 as this server understands it")

    def _unsupported_upgrade_warning(self) -> None:
        """No line of the log, since any client may ask: the request is answered as if it had not."""

    def _expect_head(self) -> None:
        self._timer = self.loop.call_later(HEAD_S, self._refuse, 408, f"no request arrived within {HEAD_S:g} s")

    def _expect_nothing(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _refuse(self, status: int, detail: str) -> None:
        """The last that this connection hears. Within an answer it would be taken for a part of it."""
        self._expect_nothing()
        self._answer_no_more()
        if any(cycle.response_started for cycle in self._unanswered if not cycle.response_complete):
            self.transport.abort()
            return
        answer = refusal(status, detail, {"connection": "close"})
        head = b"".join(name + b": " + value + b"\r\n" for name, value in answer.raw_headers)
        line = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n".encode()
        self.transport.write(line + head + b"\r\n" + bytes(answer.body))
        self.transport.close()


def most_connections() -> int:
    """Fewer where the process may not open so many files: an upload takes one more."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CONNECTIONS if files == resource.RLIM_INFINITY else min(MAX_CONNECTIONS, (files - _SPARE_FILES) // 2)


def open_more_files() -> None:
    """As many as all connections need, where the system lets us: most let a process have 1024, unless it asks."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 2 * MAX_CONNECTIONS + _SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        most = needed if hard == resource.RLIM_INFINITY else min(hard, needed)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
