"""Uploads that are endless, slow or bombs in; what a server that lives through them answers and holds meanwhile out.

While each kind of attacker goes on, from processes of its own, /healthz is asked over and over, on a new connection
each time, as a load balancer does.
"""

import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from benchmarks.attack_archives import complain
from benchmarks.connections import exchange, status_of
from benchmarks.machine import processor_s
from benchmarks.results_file import Figure
from benchmarks.serving import KITSUNE, Serving, serving
from benchmarks.upload_attackers import ATTACKERS

#: Open files that the server may have, as most systems allow.
FILES: Final = 1024
BETWEEN_S: Final = 0.01
#: Asked for so long after the attackers are gone as well: what they leave behind must not stay.
AFTER_S: Final = 1.0
SETTLE_S: Final = 20.0


class Samples(NamedTuple):
    """All that was measured, in the order in which it was."""

    case: str
    unit: str
    values: list[float]


@dataclass
class Watch:
    """What is seen of a server while something happens to it."""

    health_s: list[float] = field(default_factory=list)
    unhealthy: list[str] = field(default_factory=list)
    rss_bytes: int = 0
    spooled_bytes: int = 0


def attacked(
    folder: Path, seconds: float, kinds: Iterable[str] | None = None, share: float = 1.0
) -> Iterator[Figure | Samples]:
    """Each kind of attacker for so long, with this share of its connections."""
    few = ("prlimit", f"--nofile={FILES}:{FILES}", KITSUNE)
    with serving(folder, f"sqlite:///{folder}/uploads.db", few) as server:
        rest = watched(server, 1.0)
        yield "uploads: memory at rest", rest.rss_bytes / 2**20, "MiB", 1
        peaks, heard = [rest.rss_bytes], Counter[str]()
        for attacker, connections in ATTACKERS.items():
            if kinds is not None and attacker.__name__ not in kinds:
                continue
            number = max(1, round(connections * share))
            settle(server)
            seen, told = under(server, attacker.__name__, number, seconds)
            peaks.append(seen.rss_bytes)
            heard.update(told["answers"])
            yield from figures(attacker.__name__, number, seen, told)
            health_ms = [round(second * 1e3, 2) for second in seen.health_s]
            yield Samples(f"uploads, {attacker.__name__}: health", "ms", health_ms)
        yield "uploads: memory at most", max(peaks) / 2**20, "MiB", len(peaks)
        yield "uploads: answers of 500", heard["500"], "answers", heard.total()
        yield "uploads: servers lost", int(server.process.poll() is not None), "servers", 1
        said = server.log.read_text()
        yield "uploads: tracebacks", said.count("Traceback"), "lines", 1
        if "Traceback" in said:
            complain([said[said.index("Traceback") - 300 :]])


def under(server: Serving, name: str, connections: int, seconds: float) -> tuple[Watch, dict[str, object]]:
    words = [name, server.host, str(server.port), server.token, str(connections), str(seconds)]
    attackers = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.upload_attackers", *words], stdout=subprocess.PIPE, text=True
    )
    seen = watched(server, seconds + AFTER_S)
    told, _ = attackers.communicate()
    return seen, json.loads(told)


def settle(server: Serving) -> None:
    """Until the server has nothing left to do of what came before, but not for long."""
    end, used = time.monotonic() + SETTLE_S, processor_s(server.process.pid)
    while time.monotonic() < end:
        time.sleep(0.5)
        before, used = used, processor_s(server.process.pid)
        if used - before < 0.05:
            return


def watched(server: Serving, seconds: float) -> Watch:
    """Asks for its health, one request after the other, for so long."""
    seen, end = Watch(), time.monotonic() + seconds
    ended = threading.Event()
    looking = threading.Thread(target=look, args=(server, seen, ended))
    looking.start()
    while time.monotonic() < end:
        begin = time.perf_counter()
        try:
            answer = exchange(server.host, server.port, _health(server))
        except OSError as error:
            answer = str(error).encode()
        seen.health_s.append(time.perf_counter() - begin)
        if status_of(answer) != 200:
            seen.unhealthy.append(f"health: {answer[:200]!r}")
        time.sleep(BETWEEN_S)
    ended.set()
    looking.join()
    return seen


def look(server: Serving, seen: Watch, ended: threading.Event) -> None:
    """Notes the most memory that the process has, and the most that lies in files which only it can see."""
    while not ended.wait(0.1):
        seen.rss_bytes = max(seen.rss_bytes, rss_bytes(server.process.pid))
        seen.spooled_bytes = max(seen.spooled_bytes, spooled_bytes(server.process.pid))


def rss_bytes(process: int) -> int:
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def spooled_bytes(process: int) -> int:
    """Of files that are open and have no name."""
    size = 0
    for descriptor in Path(f"/proc/{process}/fd").iterdir():
        try:
            found = descriptor.stat()
        except OSError:  # closed meanwhile
            continue
        size += found.st_size if found.st_nlink == 0 else 0
    return size


def figures(name: str, connections: int, seen: Watch, told: dict[str, object]) -> Iterator[Figure]:
    complain(seen.unhealthy)
    times = sorted(second * 1e3 for second in seen.health_s)
    count = len(times)
    case = f"uploads, {name}"
    yield f"{case}: connections at once", connections, "connections", connections
    for what in ("connections", "sent_bytes"):
        yield f"{case}: {what}", float(str(told[what])), "bytes" if what == "sent_bytes" else what, connections
    answers = told["answers"]
    assert isinstance(answers, dict)
    for status, number in sorted(answers.items()):
        yield f"{case}: answers {status}", number, "answers", connections
    yield f"{case}: health p50", statistics.median(times), "ms", count
    yield f"{case}: health p99", times[min(count - 1, count * 99 // 100)], "ms", count
    yield f"{case}: health slowest", times[-1], "ms", count
    yield f"{case}: health not told", len(seen.unhealthy), "answers", count
    yield f"{case}: memory", seen.rss_bytes / 2**20, "MiB", 1
    yield f"{case}: spooled to disk", seen.spooled_bytes / 2**20, "MiB", 1


def _health(server: Serving) -> bytes:
    return f"GET /healthz HTTP/1.1\r\nHost: {server.host}:{server.port}\r\nConnection: close\r\n\r\n".encode()
