"""uvicorn's HTTP/1.1 protocol with limits against resource exhaustion.

uvicorn limits neither the bytes of a head, of trailers or of chunk framing, nor the time to wait for them, nor the
number of pipelined requests and of connections; and it treats trailers as headers. Input that is not HTTP is answered
with a problem, as every other error is.
"""

import asyncio
import resource
from http import HTTPStatus
from typing import Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from server.payloads.problems import refusal

#: Time for the head of each request to arrive.
HEAD_S: Final = 10.0
#: Bytes of a request that are not its body: head, chunk framing, trailers. Bytes that came in the same read as the
#: first byte of the request (256 KiB at most) are not counted, and each byte of body allows one more.
MAX_OVERHEAD: Final = 64 * 2**10
#: Chunks should have this many bytes. What they lack is summed up, and the sum may not exceed MAX_OVERHEAD: a small
#: chunk takes as long as a large one. 43 000 of one byte in one read took 40 ms; 16 such connections blocked all
#: others.
SMALL_CHUNK: Final = 64
#: Pipelined requests of a connection that wait for their answers. 5 000 in one read took 3.5 MB.
MAX_PIPELINED: Final = 8
#: Open connections; an idle one takes 6 kB.
MAX_CONNECTIONS: Final = 2000
#: File descriptors reserved for the database and a few answers.
_SPARE_FILES: Final = 100


class BoundedProtocol(HttpToolsProtocol):
    """One connection, with the limits of this module."""

    _overhead = 0
    _shortfall = 0
    _is_in_head = True
    _since = 0.0
    _timer: asyncio.TimerHandle | None = None
    _unanswered: tuple[RequestResponseCycle, ...] = ()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._since = self.loop.time()
        self._start_timer()
        most = most_connections()
        if len(self.connections) > most:
            self._close_idle(most // 10)

    def _close_idle(self, number: int) -> None:
        """Closes `number` connections: those whose client has been silent longest. Those that we owe an answer stay.

        Closes many at once, because the search takes as long as all other work for a new connection.
        """
        idle = [one for one in self.connections if isinstance(one, BoundedProtocol) and one._is_idle()]
        for one in sorted(idle, key=lambda one: one._since)[: max(1, number)]:
            one._abort()

    def _is_idle(self) -> bool:
        """Whether it is the client's turn to send: a request, or the rest of one."""
        return self.cycle is None or self.cycle.response_complete or self.cycle.more_body

    def _abort(self) -> None:
        self._cancel_answers()
        self.transport.abort()

    def _cancel_answers(self) -> None:
        """Marks all unanswered requests as disconnected; otherwise their answers fail and fill the log."""
        for cycle in self._unanswered:
            cycle.disconnected = True
            cycle.message_event.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._overhead += len(data)
        super().data_received(data)
        if self._overhead > MAX_OVERHEAD and not self.transport.is_closing():
            if self._is_in_head:
                self._refuse(431, f"the head of a request may have {MAX_OVERHEAD} bytes")
            else:
                self._abort()

    def on_message_begin(self) -> None:
        self._overhead, self._shortfall, self._since = 0, 0, self.loop.time()
        self._is_in_head = True
        if self._timer is None:
            self._start_timer()
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Ignores trailers: they must not set authentication or routing fields (RFC 9110 §6.5.1)."""
        if self._is_in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Raises ValueError for too many pipelined requests, which ends the connection as in `on_chunk_header`."""
        self._is_in_head = False
        self._stop_timer()
        super().on_headers_complete()
        self._unanswered = (*(cycle for cycle in self._unanswered if not cycle.response_complete), self.cycle)
        if len(self._unanswered) > MAX_PIPELINED:
            raise ValueError("more requests than answers were waited for")

    def on_chunk_header(self) -> None:
        """Raises ValueError for too many small chunks, which stops the parser and closes the connection."""
        self._shortfall += SMALL_CHUNK
        if self._shortfall > MAX_OVERHEAD:
            raise ValueError("the chunks are too small")

    def on_body(self, body: bytes) -> None:
        self._shortfall = max(self._shortfall - len(body), 0)
        self._overhead = max(self._overhead - 2 * len(body), -MAX_OVERHEAD)
        super().on_body(body)

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "this is not HTTP/1.1 as this server understands it")

    def _unsupported_upgrade_warning(self) -> None:
        """Does not log: any client can ask for an upgrade. The request is answered as without it."""

    def _start_timer(self) -> None:
        self._timer = self.loop.call_later(HEAD_S, self._refuse, 408, f"no request arrived within {HEAD_S:g} s")

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _refuse(self, status: int, detail: str) -> None:
        """Answers with a problem and closes the connection; only closes it if an answer has already begun."""
        self._stop_timer()
        self._cancel_answers()
        if any(cycle.response_started for cycle in self._unanswered if not cycle.response_complete):
            self.transport.abort()
            return
        answer = refusal(status, detail, {"connection": "close"})
        head = b"".join(name + b": " + value + b"\r\n" for name, value in answer.raw_headers)
        line = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n".encode()
        self.transport.write(line + head + b"\r\n" + bytes(answer.body))
        self.transport.close()


def most_connections() -> int:
    """The limit on connections, lower if the process may open fewer files: an upload takes a second one."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CONNECTIONS if files == resource.RLIM_INFINITY else min(MAX_CONNECTIONS, (files - _SPARE_FILES) // 2)


def open_more_files() -> None:
    """Raises the soft limit on open files to what all connections need. It is often 1024 by default."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 2 * MAX_CONNECTIONS + _SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        most = needed if hard == resource.RLIM_INFINITY else min(hard, needed)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
