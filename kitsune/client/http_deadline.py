"""HTTP requests with a total deadline. Does not import torch.

The timeouts of HTTP libraries hold for each read, so a server that sends slowly never exceeds one, and DNS lookup has
no timeout at all. So a request runs in its own thread, whose socket is shut down at the deadline.
"""

import contextlib
import queue
import socket
import threading
import time
from dataclasses import dataclass
from typing import Any, Final

import httpx

from kitsune.errors import UnreachableError

#: What httpx and its dependencies raise. ValueError: a host name that IDNA refuses, or a socket closed under TLS.
#: ImportError: a proxy that needs a package, such as SOCKS.
_FAILURES: Final = (httpx.HTTPError, httpx.StreamError, httpx.InvalidURL, OSError, ValueError, ImportError)


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """An HTTP request. `limit`: the most bytes of the response's body."""

    method: str
    url: str
    query: dict[str, str]
    headers: dict[str, str]
    content: bytes | None
    limit: int


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """An HTTP response: status, the headers in use, and a body within the limit."""

    status: int
    media_type: str
    location: str
    body: bytes


def exchange(question: HttpRequest, within_s: float, *, direct: bool = False) -> HttpResponse:
    """Sends a request and returns the response; redirects are not followed. `direct`: ignores proxy settings.

    Raises UnreachableError when there is no complete response within `within_s` seconds, or it exceeds the limit.
    """
    if within_s <= 0:
        raise UnreachableError("there was no time left to ask")
    attempt = _Attempt(question, time.monotonic() + within_s, direct)
    thread = threading.Thread(target=attempt.run, name="kitsune-exchange", daemon=True)
    thread.start()
    try:
        outcome = attempt.outcome.get(timeout=within_s)
    except queue.Empty:
        attempt.cut()
        raise UnreachableError(_timeout_message(within_s)) from None
    if isinstance(outcome, HttpResponse):
        return outcome
    if attempt.is_cut or isinstance(outcome, httpx.TimeoutException):
        raise UnreachableError(_timeout_message(within_s)) from outcome
    if _is_refused(outcome):
        raise UnreachableError(_refused_message(question.url, attempt.peer)) from outcome
    raise UnreachableError(str(outcome) or type(outcome).__name__) from outcome


def _timeout_message(within_s: float) -> str:
    return f"no whole answer came within {within_s:.1f} s"


def _is_refused(error: BaseException | None) -> bool:
    """Whether the connection was refused; httpx raises the same error for all connection failures."""
    while error is not None and not isinstance(error, ConnectionRefusedError):
        error = error.__cause__ or error.__context__
    return error is not None


def _refused_message(url: str, peer: str) -> str:
    if peer and peer != httpx.URL(url).raw_host.decode("ascii"):
        return f"the proxy {peer} refused the connection; check the variables HTTP_PROXY, HTTPS_PROXY and ALL_PROXY"
    return (
        "no server listens there, the connection was refused; start one with kitsune serve, or name another one with "
        "--server or KITSUNE_SERVER"
    )


class _Attempt:
    """A request in progress in its thread, with the socket to shut down at the deadline and the host of its peer."""

    def __init__(self, question: HttpRequest, ends_at: float, direct: bool) -> None:
        self.outcome: queue.SimpleQueue[HttpResponse | BaseException] = queue.SimpleQueue()
        self.peer = ""
        self.is_cut = False
        self._question = question
        self._ends_at = ends_at
        self._direct = direct
        self._socket: socket.socket | None = None

    def run(self) -> None:
        try:
            self.outcome.put(self._answer())
        except (UnreachableError, *_FAILURES) as error:
            self.outcome.put(error)
        except BaseException as error:  # unexpected: reported at once, not at the deadline
            self.outcome.put(error)
            raise

    def cut(self) -> None:
        """Shuts the socket down, which ends any read or write of the thread."""
        self.is_cut = True
        if self._socket is not None:
            with contextlib.suppress(OSError):  # it is closed already
                # As a plain socket: SSLSocket.shutdown would remove the TLS layer while the thread reads.
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def _answer(self) -> HttpResponse:
        question = self._question
        left_s = max(0.001, self._ends_at - time.monotonic())
        # Building a TLS context takes 30 ms, so it is skipped where TLS is not used.
        speaks_tls = not (self._direct and question.url.startswith("http:"))
        with httpx.Client(timeout=left_s, trust_env=not self._direct, verify=speaks_tls) as client:
            request = client.build_request(
                question.method,
                question.url,
                params=question.query or None,
                headers={**question.headers, "Accept-Encoding": "identity"},
                content=question.content,
                extensions={"trace": self._note_socket},
            )
            response = client.send(request, stream=True, follow_redirects=False)
            with contextlib.closing(response):
                return HttpResponse(
                    status=response.status_code,
                    media_type=response.headers.get("content-type", "").partition(";")[0].strip().lower(),
                    location=response.headers.get("location", ""),
                    body=self._body(response),
                )

    def _body(self, response: httpx.Response) -> bytes:
        """The raw body, without decompression."""
        body = bytearray()
        for chunk in response.iter_raw():
            body += chunk
            if len(body) > self._question.limit:
                raise UnreachableError(f"the answer is larger than {self._question.limit} bytes")
        return bytes(body)

    def _note_socket(self, event: str, info: dict[str, Any]) -> None:
        if event.endswith(".connect_tcp.started"):
            self.peer = info["host"]
        if event.endswith((".connect_tcp.complete", ".start_tls.complete")):
            self._socket = info["return_value"].get_extra_info("socket")
            if time.monotonic() >= self._ends_at:  # the deadline passed during the DNS lookup
                self.cut()
