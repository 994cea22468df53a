"""Clients that mean harm: what they send, and how slowly, from many connections at once. A process of its own.

    python -m benchmarks.upload_attackers endless HOST PORT TOKEN CONNECTIONS SECONDS

Every connection that is lost, or answered, is opened again at once. What came of it all is a line of JSON.
"""

import asyncio
import hashlib
import json
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from benchmarks.connections import status_of
from tests.unit.kitsune.submission.hostile_archives import large

NAME: Final = "0" * 64
_BLOCK: Final = bytes(2**16)
Sent = AsyncIterator[bytes]


@dataclass
class Campaign:
    """What one process of attackers does and what it hears; the count of answers is by status, 0 for none."""

    host: str
    port: int
    token: str
    until: float
    connections: int = 0
    sent_bytes: int = 0
    answers: Counter[int] = field(default_factory=Counter)

    def head(self, line: str, *headers: str) -> bytes:
        told = (f"Host: {self.host}:{self.port}", f"Authorization: Bearer {self.token}", *headers)
        return "\r\n".join([f"{line} HTTP/1.1", *told, "", ""]).encode()

    async def attack(self, attacker: Callable[["Campaign"], Sent]) -> None:
        while time.monotonic() < self.until:
            try:
                await self._connect(attacker)
            except OSError:
                self.answers[0] += 1

    async def _connect(self, attacker: Callable[["Campaign"], Sent]) -> None:
        reader, writer = await asyncio.open_connection(self.host, self.port)
        self.connections += 1
        heard = asyncio.create_task(reader.read(64))
        try:
            async for part in attacker(self):
                if heard.done() or time.monotonic() > self.until:
                    break
                writer.write(part)
                self.sent_bytes += len(part)
                await writer.drain()
            left_s = max(0.0, self.until - time.monotonic())
            self.answers[status_of(await asyncio.wait_for(heard, left_s))] += 1
        except TimeoutError:
            self.answers[0] += 1
        finally:
            heard.cancel()
            writer.transport.abort()


def chunk(data: bytes, extension: bytes = b"") -> bytes:
    return b"%x%s\r\n%s\r\n" % (len(data), extension, data)


async def endless(us: Campaign) -> Sent:
    """An archive that never ends, as fast as it is taken."""
    yield us.head(f"PUT /api/v1/archives/{NAME}", "Transfer-Encoding: chunked")
    while True:
        yield chunk(_BLOCK)


async def endless_json(us: Campaign) -> Sent:
    yield us.head("POST /api/v1/runs", "Transfer-Encoding: chunked", "Content-Type: application/json")
    while True:
        yield chunk(b"[" * 2**14)


async def endless_form(us: Campaign) -> Sent:
    """A file in a form, sent to where everybody may sign in."""
    yield us.head("POST /login", "Transfer-Encoding: chunked", "Content-Type: multipart/form-data; boundary=b")
    yield chunk(b'--b\r\nContent-Disposition: form-data; name="archive"; filename="a"\r\n\r\n')
    while True:
        yield chunk(_BLOCK)


async def slow(us: Campaign) -> Sent:
    """A body of a byte every half second."""
    yield us.head(f"PUT /api/v1/archives/{NAME}", "Content-Length: 9999999")
    while True:
        await asyncio.sleep(0.5)
        yield b"P"


async def nothing(us: Campaign) -> Sent:
    """A body that was promised and never comes."""
    yield us.head(f"PUT /api/v1/archives/{NAME}", "Content-Length: 9999999")
    await asyncio.sleep(us.until - time.monotonic())


async def half(us: Campaign) -> Sent:
    """Almost a whole archive, and then nothing: all that a server can be made to hold."""
    yield us.head(f"PUT /api/v1/archives/{NAME}", f"Content-Length: {2**25}")
    for _ in range(2**9 - 1):
        yield _BLOCK
    await asyncio.sleep(us.until - time.monotonic())


