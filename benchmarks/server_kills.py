"""Clients that submit in, server after server killed beneath them; meanwhile workers without torch empty the queue.

A client whose answer was lost, or that finds no server, sends the same request with the same key until it is answered.
"""

import contextlib
import hashlib
import random
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Final

import httpx

from benchmarks.audit import unfinished
from kitsune.submission.format.archive import Archive
from tests.e2e.command import Command
from tests.unit.tuner.machine import Machine
from tuner.store.engine import open_database
from tuner.terminal.progress import Quiet
from tuner.tuning.run import Tuning
from tuner.worker.worker import Stop, Worker

READY: Final = "Kitsune serves on "
#: So many of the kills at most, within so many seconds, are of servers on an empty database: of migrations and tokens.
FRESH: Final = 8
FRESH_S: Final = 2.0
#: Later ones: so long after the server has said that it serves; this share so long after it was started.
SERVING_S: Final = 0.8
STARTING: Final = 0.2
START_S: Final = 1.5
#: A client submits again after so long at most.
BETWEEN_S: Final = 0.03
PATIENCE_S: Final = 60.0
DRAIN_S: Final = 300.0
GPU: Final = "a CPU"


@dataclass(frozen=True, slots=True)
class Loss:
    """A request that was begun on an open connection, and when that turned out to be broken."""

    began: float
    ended: float


@dataclass(slots=True)
class Journal:
    """What the clients know; each adds to it what only it knows. `acknowledged` is the run of each key."""

    acknowledged: dict[str, str] = field(default_factory=dict)
    losses: list[Loss] = field(default_factory=list)
    unheard: list[str] = field(default_factory=list)  #: keys whose run was stored, though its answer was lost
    wrong: list[str] = field(default_factory=list)  #: answers that are no acknowledgement


@dataclass(frozen=True, slots=True)
class Kill:
    """A server that was alive and was killed then, before or after it had said that it serves."""

    at: float
    was_serving: bool


