"""`kitsune worker`: carries out runs of the queue until a signal stops it."""

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType
from typing import Final

from kitsune.base import json_logging
from kitsune.base.backoff import pauses, rest
from kitsune.base.durations import seconds_of
from kitsune.base.json_logging import LogFormat
from kitsune.cli import output
from kitsune.cli.exit_codes import ExitCode
from kitsune.device.backend import environment, pick_device
from kitsune.errors import GpuError, SchemaError, SettingsError, StoppedError, StoreBusyError, StoreError
from tuner.measuring.gpu_health import Fitness
from tuner.measuring.scratch import sweep
from tuner.settings import settings_for_tuning
from tuner.store.database import Database
from tuner.store.engine import create, open_database
from tuner.store.error_translation import shown
from tuner.store.moments import check_clock
from tuner.terminal.progress import Lines, Logged
from tuner.worker.run_execution import How
from tuner.worker.worker import AWAY_S, Stop, Worker

#: Shorter leases would expire under a short peak of load.
MIN_LEASE_S: Final = 2.0
#: Signals that stop a worker -> its exit code. SIGTERM is the normal way to stop one, so it gives 0.
CODES: Final = {signal.SIGTERM: ExitCode.OK, signal.SIGINT: ExitCode.INTERRUPTED, signal.SIGHUP: ExitCode.HUNG_UP}
#: Exit codes of --once.
ENDS: Final = {
    How.FINISHED: ExitCode.OK,
    How.FAILED: ExitCode.NO_RESULT,
    How.LOST: ExitCode.NO_RESULT,
    How.RETURNED: ExitCode.OK,
    How.UNWRITTEN: ExitCode.STORE,
}


def work(
    device: str | None, database_url: str | None, lease: str, *, once: bool, log_format: LogFormat | None = None
) -> int:
    """Carries out runs until a signal arrives, or one run with `once`; returns the exit code.

    Raises UnfitError when this machine cannot carry out runs, SettingsError for an invalid lease, and StoreError when
    waiting for the database cannot help, or with `once` when it is unavailable now.
    """
    json_logging.set_up(json_logging.chosen(log_format))
    lease_s = _lease_s(lease)
    settings = settings_for_tuning()
    place = pick_device(device)
    sweep()
    fitness = Fitness(str(place))
    if place.type == "cuda" and (trouble := fitness.trouble()):
        raise GpuError(f"{place} takes no runs: {trouble}")
    with Signals().installed() as signals:
        code = ExitCode.OK
        with (
            contextlib.suppress(StoppedError),
            _opened(database_url or settings.database_url, None if once else signals.stop) as database,
        ):
            check_clock(database)
            worker = Worker(
                database,
                str(place),
                environment(place).gpu,
                settings.home,
                lambda: Logged(output.stderr()) if json_logging.is_json() else Lines(output.stderr()),
                stop=signals.stop,
                lease_s=lease_s,
                diagnose=fitness.why_unfit,
            )
            output.note(f"worker {worker.name} on {place}: {worker.gpu}; it serves {shown(database.engine.url)}")
            if once:
                code = _work_once(worker)
            else:
                worker.work()
        return code if signals.first is None else CODES[signals.first]


def _opened(url: str, stop: Stop | None) -> Database:
    """Opens the database. With `stop`, waits for an unreachable database until StoppedError is raised.

    Raises StoreError when waiting does not help; without `stop`, at once.
    """
    engine = create(url)  # raises at once for an invalid URL or a missing driver
    engine.dispose()
    is_file = engine.dialect.name == "sqlite"  # waiting helps only if the file is locked
    away = pauses(*AWAY_S)
    while True:
        try:
            return open_database(url)
        except SchemaError:
            raise
        except StoreError as error:
            if stop is None or (is_file and not isinstance(error, StoreBusyError)):
                raise
            output.note(f"The database cannot be opened, will try again: {error}")
            rest(next(away), stop.check)


def _work_once(worker: Worker) -> ExitCode:
    ending = worker.work_once()
    if ending is None:
        output.note("The queue holds no run for this device.")
        return ExitCode.OK
    return ENDS[ending.how]


def _lease_s(lease: str) -> float:
    lease_s = seconds_of(lease, "lease")
    if lease_s < MIN_LEASE_S:
        raise SettingsError(f"lease is {lease!r}; a worker needs at least {MIN_LEASE_S:g} s between signs of life")
    return lease_s


class Signals:
    """Signal handlers: the first signal asks the worker to stop soon, the second one ends the process."""

    def __init__(self) -> None:
        self.stop = Stop()
        self.first: signal.Signals | None = None

    @contextlib.contextmanager
    def installed(self) -> Iterator["Signals"]:
        before = {number: signal.getsignal(number) for number in CODES}
        caught = [number for number, handler in before.items() if handler is not signal.SIG_IGN]  # as under nohup
        for number in caught:
            signal.signal(number, self._on_signal)
        try:
            yield self
        finally:
            for number in caught:
                signal.signal(number, before[number])

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if self.first is not None:
            raise SystemExit(128 + number)
        self.first = signal.Signals(number)
        self.stop.ask()
