"""The worker's loop: claims runs of the queue and carries them out, one at a time. Does not import torch."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from kitsune.base import json_logging
from kitsune.base.backoff import pauses, rest
from kitsune.errors import StoppedError, StoreError
from tuner.records import Run
from tuner.store.database import Database
from tuner.store.lease import Vigil
from tuner.store.queries import archives, runs
from tuner.terminal.progress import Quiet
from tuner.tuning.events import Started
from tuner.tuning.run import Tuning
from tuner.worker.archive_files import archive_file
from tuner.worker.run_execution import Diagnose, Ending, How, Make, ending_of, fit, worker_name

#: First and maximal pause before an empty queue is polled again.
IDLE_S: Final = (0.5, 2.0)
#: First and maximal pause before a database that does not answer is tried again.
AWAY_S: Final = (0.5, 30.0)


class Stop:
    """A flag that asks the worker to stop.

    Not a threading.Event, because a signal handler sets it and the event's lock may be held at that moment.
    """

    def __init__(self) -> None:
        self.is_asked = False

    def ask(self) -> None:
        self.is_asked = True

    def check(self) -> None:
        """Raises StoppedError when the worker was asked to stop."""
        if self.is_asked:
            raise StoppedError("the worker was asked to end")


@dataclass(frozen=True, slots=True)
class Worker:
    """Carries out runs on one device, one at a time. `teller` creates the progress reporter of each run.

    `gpu` is the model of the device; runs that were begun on another model are not claimed.
    """

    database: Database
    device: str
    gpu: str
    home: Path
    teller: Callable[[], Quiet]
    stop: Stop = field(default_factory=Stop)
    lease_s: float = runs.LEASE_S
    make: Make = Tuning
    name: str = field(default_factory=worker_name)
    vigil: Vigil = field(default_factory=Vigil)
    diagnose: Diagnose = fit

    def work(self) -> None:
        """Works until it is asked to stop. Waits if the database is unreachable, however long.

        Raises UnfitError (or its subclass GpuError) when this machine cannot carry out any run; the current run is put
        back into the queue.
        """
        with contextlib.suppress(StoppedError):
            idle, away = pauses(*IDLE_S), pauses(*AWAY_S)
            while True:
                try:
                    ending = self.work_once()
                except StoreError as error:
                    self._say(f"No run can be claimed, will try again: {error}")
                    rest(next(away), self.stop.check)
                    continue
                if ending is None:
                    rest(next(idle), self.stop.check)
                    away = pauses(*AWAY_S)
                elif ending.how is How.UNWRITTEN:
                    rest(next(away), self.stop.check)
                else:
                    idle, away = pauses(*IDLE_S), pauses(*AWAY_S)

    def work_once(self) -> Ending | None:
        """Claims a run and carries it out; None when there is none.

        Raises StoreError when the database refuses the claim, StoppedError when asked to stop before a run was claimed,
        and UnfitError as `work` does.
        """
        self.stop.check()
        claimed = self._claimed()
        if claimed is None:
            return None
        run, content = claimed
        with json_logging.concerning(run_id=run.id):
            return self._carried_out(run, content)

    def _carried_out(self, run: Run, content: bytes | None) -> Ending:
        tell = self.teller()
        tell(Started(run))
        ending = ending_of(
            self.database,
            run,
            partial(self._tuning, content),
            tell,
            lease_s=self.lease_s,
            patience_s=self.lease_s,
            stop=self.stop.check,
            diagnose=self.diagnose,
        )
        tell.say(f"run {run.id} {_WORDS[ending.how]}: {ending.words}")
        return ending

    def _claimed(self) -> tuple[Run, bytes | None] | None:
        """A run, and the bytes of its archive if it has one. If these cannot be read, the claim is rolled back."""
        with self.database.begin() as connection:
            run = runs.claim(
                connection, self.name, device=self.device, gpu=self.gpu, lease_s=self.lease_s, vigil=self.vigil
            )
            if run is None or run.archive is None:
                return None if run is None else (run, None)
            return run, archives.content(connection, run.archive)

    def _tuning(self, content: bytes | None, *, run: Run, **given: Any) -> Tuning:
        """Called by `carry_out`, which handles ArchiveError (the run fails) and UnfitError (it is put back)."""
        spec = run.workload if run.archive is None else str(archive_file(self.home, run.archive, content))
        return self.make(run=run, spec=spec, **given)

    def _say(self, text: str) -> None:
        self.teller().say(text)


_WORDS: Final = {
    How.FINISHED: "has finished",
    How.FAILED: "has failed",
    How.LOST: "is no longer ours",
    How.RETURNED: "goes back into the queue",
    How.UNWRITTEN: "cannot be written to, so it waits for a worker",
}
