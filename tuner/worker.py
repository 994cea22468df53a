"""Worker: carries out a run that it has claimed, and stores every trial as it comes."""

import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

from sqlalchemy import Connection

from kitsune.errors import LeaseLostError, StoreError
from tuner.events import Event, Inspected, Tried
from tuner.records import Run, RunStatus
from tuner.store import runs, trials
from tuner.store.database import Database
from tuner.tune import Conclusion, Tuning

log = logging.getLogger("kitsune")

Tell = Callable[[Event], None]
Make = Callable[..., Tuning]


def worker_name() -> str:
    return f"{socket.gethostname()}:{os.getpid()}"


def carry_out(
    database: Database, run: Run, spec: str, tell: Tell, make: Make = Tuning, lease_s: float = runs.LEASE_S
) -> tuple[Run, Conclusion]:
    """Tunes the claimed run to its end; trials that are stored already are not tried again.

    A run that cannot be tuned is stored as failed with the reason, and the error raised. LeaseLostError when the run
    was cancelled or taken over, at the end of the trial during which that happened: what others wrote stays.
    KeyboardInterrupt that no trial has caught puts the run back into the queue, and propagates.
    """
    with database.read() as connection:
        known = trials.list_of(connection, run.id)
    tuning = make(run=run, spec=spec, trials=known)
    with Lease(database, run, lease_s).kept() as lease:
        try:
            conclusion = _follow(database, run, tuning, tell, lease)
            with database.begin() as connection:
                return runs.finish(connection, run, plan=conclusion.plan, verdict=conclusion.verdict), conclusion
        except LeaseLostError:
            raise
        except (KeyboardInterrupt, SystemExit):
            _store_end(database, run, _give_back)
            raise
        except Exception as error:
            reason = str(error) or type(error).__name__
            _store_end(database, run, lambda connection, run: runs.fail(connection, run, reason))
            raise


def _follow(database: Database, run: Run, tuning: Tuning, tell: Tell, lease: "Lease") -> Conclusion:
    with closing(tuning.steps()) as steps:
        while True:
            try:
                event = next(steps)
            except StopIteration as end:
                conclusion: Conclusion = end.value
                return conclusion
            lease.check()
            _store(database, run, event)
            tell(event)


def _store(database: Database, run: Run, event: Event) -> None:
    if isinstance(event, Inspected):
        found = event.inspection
        with database.begin() as connection:
            runs.note_inspection(
                connection,
                run,
                fingerprint=found.fingerprint,
                environment=found.environment,
                inapplicable=dict(found.inapplicable),
            )
    elif isinstance(event, Tried):
        with database.begin() as connection:
            trials.add(connection, run, event.trial)


def _give_back(connection: Connection, run: Run) -> None:
    if run.workload == runs.LIVE:
        runs.fail(connection, run, "interrupted; a live model is gone with its process, so nobody else can go on")
    else:
        runs.release(connection, run)


def _store_end(database: Database, run: Run, write: Callable[[Connection, Run], object]) -> None:
    """How the run ended is kept if the database can take it; the error that ended it is what the caller must see."""
    try:
        with database.begin() as connection:
            write(connection, run)
    except StoreError as trouble:
        log.warning("how run %s ended could not be stored: %s", run.id, trouble)


class Lease:
    """Heartbeats of a run from a thread of their own, since a trial may take minutes."""

    def __init__(self, database: Database, run: Run, lease_s: float) -> None:
        self._database = database
        self._run = run
        self._lease_s = lease_s
        self._done = threading.Event()
        self._lost: str | None = None
        self._thread = threading.Thread(target=self._beat, name="kitsune-heartbeat", daemon=True)

    @contextmanager
    def kept(self) -> Iterator["Lease"]:
        self._thread.start()
        try:
            yield self
        finally:
            self._done.set()
            self._thread.join()

    def check(self) -> None:
        """Raises LeaseLostError when the run is no longer ours to go on with."""
        if self._lost is not None:
            raise LeaseLostError(self._lost)

    def _beat(self) -> None:
        while not self._done.wait(self._lease_s / 3):
            try:
                with self._database.begin() as connection:
                    current = runs.heartbeat(connection, self._run, lease_s=self._lease_s)
            except LeaseLostError as error:
                self._lost = str(error)
                return
            except StoreError as error:
                log.warning("heartbeat of run %s failed, will try again: %s", self._run.id, error)
                continue
            if current.status is RunStatus.CANCELLED:
                self._lost = f"run {self._run.id} was cancelled"
                return
