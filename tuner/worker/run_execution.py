"""Carries out one claimed run, stores each trial as it ends, and keeps the lease alive by heartbeats."""

import logging
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from contextvars import copy_context
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import TypeVar

from sqlalchemy import Connection

from kitsune.base.backoff import pauses, rest
from kitsune.cli.output import headline
from kitsune.errors import (
    GpuError,
    KitsuneError,
    LeaseLostError,
    NotFoundError,
    SchemaError,
    StoppedError,
    StoreError,
    TuneError,
    UnfitError,
)
from tuner import fault_injection
from tuner.measuring.child_process import Check, go_on
from tuner.measuring.protocol import Inspection
from tuner.planning.prior_runs import Knowledge
from tuner.records import Run, RunStatus, Verdict
from tuner.store.database import Database
from tuner.store.queries import class_tables, plans, runs, timelines, trials
from tuner.tuning.confirmation import Conclusion
from tuner.tuning.events import Event, Inspected, Tried
from tuner.tuning.recall import knowledge_of
from tuner.tuning.run import Tuning

log = logging.getLogger("kitsune")

Tell = Callable[[Event], None]
#: Creates the Tuning of a run. Called with `run`, `trials` (those that are stored already), `check` and `knows`.
Make = Callable[..., Tuning]
#: Maps the reason of a failure to the reason why this machine must not measure any more; None if it may continue.
Diagnose = Callable[[str], str | None]
Written = TypeVar("Written")
Ended = TypeVar("Ended")

#: Interval of heartbeats, if shorter than a third of the lease. A worker learns of a cancellation within this time.
BEAT_S = 2.0
FIRST_PAUSE_S, MOST_PAUSE_S = 0.5, 30.0
#: Exceptions that the run did not cause, so it goes back into the queue.
NOT_ITS_FAULT = (KeyboardInterrupt, SystemExit, StoppedError, UnfitError)


def fit(_: str) -> None:
    """A Diagnose that never finds a fault of the machine."""


class How(StrEnum):
    """How the execution of a claimed run ended."""

    FINISHED = "finished"
    FAILED = "failed"
    LOST = "lost"  #: cancelled, or taken over by another worker
    RETURNED = "returned"  #: put back into the queue, because the worker was asked to stop
    UNWRITTEN = "unwritten"  #: the database is unreachable; the run is claimable again when the lease ends


@dataclass(frozen=True, slots=True)
class Ending:
    """How the execution of a run ended, and why in a sentence."""

    how: How
    words: str


def worker_name() -> str:
    """A unique name. Host name and process id are not enough: they repeat after a reboot and in containers."""
    return f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"


def ending_of(
    database: Database,
    run: Run,
    make: Make,
    tell: Tell,
    *,
    lease_s: float,
    patience_s: float,
    stop: Check,
    diagnose: Diagnose,
) -> Ending:
    """Calls `carry_out` and converts exceptions about the run to an Ending, so that the worker can continue.

    UnfitError propagates: it is about the machine, so the next run would end in the same way.
    """
    try:
        _, conclusion = carry_out(
            database, run, make, tell, lease_s=lease_s, patience_s=patience_s, stop=stop, diagnose=diagnose
        )
    except UnfitError:
        raise
    except StoppedError as error:
        return Ending(How.RETURNED, str(error))
    except LeaseLostError as error:
        return Ending(How.LOST, str(error))
    except StoreError as error:
        return Ending(How.UNWRITTEN, str(error))
    except KitsuneError as error:
        return Ending(How.FAILED, str(error))
    except Exception as error:
        log.warning("an error that nobody foresaw", exc_info=True)
        return Ending(How.FAILED, _reason(error))
    return Ending(How.FINISHED, headline(conclusion.plan))


