"""Records the time of a step by class of kernels, as given and under the plan, once the plan is stored.

A process of its own records each: a recorded step needs more memory and time than a measured one.
"""

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Final

from kitsune.class_tables import ClassTable, ClassTables
from kitsune.plan import Plan
from kitsune.timeline import ClassTime
from tuner.measuring.child_process import Check
from tuner.measuring.crew import Crew
from tuner.measuring.protocol import ArmSpec, Job, Limits
from tuner.planning.pace import recording_s
from tuner.records import Failure, FailureKind, Trial
from tuner.search.space import Configuration
from tuner.statistics.plan_evidence import CANDIDATE, EAGER
from tuner.tuning.events import Event, Explaining

_ELSEWHERE: Final = "`kitsune explain` shows it"
NO_TIME: Final = f"the budget had no time for it; {_ELSEWHERE}"
UNASKED: Final = f"the run was asked to measure nothing after its plan; {_ELSEWHERE}"
ENDED: Final = f"the run was ended early; {_ELSEWHERE}"
VANISHED: Final = f"the worker that was to record it vanished; {_ELSEWHERE}"


@dataclass(frozen=True, slots=True)
class ClassRecording:
    """`job` makes jobs of this run; `left_s` gives the seconds left in its budget; `check` may raise to end it."""

    crew: Crew
    job: Callable[..., Job]
    left_s: Callable[[], float]
    check: Check
    trials: Sequence[Trial]

    def steps(self, plan: Plan, known: Sequence[ClassTime]) -> Generator[Event, None, ClassTables]:
        """Yields an event before each recording. `known`: the classes under the plan, if it was recorded before."""
        under = ClassTable(classes=tuple(known)) if known else (yield from self._recorded(plan.knobs))
        given = (yield from self._recorded({})) if plan.knobs else under
        return ClassTables(given=given, plan=under)

    def _recorded(self, knobs: Configuration) -> Generator[Event, None, ClassTable]:
        left_s = self.left_s()
        if left_s <= recording_s(knobs, self.trials):
            return ClassTable(missing=NO_TIME)
        yield Explaining(knobs)
        arm = ArmSpec(name=CANDIDATE if knobs else EAGER, knobs=knobs)
        self.crew.begin(self.job((arm,), 1, kind="explain"), Limits(total_s=None if left_s == math.inf else left_s))
        found = self.crew.finished(self.check).outcome
        if isinstance(found, ClassTable):
            return found
        assert isinstance(found, Failure)
        is_late = found.kind is FailureKind.TIMEOUT and self.left_s() <= 0
        return ClassTable(missing=NO_TIME if is_late else found.reason.removesuffix("."))


def without(reason: str) -> ClassTables:
    """No table, for this reason."""
    return ClassTables(given=ClassTable(missing=reason), plan=ClassTable(missing=reason))