@dataclass(slots=True)
class Campaign:
    """One server at a time on one port, its clients, and the workers that empty its queue."""

    folder: Path
    url: str
    archive: Archive
    trials: int
    clients: int
    port: int
    journal: Journal = field(default_factory=Journal)
    kills: list[Kill] = field(default_factory=list)
    served: list[Command] = field(default_factory=list)

    def kill(self, number: int) -> None:
        """Kills servers, then leaves one, by which every client hears what became of its last request."""
        for _ in range(min(FRESH, number // 4)):
            self._kill_within(self._serve(), FRESH_S)
        server = self._serve()
        server.wait_for(READY)
        self._send_archive()
        with self._working(), self._submitting():
            while len(self.kills) < number:
                if random.random() < STARTING:
                    self._kill_within(server, START_S)
                else:
                    server.wait_for(READY)
                    self._kill_within(server, SERVING_S)
                server = self._serve()
            server.wait_for(READY)

    def struck(self) -> Counter[Kill]:
        """The kills at which clients waited for answers, and how many; a request on a dead connection is none."""
        return Counter(kill for loss in self.journal.losses for kill in self.kills if loss.began < kill.at < loss.ended)

    def ask_again(self) -> list[str]:
        """Every key once more; what is not answered with the run that it was acknowledged with."""
        wrong = []
        with self._http() as http:
            for key, run_id in self.journal.acknowledged.items():
                answer = self._post(http, key)
                if answer.status_code != 200 or answer.json()["id"] != run_id:
                    wrong.append(f"{key} was run {run_id}, and is now {answer.status_code} {answer.text:.200}")
        return wrong

    def drain(self) -> None:
        end = time.monotonic() + DRAIN_S
        with open_database(self.url) as database, self._working():
            while unfinished(database):
                assert time.monotonic() < end, "the queue does not empty"
                time.sleep(0.2)

    def close(self) -> None:
        for command in self.served:
            command.close()

    def _serve(self) -> Command:
        command = Command(
            self.folder / f"server{len(self.served)}",
            *("serve", "--port", str(self.port), "--database", self.url),
            KITSUNE_HOME=str(self.folder / "home"),
        )
        self.served.append(command)
        return command

    def _kill_within(self, command: Command, seconds: float) -> None:
        """Asserts that it was alive, and that this kill was its end."""
        time.sleep(random.uniform(0, seconds))
        said = command.err.read_text("utf-8")
        assert command.process.poll() is None, f"a server ended by itself: {said}"
        at = time.monotonic()
        command.process.kill()
        assert command.process.wait(10) == -signal.SIGKILL
        self.kills.append(Kill(at, READY in said))

    def _send_archive(self) -> None:
        with self._http() as http:
            answer = http.put(f"/api/v1/archives/{digest(self.archive)}", content=self.archive.to_bytes())
        assert answer.status_code in (200, 201), answer.text
        assert answer.json()["sha256"] == digest(self.archive)

    def _http(self) -> httpx.Client:
        token = (self.folder / "home" / "token").read_text().strip()
        headers = {"Authorization": f"Bearer {token}"}
        return httpx.Client(base_url=f"http://127.0.0.1:{self.port}", headers=headers, timeout=20)

    def _post(self, http: httpx.Client, key: str) -> httpx.Response:
        asked = {
            "archive": digest(self.archive),
            "trials": self.trials,
            "seed": int(key.partition("-")[2]),
            "name": key,
        }
        return http.post("/api/v1/runs", json=asked, headers={"Idempotency-Key": key})

    @contextlib.contextmanager
    def _submitting(self) -> Iterator[None]:
        stop = threading.Event()
        with together([partial(self._keep_submitting, f"client{number}", stop) for number in range(self.clients)]):
            try:
                yield
            finally:
                stop.set()

    def _keep_submitting(self, name: str, stop: threading.Event) -> None:
        with self._http() as http:
            for number in count():
                if stop.wait(random.uniform(0, BETWEEN_S)):
                    return
                key = f"{name}-{number}"
                answer, was_lost = self._answered(http, key)
                if answer.status_code not in (200, 201):
                    self.journal.wrong.append(f"{key}: {answer.status_code} {answer.text:.200}")
                    continue
                self.journal.acknowledged[key] = answer.json()["id"]
                if was_lost and answer.status_code == 200:
                    self.journal.unheard.append(key)

    def _answered(self, http: httpx.Client, key: str) -> tuple[httpx.Response, bool]:
        """The answer, and whether one was lost before."""
        was_lost, end = False, time.monotonic() + PATIENCE_S
        while True:
            began = time.monotonic()
            try:
                return self._post(http, key), was_lost
            except httpx.ConnectError:
                assert time.monotonic() < end, "no server answers"
                time.sleep(0.02)
            except httpx.TransportError:
                was_lost = True
                self.journal.losses.append(Loss(began, time.monotonic()))

    @contextlib.contextmanager
    def _working(self) -> Iterator[None]:
        """Two workers in threads, whose measuring processes are made up."""
        stop = Stop()
        with together([partial(self._work, number, stop) for number in range(2)]):
            try:
                yield
            finally:
                stop.ask()

    def _work(self, number: int, stop: Stop) -> None:
        with open_database(self.url) as database:
            Worker(database, "cpu", GPU, self.folder / f"hands{number}", Quiet, stop, make=made_up).work()


def made_up(**given: Any) -> Tuning:
    return Machine(fingerprint=given["run"].fingerprint).make(**given)


@contextlib.contextmanager
def together(tasks: Sequence[Callable[[], None]]) -> Iterator[None]:
    """All in threads of their own until they end; what one of them raises is raised."""
    with ThreadPoolExecutor(len(tasks)) as pool:
        running = [pool.submit(task) for task in tasks]
        yield
    for task in running:
        task.result()


def digest(archive: Archive) -> str:
    return hashlib.sha256(archive.to_bytes()).hexdigest()


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
    assert isinstance(port, int)
    return port