def carry_out(
    database: Database,
    run: Run,
    make: Make,
    tell: Tell,
    *,
    lease_s: float = runs.LEASE_S,
    patience_s: float = 0.0,
    stop: Check = go_on,
    diagnose: Diagnose = fit,
) -> tuple[Run, Conclusion]:
    """Tunes the claimed run to its end; trials that are already stored are not repeated.

    The plan is stored as soon as it is confirmed. The class tables and the ablation follow; if they end early, the run
    still finishes.

    A run that cannot be tuned is stored as failed with the reason, and the error is raised. These exceptions end the
    current trial within seconds and propagate: LeaseLostError when the run was cancelled or taken over, without
    overwriting anything; exceptions from `stop`, and KeyboardInterrupt that no trial has caught, which put the run back
    into the queue. If `diagnose` finds a broken GPU after a failure, the run goes back into the queue with all its
    trials, counted as a death, and GpuError is raised. Database errors are retried for `patience_s`; then StoreError
    propagates, and a run from the queue is put back if that can be written.
    """
    with Heartbeat(database, run, lease_s).running() as heartbeat:

        def check() -> None:
            stop()
            heartbeat.check()

        writer = RunWriter(database, run, check, patience_s)
        try:
            known = writer.write(lambda connection, run: trials.list_of(connection, run.id))
            tuning = make(run=run, trials=known, check=check, knows=partial(_knowledge, writer))
            kept = writer.write(_kept)
            conclusion = kept or _follow(tuning.steps(), writer, tell, diagnose)
            writer.write(partial(runs.keep, plan=conclusion.plan, verdict=conclusion.verdict))
            if conclusion.timeline is not None:
                writer.write(partial(timelines.put, timeline=conclusion.timeline))
        except LeaseLostError:
            raise
        except GpuError:
            writer.write_end(partial(_give_back, is_death=True))
            raise
        except NOT_ITS_FAULT:
            writer.write_end(_give_back)
            raise
        except Exception as error:
            if isinstance(error, StoreError) and run.archive is not None:
                writer.write_end(_give_back)
            else:
                reason = _reason(error)
                writer.write_end(lambda connection, run: runs.fail(connection, run, reason))
            raise
        finish = partial(runs.finish, plan=conclusion.plan, verdict=conclusion.verdict)
        try:
            is_whole = _look_closer(tuning, conclusion, writer, tell, is_taken_over=kept is not None)
        except LeaseLostError:
            raise
        except (SystemExit, StoreError):
            writer.write_end(finish)
            raise
        is_interrupted = conclusion.interrupted or tuning.interrupted or not is_whole
        return writer.write(finish), replace(conclusion, interrupted=is_interrupted)


def _look_closer(
    tuning: Tuning, conclusion: Conclusion, writer: "RunWriter", tell: Tell, *, is_taken_over: bool
) -> bool:
    """Records the class tables and runs the ablation; False if interrupted. Errors do not fail the run, because its
    plan is stored."""
    try:
        found = _follow(tuning.class_tables(conclusion, is_taken_over=is_taken_over), writer, tell)
        writer.write(partial(class_tables.put, found=found))
        _follow(tuning.ablation(conclusion.plan, is_taken_over=is_taken_over), writer, tell)
    except (KeyboardInterrupt, StoppedError):
        return False
    except StoreError:
        raise
    except Exception:
        log.warning("what follows the plan ended early: an error was raised", exc_info=True)
    return True


def _follow(steps: Generator[Event, None, Ended], writer: "RunWriter", tell: Tell, diagnose: Diagnose = fit) -> Ended:
    with closing(steps):
        while True:
            try:
                event = next(steps)
            except StopIteration as end:
                ended: Ended = end.value
                return ended
            except TuneError as error:
                _examine(str(error), diagnose)
                raise
            writer.check()
            _store(event, writer)
            if fault_injection.struck("worker-kill", type(event).__name__.lower()):
                os.kill(os.getpid(), signal.SIGKILL)
            tell(event)
            if isinstance(event, Tried) and event.trial.failure is not None:
                _examine(event.trial.failure.reason, diagnose)


def _examine(reason: str, diagnose: Diagnose) -> None:
    """Raises GpuError if `diagnose` finds that the device is broken."""
    why = diagnose(reason)
    if why is not None:
        raise GpuError(why)


def _store(event: Event, writer: "RunWriter") -> None:
    if isinstance(event, Inspected):
        found = event.inspection
        writer.write(
            lambda connection, run: runs.note_inspection(
                connection,
                run,
                fingerprint=found.fingerprint,
                environment=found.environment,
                inapplicable=dict(found.inapplicable),
            )
        )
    elif isinstance(event, Tried):
        trial = event.trial
        writer.write(lambda connection, run: trials.add(connection, run, trial))


