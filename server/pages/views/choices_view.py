"""The table of choices: what became of each choice of each knob, with the reason."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby

from kitsune.knobs import KNOBS, Choice, Knob, clashes
from kitsune.plan import Plan
from server.charts.drawing import words
from tuner.records import Failure, FailureKind, Run, RunStatus, Trial
from tuner.search.space import Space


class ChoiceOutcome(StrEnum):
    """The outcome of a choice."""

    CHOSEN = "in the plan"
    REJECTED = "rejected"
    TRIED = "tried"
    FAILED = "failed"
    DECLINED = "declined"
    INAPPLICABLE = "does not apply"
    UNTRIED = "not tried"

    @property
    def slug(self) -> str:
        """The CSS class."""
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class ChoiceRow:
    """Choices of one knob with the same outcome and reason; `meaning` is set for a single choice only."""

    knob: str
    choices: tuple[str, ...]
    meaning: str
    outcome: ChoiceOutcome
    reason: str


_FAILURES: Mapping[FailureKind, str] = {
    FailureKind.DECLINED: "was declined",
    FailureKind.RAISED: "raised an error",
    FailureKind.OUT_OF_MEMORY: "ran out of memory",
    FailureKind.TOO_LARGE: "did not fit into the memory limit",
    FailureKind.TIMEOUT: "took too long",
    FailureKind.CRASHED: "crashed",
    FailureKind.WRONG: "gave wrong numbers",
    FailureKind.NOT_FINITE: "gave NaN or infinity",
}

_ENDED: Mapping[RunStatus, str] = {
    RunStatus.CANCELLED: "the run was cancelled before its turn came",
    RunStatus.FAILED: "the run failed before its turn came",
    RunStatus.FINISHED: "the run ended before its turn came",
}


def choice_rows(run: Run, trials: Sequence[Trial], plan: Plan | None) -> tuple[ChoiceRow, ...]:
    """Rows in the order of the knobs table, without defaults and choices that a search never tries."""
    return tuple(row for knob in KNOBS.values() for row in _rows(knob, run, trials, plan))


def plan_note(trials: Sequence[Trial], plan: Plan | None) -> str:
    """A sentence with the speedup of the plan's own trial, for comparison with the figures in the reasons."""
    own = [trial.comparison for trial in trials if trial.source.is_search and plan and trial.knobs == plan.knobs]
    measured = [found.speedup for found in own if found is not None]
    if not measured or plan is None or not plan.knobs:
        return ""
    best = max(measured, key=lambda speedup: speedup.median)
    return f"In the search the plan's own trial came to {words.gain(best)} ({words.spread(best)})."


def failure_words(failure: Failure) -> str:
    """ "ran out of memory while warming up: CUDA out of memory"."""
    return f"{_FAILURES[failure.kind]} ({failure.phase.value}): {failure.reason}"


def _rows(knob: Knob, run: Run, trials: Sequence[Trial], plan: Plan | None) -> Iterator[ChoiceRow]:
    choices = [choice for choice in knob.choices if choice != knob.default and knob.is_searched(choice)]
    for (outcome, reason), alike in groupby(choices, lambda choice: _outcome_of(knob, choice, run, trials, plan)):
        named = tuple(alike)
        meaning = knob.choices[named[0]] if len(named) == 1 else ""
        yield ChoiceRow(knob.name, tuple(map(str, named)), meaning, outcome, reason)


def _outcome_of(
    knob: Knob, choice: Choice, run: Run, trials: Sequence[Trial], plan: Plan | None
) -> tuple[ChoiceOutcome, str]:
    if plan is not None and plan.choice(knob.name) == choice:
        return ChoiceOutcome.CHOSEN, _declined_in(
            knob.name, choice, trials
        ) or "part of the best measured configuration"
    if (why := run.inapplicable.get(f"{knob.name}={choice}")) is not None:
        return ChoiceOutcome.INAPPLICABLE, why
    with_it = [trial for trial in trials if trial.source.is_search and trial.knobs.get(knob.name) == choice]
    if not with_it:
        return ChoiceOutcome.UNTRIED, _why_untried(knob, choice, run, plan)
    if why := _declined_in(knob.name, choice, with_it):
        return ChoiceOutcome.DECLINED, why
    return _tried(with_it, is_decided=plan is not None)


def _tried(trials: Sequence[Trial], *, is_decided: bool) -> tuple[ChoiceOutcome, str]:
    """The outcome by the best trial; if all failed, by the last one."""
    measured = [(trial.comparison.speedup, trial) for trial in trials if trial.comparison is not None]
    if measured:
        speedup, best = max(measured, key=lambda pair: pair[0].median)
        of = f"the best of {words.count(len(trials), 'trial')}" if len(trials) > 1 else "its trial"
        fast = f"{words.gain(speedup)} ({words.spread(speedup)}) over the step as given"
        outcome = ChoiceOutcome.REJECTED if is_decided else ChoiceOutcome.TRIED
        return outcome, f"{of}, number {best.number + 1}, came to {fast}"
    failed = [(trial.number, trial.failure) for trial in trials if trial.failure is not None]
    if not failed:
        return ChoiceOutcome.TRIED, "not measured"
    number, failure = failed[-1]
    return ChoiceOutcome.FAILED, f"trial {number + 1} {failure_words(failure)}"


def _declined_in(knob: str, choice: Choice, trials: Sequence[Trial]) -> str:
    """Why the runtime declined the choice in a trial; "" if it did not."""
    reasons = (
        arm.declined[knob]
        for trial in trials
        if trial.measurement is not None
        for arm in trial.measurement.arms
        if arm.knobs.get(knob) == choice and knob in arm.declined
    )
    return next(reasons, "")


def _why_untried(knob: Knob, choice: Choice, run: Run, plan: Plan | None) -> str:
    chosen = {**plan.knobs, knob.name: choice} if plan is not None else {}
    for owner, exclusion in clashes(chosen, Space.of(run.inapplicable).table):
        if knob.name in (owner.name, exclusion.other):
            beside = exclusion.other if owner.name == knob.name else owner.name
            return f"cannot stand beside {beside}={chosen.get(beside, KNOBS[beside].default)}: {exclusion.reason}"
    if plan is None:
        return _ENDED.get(run.status, "its turn has not come")
    return "the budget ended before its turn came"


def by_outcome(rows: Sequence[ChoiceRow]) -> Iterator[str]:
    """The number of choices by outcome, for the sentence above the table: "2 failed"."""
    for outcome in ChoiceOutcome:
        if number := sum(len(row.choices) for row in rows if row.outcome is outcome):
            is_many = outcome is ChoiceOutcome.INAPPLICABLE and number > 1
            yield f"{number} {'do not apply' if is_many else outcome.value}"
