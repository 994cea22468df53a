"""Runs in, worker after worker killed while it carries them out; then others drain the queue.

All workers share one KITSUNE_HOME, as those of one machine do, so what a dead one has half written there is met too.
"""

import os
import random
import signal
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Final

from sqlalchemy import select

from benchmarks.audit import unfinished
from kitsune.submission.format.archive import Archive
from tests.e2e.command import Command
from tests.processes import children, is_gone
from tuner.records import RunStatus
from tuner.statistics.process_statistics import PROCESSES
from tuner.store import tables
from tuner.store.database import Database
from tuner.store.queries import archives
from tuner.store.queries.submits import Request, submit

POLL_S: Final = 0.005
PATIENCE_S: Final = 150.0
DRAIN_S: Final = 900.0

#: What a worker says when a part of a run begins; the last that it has said tells where it was.
STAGES: Final = {
    "worker ": "claim",
    ": archive on ": "inspection",
    "as given: ": "trial",
    " against each other": "playoff",
    "measuring the best afresh": "confirm",
    " has finished: ": "between runs",
    " has failed: ": "between runs",
}
CONFIRMED: Final = "[confirm] "  # said once for each process
#: Kills are aimed: from a word of the worker on that it has said so often, within so many seconds by chance.
AIMS: Final = (
    ("worker ", 1, 0.08),
    (": archive on ", 1, 4.0),
    ("as given: ", 1, 20.0),
    ("measuring the best afresh", 1, 6.0),
    (CONFIRMED, PROCESSES, 0.08),
)


@dataclass(frozen=True, slots=True)
class Kill:
    """A worker that was alive and was killed. `run` is the one that it held; None when it held none."""

    stage: str
    run: str | None


@dataclass(slots=True)
class Victim:
    """A worker that will be killed, `within_s` after it has said `word` so many `times`."""

    command: Command
    word: str
    times: int
    within_s: float
    patience_ends: float
    due: float | None = None

    def is_due(self) -> bool:
        now = time.monotonic()
        if self.due is None and (said(self.command).count(self.word) >= self.times or now > self.patience_ends):
            self.due = now + random.uniform(0, self.within_s)
        return self.due is not None and now >= self.due


@dataclass(slots=True)
class Campaign:
    """`seats` workers at a time on one database, each killed in its turn."""

    folder: Path
    url: str
    database: Database
    archive: Archive
    trials: int
    lease: str
    seats: int
    acknowledged: list[str] = field(default_factory=list)
    kills: list[Kill] = field(default_factory=list)
    hired: list[Command] = field(default_factory=list)
    children: set[int] = field(default_factory=set)

    @property
    def hits(self) -> list[Kill]:
        return [kill for kill in self.kills if kill.run is not None]

    def kill(self, number: int, seconds: float) -> None:
        """Until so many kills have hit a worker that held a run, or the time is over."""
        aims, end = shuffled(AIMS), time.monotonic() + seconds
        victims: list[Victim] = []
        while len(self.hits) < number and time.monotonic() < end:
            while len(victims) < min(self.seats, number - len(self.hits)):
                victims.append(self._victim(*next(aims)))
            for victim in [victim for victim in victims if victim.is_due()]:
                victims.remove(victim)
                self.kills.append(self._killed(victim.command))
            time.sleep(POLL_S)
        for victim in victims:  # when the time is over
            self.kills.append(self._killed(victim.command))

    def submit(self, number: int) -> None:
        for _ in range(number):
            with self.database.begin() as connection:
                stored, _ = archives.put(connection, self.archive.to_bytes(), self.archive)
                asked = Request(archive=stored.sha256, trials=self.trials, seed=len(self.acknowledged))
                run, is_new = submit(connection, asked, owner="reliability")
            assert is_new
            self.acknowledged.append(run.id)

    def drain(self) -> None:
        """By workers that nobody kills, and that leave well when they are asked to."""
        workers = [self._hire() for _ in range(self.seats)]
        end = time.monotonic() + DRAIN_S
        while unfinished(self.database):
            assert time.monotonic() < end, "the queue does not empty"
            assert all(worker.process.poll() is None for worker in workers), "a worker has ended by itself"
            time.sleep(0.2)
        for worker in workers:
            worker.process.terminate()
        assert {worker.wait()[0] for worker in workers} == {0}

    def close(self) -> None:
        for command in self.hired:
            command.close()

    def survivors(self) -> set[int]:
        """Measuring processes that have outlived the workers that started them."""
        return {child for child in self.children if not is_gone(child, 0.1) and is_ours(child)}

    def _victim(self, word: str, times: int, within_s: float) -> Victim:
        if unfinished(self.database) <= self.seats:
            self.submit(1)
        return Victim(self._hire(), word, times, within_s, time.monotonic() + PATIENCE_S)

    def _hire(self) -> Command:
        """Its temporary files are in our folder, since nobody clears away those of the dead."""
        temporary = self.folder / "tmp"
        temporary.mkdir(parents=True, exist_ok=True)
        command = Command(
            self.folder / f"worker{len(self.hired)}",
            *("worker", "--device", "cpu", "--lease", self.lease, "--database", self.url),
            KITSUNE_HOME=str(self.folder / "home"),
            TMPDIR=str(temporary),
        )
        self.hired.append(command)
        return command

    def _killed(self, command: Command) -> Kill:
        """Asserts that it was alive, and that this kill was its end."""
        assert command.process.poll() is None, f"a worker ended by itself: {said(command)}"
        self.children |= children(command.process.pid)
        os.kill(command.process.pid, signal.SIGKILL)
        assert command.process.wait(10) == -signal.SIGKILL
        return Kill(stage_of(command), self._held_by(command))

    def _held_by(self, command: Command) -> str | None:
        """The run that is stored as its own: nobody can have taken it over, the lease has not ended yet."""
        run = tables.runs.c
        name = said(command).partition("worker ")[2].partition(" on ")[0]
        with self.database.read() as connection:
            return connection.scalar(select(run.id).where(run.status == RunStatus.RUNNING, run.worker == name))


def shuffled(aims: Iterable[tuple[str, int, float]]) -> Iterator[tuple[str, int, float]]:
    """Each as often as the others, in an order by chance."""
    return cycle(random.sample([*aims] * 8, k=8 * len([*aims])))


def said(command: Command) -> str:
    return command.err.read_text("utf-8", errors="replace")


def stage_of(command: Command) -> str:
    """Where it was, by the last that it said of the run that it held last."""
    lines = said(command).splitlines()
    for line in reversed(lines):
        if line.startswith(CONFIRMED):
            return "finish" if _confirmed(lines) == PROCESSES else "confirm"
        for word, stage in STAGES.items():
            if word in line:
                return stage
        if line.startswith("["):
            return "playoff" if line.startswith("[playoff]") else "trial"
    return "start"


def _confirmed(lines: Iterable[str]) -> int:
    """Processes of the last confirmation."""
    confirmed = 0
    for line in lines:
        confirmed = 0 if "measuring the best afresh" in line else confirmed + line.startswith(CONFIRMED)
    return confirmed


def is_ours(process: int) -> bool:
    try:
        return b"tuner.child.main" in Path(f"/proc/{process}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False