def _knowledge(writer: "RunWriter", inspection: Inspection, budget_s: float | None) -> Knowledge:
    """Results of earlier runs of this team, from the store."""
    return writer.write(lambda connection, run: knowledge_of(connection, run, inspection, budget_s))


def _kept(connection: Connection, run: Run) -> Conclusion | None:
    """The conclusion that an earlier worker stored before it vanished. Raises PlanError when the plan is damaged."""
    plan = plans.get(connection, run.plan_id) if run.plan_id else None
    if plan is None or plan.evidence is None:
        return None
    return Conclusion(plan, Verdict(plan.evidence.verdict), interrupted=False)


def _give_back(connection: Connection, run: Run, *, is_death: bool = False) -> None:
    if run.workload == runs.LIVE:
        runs.fail(connection, run, "interrupted; a live model is gone with its process, so nobody else can go on")
    else:
        runs.release(connection, run, is_death=is_death)


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__


@dataclass(frozen=True, slots=True)
class RunWriter:
    """Writes to the database for one run, one transaction per call, with retries while the database refuses."""

    database: Database
    run: Run
    check: Check
    patience_s: float

    def write(self, entry: Callable[[Connection, Run], Written]) -> Written:
        """Calls `entry` in a transaction and returns its result.

        Raises StoreError after `patience_s`, LeaseLostError at once, and exceptions from `check` while waiting. `entry`
        must be idempotent: it is called again if the reply to a commit was lost.
        """
        end = time.monotonic() + self.patience_s
        waits = pauses(FIRST_PAUSE_S, MOST_PAUSE_S)
        while True:
            try:
                with self.database.begin() as connection:
                    return entry(connection, self.run)
            except (LeaseLostError, SchemaError, NotFoundError):
                raise
            except StoreError as error:
                left_s = end - time.monotonic()
                if left_s <= 0:
                    raise
                log.warning("run %s will be written again: %s", self.run.id, error)
                rest(min(left_s, next(waits)), self.check)

    def write_end(self, entry: Callable[[Connection, Run], object]) -> None:
        """Tries once to store how the run ended. Only logs errors, because the caller raises the one that ended it."""
        try:
            with self.database.begin() as connection:
                entry(connection, self.run)
        except StoreError as trouble:
            log.warning("how run %s ended could not be stored: %s", self.run.id, trouble)


class Heartbeat:
    """Renews the lease of a run from a background thread, because a trial may take minutes.

    Heartbeats are more frequent than the lease needs: their reply tells the worker that its run was cancelled.
    """

    def __init__(self, database: Database, run: Run, lease_s: float) -> None:
        self._database = database
        self._run = run
        self._lease_s = lease_s
        self._done = threading.Event()
        self._lost: str | None = None
        context = copy_context()  # carries the run id of the log
        self._thread = threading.Thread(target=context.run, args=(self._beat,), name="kitsune-heartbeat", daemon=True)

    @contextmanager
    def running(self) -> Iterator["Heartbeat"]:
        self._thread.start()
        try:
            yield self
        finally:
            self._done.set()
            self._thread.join()

    def check(self) -> None:
        """Raises LeaseLostError when the run was cancelled or taken over."""
        if self._lost is not None:
            raise LeaseLostError(self._lost)

    def _beat(self) -> None:
        is_away = False
        while not self._done.wait(min(self._lease_s / 3, BEAT_S)):
            if fault_injection.struck("heart-stop"):
                continue
            try:
                with self._database.begin() as connection:
                    current = runs.heartbeat(connection, self._run, lease_s=self._lease_s)
            except LeaseLostError as error:
                self._lost = str(error)
                return
            except StoreError as error:
                if not is_away:  # an outage may last for hours
                    log.warning("heartbeat of run %s failed, will try again: %s", self._run.id, error)
                is_away = True
                continue
            if is_away:
                log.warning("heartbeats of run %s are stored again", self._run.id)
            is_away = False
            if current.status is RunStatus.CANCELLED:
                self._lost = f"run {self._run.id} was cancelled"
                return
