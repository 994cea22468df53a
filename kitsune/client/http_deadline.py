"""One HTTP request in, the whole answer out, or an UnreachableError by a deadline that nothing exceeds. No torch.

The time limits of HTTP libraries hold for each read, so a server that drips never hits one; the look-up of a name has
none at all. So an exchange runs in a thread of its own that is left behind, cut off, when its time is over.
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

#: What httpx and what it stands on raise; ValueError is a name that IDNA refuses, or a socket closed under TLS, and
#: ImportError a proxy that asks for a package, as SOCKS does.
_FAILURES: Final = (httpx.HTTPError, httpx.StreamError, httpx.InvalidURL, OSError, ValueError, ImportError)


@dataclass(frozen=True, slots=True)
class Question:
    """A request; `limit` is how many bytes of a body will be read."""

    method: str
    url: str
    query: dict[str, str]
    headers: dict[str, str]
    content: bytes | None
    limit: int


@dataclass(frozen=True, slots=True)
class Answer:
    """Status, the headers that matter, and a body within the limit."""

    status: int
    media_type: str
    location: str
    body: bytes


def exchange(question: Question, within_s: float, *, direct: bool = False) -> Answer:
    """Redirects are answers like any other. `direct`: through no proxy, whatever the environment says.

    Raises UnreachableError, after `within_s` at the latest.
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
        raise UnreachableError(_late(within_s)) from None
    if isinstance(outcome, Answer):
        return outcome
    if attempt.is_cut or isinstance(outcome, httpx.TimeoutException):
        raise UnreachableError(_late(within_s)) from outcome
    if _is_refused(outcome):
        raise UnreachableError(_nobody(question.url, attempt.peer)) from outcome
    raise UnreachableError(str(outcome) or type(outcome).__name__) from outcome


def _late(within_s: float) -> str:
    return f"no whole answer came within {within_s:.1f} s"


def _is_refused(error: BaseException | None) -> bool:
    """Whether nobody listens at the port; httpx tells of it as of every other trouble with a connection."""
    while error is not None and not isinstance(error, ConnectionRefusedError):
        error = error.__cause__ or error.__context__
    return error is not None


def _nobody(url: str, peer: str) -> str:
    if peer and peer != httpx.URL(url).raw_host.decode("ascii"):
        return f"the proxy {peer} refused the connection; look at the variables HTTP_PROXY, HTTPS_PROXY and ALL_PROXY"
    return (
        "no server listens there, the connection was refused; start one with kitsune serve, or name another one with "
        "--server or KITSUNE_SERVER"
    )


class _Attempt:
    """An exchange under way in its thread, the socket by which it can be cut off, and the host at its other end."""

    def __init__(self, question: Question, ends_at: float, direct: bool) -> None:
        self.outcome: queue.SimpleQueue[Answer | BaseException] = queue.SimpleQueue()
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
        except BaseException as error:  # nobody foresaw it: the caller must not wait for its deadline to hear of it
            self.outcome.put(error)
            raise

    def cut(self) -> None:
        """Wakes the thread wherever it reads or writes."""
        self.is_cut = True
        if self._socket is not None:
            with contextlib.suppress(OSError):  # it is closed already
                # as a plain socket: SSLSocket.shutdown would take TLS away from under the reader
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def _answer(self) -> Answer:
        question = self._question
        left_s = max(0.001, self._ends_at - time.monotonic())
        # Building a context for TLS takes 30 ms, for nothing where no TLS is spoken.
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
                return Answer(
                    status=response.status_code,
                    media_type=response.headers.get("content-type", "").partition(";")[0].strip().lower(),
                    location=response.headers.get("location", ""),
                    body=self._body(response),
                )

    def _body(self, response: httpx.Response) -> bytes:
        """As it came: nothing is unpacked."""
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
            if time.monotonic() >= self._ends_at:  # the time ended while a name was looked up
                self.cut()
