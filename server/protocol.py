"""Bytes of a connection in, requests or a refusal out: uvicorn's fast parser, with the bounds that it lacks.

It would keep any number of bytes of a head, of trailers or of the framing of chunks, and wait for them for ever; and it
would take trailers for headers. What is not HTTP at all is refused here, as a problem like every other error.
"""

import asyncio
from http import HTTPStatus
from typing import Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from server.problems import refusal

#: A head arrives within it, as long as the connection is open.
HEAD_S: Final = 10.0
#: Bytes of a request that are not its body: head, framing of chunks, trailers. What came in one read with the first
#: byte of the request (256 KiB at most) is not counted, and every byte of body lets one more pass.
MAX_AROUND: Final = 64 * 2**10


class BoundedProtocol(HttpToolsProtocol):
    """One connection."""

    _around = 0
    _is_in_head = True
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()

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
                self.transport.close()

    def on_message_begin(self) -> None:
        self._around = 0
        self._is_in_head = True
        if self._timer is None:
            self._expect_head()
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Trailers are left out: what comes after the body may not say who asks, nor whom (RFC 9110 §6.5.1)."""
        if self._is_in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._expect_nothing()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
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
        """The last that this connection hears."""
        self._expect_nothing()
        answer = refusal(status, detail, {"connection": "close"})
        head = b"".join(name + b": " + value + b"\r\n" for name, value in answer.raw_headers)
        line = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n".encode()
        self.transport.write(line + head + b"\r\n" + bytes(answer.body))
        self.transport.close()
