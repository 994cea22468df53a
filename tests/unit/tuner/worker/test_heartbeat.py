"""Heartbeats while the database is away and comes back: what the log says of it."""

import contextlib
import threading

from kitsune.errors import StoreError
from tests.store.samples import a_run
from tuner.records import RunStatus
from tuner.worker import run_execution
from tuner.worker.run_execution import Heartbeat

RUN = a_run(id="r1", status=RunStatus.RUNNING)


class Unsteady:
    """A database that refuses where `answers` says so; `all_asked` once nothing is left of it."""

    def __init__(self, *answers: bool) -> None:
        self.left = list(answers)
        self.all_asked = threading.Event()

    @contextlib.contextmanager
    def begin(self):
        is_there = self.left.pop(0) if self.left else True
        if not self.left:
            self.all_asked.set()
        if not is_there:
            raise StoreError("the database cannot be reached")
        yield None


def test_an_outage_is_told_of_once_and_its_end_too(monkeypatch, caplog):
    monkeypatch.setattr(run_execution, "BEAT_S", 0.01)
    monkeypatch.setattr(run_execution.runs, "heartbeat", lambda *_, **__: RUN)
    database = Unsteady(True, False, False, False, True, True, False, False, True, True)
    with Heartbeat(database, RUN, 60).running() as heartbeat:
        assert database.all_asked.wait(10)
        heartbeat.check()
    failed, again = "heartbeat of run r1 failed", "heartbeats of run r1 are stored again"
    told = [record.getMessage() for record in caplog.records if record.name == "kitsune"]
    assert [text.partition(",")[0] for text in told] == [failed, again, failed, again]