async def chunk_bomb(us: Campaign) -> Sent:
    """Chunks of one byte with extensions, of which the framing is much larger than what it frames."""
    yield us.head(f"PUT /api/v1/archives/{NAME}", "Transfer-Encoding: chunked")
    while True:
        yield chunk(b"P", b";" + b"x" * 100) * 500


async def tiny_chunks(us: Campaign) -> Sent:
    yield us.head(f"PUT /api/v1/archives/{NAME}", "Transfer-Encoding: chunked")
    while True:
        yield chunk(b"P") * 2000


async def chunk_size(us: Campaign) -> Sent:
    """A chunk said to be larger than any, in digits that do not end."""
    yield us.head(f"PUT /api/v1/archives/{NAME}", "Transfer-Encoding: chunked")
    while True:
        yield b"f" * 4096


async def slow_head(_: Campaign) -> Sent:
    yield b"GET /api/v1/runs HTTP/1.1\r\n"
    while True:
        await asyncio.sleep(0.5)
        yield b"X-A: b\r\n"


async def endless_head(_: Campaign) -> Sent:
    yield b"GET /api/v1/runs HTTP/1.1\r\n"
    while True:
        yield b"X-A: " + b"b" * 8000 + b"\r\n"


async def many_headers(us: Campaign) -> Sent:
    yield us.head("GET /api/v1/runs", *(f"X-{number}: b" for number in range(4000)))


async def deep_json(us: Campaign) -> Sent:
    """Brackets, to which `json` answers with the depth of Python's stack."""
    body = b'{"archive":' + b"[" * 30_000 + b"]" * 30_000 + b"}"
    yield us.head("POST /api/v1/runs", "Content-Type: application/json", f"Content-Length: {len(body)}") + body


async def costly_archives(us: Campaign) -> Sent:
    """Valid archives that take the longest to check."""
    for name in ("nodes with arguments", "tensors", "lists"):
        data = _LARGE[name]
        place = f"PUT /api/v1/archives/{hashlib.sha256(data).hexdigest()}"
        yield us.head(place, f"Content-Length: {len(data)}") + data
        await asyncio.sleep(0.1)


async def pipelined(us: Campaign) -> Sent:
    """Requests without a pause for their answers, which nobody reads."""
    while True:
        yield f"GET /healthz HTTP/1.1\r\nHost: {us.host}\r\n\r\n".encode() * 2000


async def idle(us: Campaign) -> Sent:
    """A connection on which nothing is ever said."""
    await asyncio.sleep(us.until - time.monotonic())
    yield b""


async def hasty(_: Campaign) -> Sent:
    """Connections that are closed as soon as they are open."""
    yield b"G"
    raise ConnectionResetError


_LARGE: dict[str, bytes] = {}
#: How many connections each kind keeps open.
ATTACKERS: Final[Mapping[Callable[[Campaign], Sent], int]] = {
    endless: 16, endless_json: 16, endless_form: 16, slow: 200, nothing: 200, half: 64, chunk_bomb: 16,
    tiny_chunks: 16, chunk_size: 16, slow_head: 400, endless_head: 16, many_headers: 16, deep_json: 16,
    costly_archives: 8, pipelined: 200, idle: 2000, hasty: 32,
}  # fmt: skip


async def _run(us: Campaign, attacker: Callable[[Campaign], Sent], connections: int) -> None:
    await asyncio.gather(*(us.attack(attacker) for _ in range(connections)))


def main() -> None:
    name, host, port, token, connections, seconds = sys.argv[1:]
    attacker = next(one for one in ATTACKERS if one.__name__ == name)
    if attacker is costly_archives:
        _LARGE.update(large())
    us = Campaign(host, int(port), token, time.monotonic() + float(seconds))
    asyncio.run(_run(us, attacker, int(connections)))
    told = {str(status): number for status, number in us.answers.items()}
    print(json.dumps({"connections": us.connections, "sent_bytes": us.sent_bytes, "answers": told}))


if __name__ == "__main__":
    main()
