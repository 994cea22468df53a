"""Hostile archives in, by hand and by chance; what they did to a server and to processes that read them out.

Each is read by a process of its own and sent to a real server, both under an audit hook: after the first valid archive
neither has a reason to compile, execute, import or open anything. What runs the code in an archive touches a file.
"""

import asyncio
import hashlib
import itertools
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Final

from sqlalchemy import select

from benchmarks.archive_mutations import mutated
from benchmarks.archive_reader import Outcome, frame
from benchmarks.connections import Answer, Connection
from benchmarks.load import request
from benchmarks.results_file import Figure
from benchmarks.serving import Serving, serving
from benchmarks.watched import events_since
from kitsune.submission.format.archive import Archive
from tests.unit.kitsune.submission.hostile_archives import CANARY, GOOD, HOSTILE, large
from tuner.store import tables
from tuner.store.engine import open_database

WATCHED: Final = (sys.executable, "-m", "benchmarks.watched")
Named = tuple[str, bytes]


class Reader:
    """A process that reads archives under an audit hook; another one takes its place when it is lost."""

    def __init__(self, events: Path, *words: str) -> None:
        self.events = events
        self.words = words
        self.lost = 0
        self.heard: list[str] = []
        self._start()

    def _start(self) -> None:
        called = "benchmarks.archive_reader:main"
        self._process = subprocess.Popen(
            [*WATCHED, self.events, called, *self.words], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._ask(GOOD)
        self._warm = self.events.stat().st_size

    def _ask(self, data: bytes) -> str:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(frame(data))
        self._process.stdin.flush()
        return self._process.stdout.readline().decode()

    def read(self, data: bytes) -> Outcome:
        told = self._ask(data)
        if told:
            return Outcome(**json.loads(told))
        self.close()
        self.lost += 1
        self._start()
        return Outcome(0.0, fault=f"the reading process ended with {self._process.returncode}")

    def close(self) -> None:
        """Notes the events since the process was warm."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()
        self.heard += events_since(self.events, self._warm)


@dataclass
class Found:
    """What became of the archives. Every list holds faults, in words."""

    kinds: Counter[tuple[str, bool]] = field(default_factory=Counter)  #: how many of a kind were accepted, or not
    accepted: set[str] = field(default_factory=set)  #: the SHA-256 of what is to be kept
    statuses: Counter[int] = field(default_factory=Counter)
    read_s: list[float] = field(default_factory=list)
    answer_s: list[float] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    disagreements: list[str] = field(default_factory=list)
    heard: list[str] = field(default_factory=list)
    altered: list[str] = field(default_factory=list)
    readers_lost: int = 0
    servers_lost: int = 0
    canaries: int = 0


def attacked(folder: Path, bases: Iterable[Archive], fuzzed: int, seed: int) -> Iterator[Figure]:
    """Figures of all that were made by hand, of the largest valid ones, and of so many that chance made of others."""
    by_hand = [("by hand", data) for data, _ in HOSTILE.values()]
    yield from figures("by hand", sent(folder, "by_hand", by_hand))
    yield from figures("at the limits", sent(folder, "at_the_limits", large().items()))
    whole = tuple(archive.to_bytes() for archive in bases)
    yield from figures("fuzzed", sent(folder, "fuzzed", chosen(whole, fuzzed, seed)))
    yield from rebuilt(folder, chosen(whole, fuzzed, seed))


def chosen(bases: tuple[bytes, ...], number: int, seed: int) -> Iterator[Named]:
    return itertools.islice(mutated(bases, Random(seed)), number)


def sent(folder: Path, name: str, archives: Iterable[Named]) -> Found:
    home = folder / name
    home.mkdir()
    events = home / "events"
    with serving(home, f"sqlite:///{home}/archives.db", (*WATCHED, str(events), "kitsune.__main__:main")) as server:
        found = asyncio.run(_sent(server, events, Reader(home / "reader-events"), archives))
        found.servers_lost = int(server.process.poll() is not None)
        found.altered = altered(server.database, found.accepted)
    return found


async def _sent(server: Serving, events: Path, reader: Reader, archives: Iterable[Named]) -> Found:
    found = Found()
    connection = await Connection.open(server.host, server.port)
    for warming in (GOOD, HOSTILE["a large graph"][0], GOOD):
        await connection.ask(put(server, warming))
    warm = events.stat().st_size
    for kind, data in archives:
        outcome = reader.read(data)
        try:
            answer = await connection.ask(put(server, data))
        except ConnectionResetError:
            answer = Answer(0, b"", b"", 0.0)
        if answer.status == 0 or b"\r\nconnection: close" in answer.head:
            connection.close()
            connection = await Connection.open(server.host, server.port)
        note(found, kind, outcome, answer)
    connection.close()
    reader.close()
    found.heard = [*reader.heard, *events_since(events, warm)]
    found.readers_lost = reader.lost
    return found


def put(server: Serving, data: bytes) -> bytes:
    return request(server, f"PUT /api/v1/archives/{hashlib.sha256(data).hexdigest()}", data)


def note(found: Found, kind: str, outcome: Outcome, answer: Answer) -> None:
    is_accepted = answer.status in (200, 201)
    found.kinds[kind, is_accepted] += 1
    found.statuses[answer.status] += 1
    found.read_s.append(outcome.seconds)
    found.answer_s.append(answer.seconds)
    found.canaries += CANARY.exists()
    CANARY.unlink(missing_ok=True)
    if outcome.fault:
        found.faults.append(outcome.fault)
    kept = json.loads(answer.body)["sha256"] if is_accepted else None
    if kept != outcome.kept or answer.status not in (200, 201, 413, 422):
        found.disagreements.append(f"{kind}: read as {outcome.kept}, answered {answer.status} with {kept}")
    if kept is not None:
        found.accepted.add(kept)


def altered(database: str, accepted: set[str]) -> list[str]:
    """Those of the archives that are kept otherwise than as valid ones that were accepted."""
    stored, archives = tables.archives.c, []
    with open_database(database) as opened, opened.read() as connection:
        archives = [(row.sha256, row.content) for row in connection.execute(select(stored.sha256, stored.content))]
    names = {name for name, _ in archives} | {hashlib.sha256(GOOD).hexdigest()}
    wrong = [
        name
        for name, content in archives
        if hashlib.sha256(content).hexdigest() != name or Archive.from_bytes(content).to_bytes() != content
    ]
    return [*wrong, *(names ^ (accepted | {hashlib.sha256(GOOD).hexdigest()}))]


def rebuilt(folder: Path, archives: Iterable[Named]) -> Iterator[Figure]:
    """What a measuring process makes of those that are accepted. torch compiles and loads: only the canary is told."""
    reader, outcomes = Reader(folder / "rebuild-events", "rebuild"), []
    for _, data in archives:
        outcomes.append(reader.read(data))
    reader.close()
    accepted = [outcome for outcome in outcomes if outcome.kept is not None]
    yield "fuzzed: accepted archives rebuilt", sum(one.is_rebuilt for one in accepted), "archives", len(accepted)
    faults = [one.fault for one in outcomes if one.fault]
    complain(faults)
    yield "fuzzed: rebuilding gone wrong", len(faults) + reader.lost + CANARY.exists(), "archives", len(accepted)


def figures(case: str, found: Found) -> Iterator[Figure]:
    complain([*found.faults, *found.disagreements, *found.heard, *found.altered])
    count = found.statuses.total()
    for kind, accepted in sorted(found.kinds):
        yield f"{case}: {kind} {'accepted' if accepted else 'refused'}", found.kinds[kind, accepted], "archives", count
    wrong = {
        "code run": found.canaries + len(found.heard),
        "answers of 5xx": sum(number for status, number in found.statuses.items() if status >= 500),
        "servers lost": found.servers_lost,
        "reading processes lost": found.readers_lost,
        "reading gone wrong": len(found.faults),
        "answers unlike the reading": len(found.disagreements),
        "kept otherwise than accepted": len(found.altered),
    }
    for name, number in wrong.items():
        yield f"{case}: {name}", number, "archives", count
    yield f"{case}: slowest reading", max(found.read_s), "s", count
    yield f"{case}: slowest answer", max(found.answer_s), "s", count


def complain(faults: Iterable[str]) -> None:
    for fault in faults:
        print(fault[:500], file=sys.stderr)
