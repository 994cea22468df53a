"""A database in; a real worker on it, whose trials are those of a run that has been, one after every pause.

    python -m benchmarks.pages_writer sqlite:///kitsune.db --pause 0.25

It claims, beats, inspects, stores trials, plans and ends as `kitsune worker` does, until SIGTERM.
"""

import argparse
import signal
import tempfile
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.pages_database import tried
from kitsune.base.backoff import rest
from kitsune.class_tables import ClassTables
from kitsune.plan import Plan
from tuner.measuring.child_process import Check
from tuner.measuring.protocol import Inspection
from tuner.records import Run, Source, Trial, Verdict
from tuner.store.engine import open_database
from tuner.terminal.progress import Quiet
from tuner.tuning.class_recording import UNASKED, VANISHED, without
from tuner.tuning.confirmation import Conclusion
from tuner.tuning.events import Event, Inspected, Tried
from tuner.wall_clock import utcnow
from tuner.worker.worker import Stop, Worker


@dataclass(slots=True)
class Repeated:
    """Stands for `tuner.tuning.run.Tuning`: what it measures has been measured before, and takes `pause_s`."""

    run: Run
    check: Check
    before: Sequence[Trial]
    plan: Plan
    pause_s: float
    trials: Sequence[Trial] = ()
    spec: str = ""
    interrupted: bool = field(default=False, init=False)

    def steps(self) -> Generator[Event, None, Conclusion]:
        environment, evidence = self.plan.environment, self.plan.evidence
        assert environment is not None and evidence is not None
        yield Inspected(
            Inspection(
                environment=environment,
                fingerprint=self.plan.fingerprint,
                inapplicable={},
                random=False,
                step_ms=10.5,
                peak_bytes=1,
                parameters=1,
            )
        )
        yield from self._tried(is_ablation=False)
        mine = evidence.model_copy(update={"run_id": self.run.id})
        return Conclusion(self.plan.model_copy(update={"evidence": mine}), Verdict.FASTER, interrupted=False)

    def class_tables(
        self, _conclusion: Conclusion, *, is_taken_over: bool = False
    ) -> Generator[Event, None, ClassTables]:
        yield from ()
        return without(VANISHED if is_taken_over else UNASKED)

    def ablation(self, _plan: Plan, *, is_taken_over: bool = False) -> Generator[Event, None, None]:
        yield from self._tried(is_ablation=not is_taken_over)

    def _tried(self, *, is_ablation: bool) -> Generator[Event, None, None]:
        for trial in self.before[len(self.trials) :]:
            if (trial.source is Source.ABLATION) is is_ablation:
                begin = utcnow()
                rest(self.pause_s, self.check)
                yield Tried(
                    trial.model_copy(update={"run_id": self.run.id, "started_at": begin, "finished_at": utcnow()})
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("database")
    parser.add_argument("--pause", type=float, required=True, help="seconds that a trial takes")
    asked = parser.parse_args()
    trials, plan = tried()
    make: Any = partial(Repeated, before=trials, plan=plan, pause_s=asked.pause)
    stop = Stop()
    signal.signal(signal.SIGTERM, lambda *_: stop.ask())
    with open_database(asked.database) as database, tempfile.TemporaryDirectory() as home:
        gpu = plan.environment.gpu if plan.environment else ""
        Worker(database, "cuda:0", gpu, Path(home), Quiet, stop, make=make).work()


if __name__ == "__main__":
    main()
