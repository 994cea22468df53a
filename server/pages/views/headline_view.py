"""The headline of a run or a plan: its result in one sentence, with details."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Final

from kitsune.base.byte_sizes import size_words
from kitsune.base.text_format import clean
from kitsune.cli.output import UNTOLD
from kitsune.plan import Evidence, Interval, Numerics, Plan
from server.charts.drawing import words
from tuner.records import Comparison, Run, RunStatus, Source, Trial
from tuner.statistics.plan_evidence import EAGER
from tuner.statistics.plan_evidence import words as in_words
from tuner.store.queries.runs import label_of
from tuner.terminal.views import is_lost

#: Smaller relative changes of memory are reported as none.
_SAME_MEMORY: Final = 0.005


class Mood(StrEnum):
    """The kind of a headline; also its CSS class."""

    GOOD = "good"
    PLAIN = "plain"
    BAD = "bad"
    WAITING = "waiting"


@dataclass(frozen=True, slots=True)
class Headline:
    """The result in one sentence, and details below it."""

    mood: Mood
    sentence: str
    details: tuple[str, ...] = ()


def headline(run: Run, trials: Sequence[Trial], plan: Plan | None, now: datetime) -> Headline:
    """The result of a run, or its progress."""
    if plan is not None and plan.evidence is not None:
        return of_evidence(subject(run), plan, plan.evidence, trials)
    if run.status is RunStatus.FAILED:
        reason = run.error or "the worker left no reason"
        return Headline(Mood.BAD, f"{subject(run)}: the run failed, {reason}", so_far(trials))
    if run.status is RunStatus.CANCELLED:
        return Headline(Mood.PLAIN, f"{subject(run)}: cancelled after {_tried(trials)}, without a plan", so_far(trials))
    if run.status is RunStatus.FINISHED:
        return Headline(Mood.PLAIN, f"{subject(run)}: the run ended without a plan", so_far(trials))
    return _unfinished(run, trials, now)


def of_evidence(what: str, plan: Plan, found: Evidence, trials: Sequence[Trial] = ()) -> Headline:
    """The headline of a measured plan; `what`: what was tuned, and where."""
    if found.verdict == "faster":
        return Headline(Mood.GOOD, _faster(what, found), tuple(_details(found)))
    if found.verdict == "fits":
        sentence = (
            f"{what}: fits into {size_words(found.memory_limit_bytes or 0)}: {size_words(found.peak_bytes)} and "
            f"{words.ms(found.step_ms)} with the plan; {found.note}, and {words.ms(found.eager_step_ms)}"
        )
        return Headline(Mood.GOOD, sentence, tuple(_details(found)))
    if found.verdict in UNTOLD:
        sentence = f"{what}: {UNTOLD[found.verdict].lower()}: {found.note}"
        numbers_off = (f"Numbers: {numbers(found)}.",) if plan.knobs else ()
        return Headline(Mood.PLAIN, sentence, (_kept(plan, found), *_runner_up(trials), *numbers_off))
    if plan.knobs:
        sentence = (
            f"{what}: no gain over plain torch. The plan is its best stock configuration ({found.baseline}): "
            f"{words.ms(found.step_ms)} against {words.ms(found.eager_step_ms)} as given, "
            f"{times_as_fast(found.speedup_over_eager)}{memory_words(found)}"
        )
        return Headline(Mood.PLAIN, sentence, (*_runner_up(trials), *_details(found)))
    sentence = f"{what}: no gain. Keep the step as it is: {words.ms(found.step_ms)}, and nothing tried was faster"
    return Headline(Mood.PLAIN, f"{sentence} beyond doubt", tuple(_runner_up(trials)))


def subject(run: Run) -> str:
    """ "Training step of resnet18 on NVIDIA H200"."""
    where = clean(run.environment.gpu) if run.environment else ""
    return f"Training step of {label_of(run)}{f' on {where}' if where else ''}"


def times_as_fast(speedup: Interval) -> str:
    """ "1.32 times as fast (1.30 to 1.34)"."""
    return f"{speedup.median:.2f} times as fast ({words.spread(speedup)})"


def memory_words(found: Evidence) -> str:
    """ ", 12 % less memory"; "" if memory is not measured, as on a CPU."""
    if not found.peak_bytes or not found.baseline_peak_bytes:
        return ""
    change = found.peak_bytes / found.baseline_peak_bytes - 1
    if abs(change) < _SAME_MEMORY:
        return ", as much memory"
    return f", {words.percent(abs(change))} {'less' if change < 0 else 'more'} memory"


def so_far(trials: Sequence[Trial]) -> tuple[str, ...]:
    """A line about the trial of the search with the highest median speedup so far, if it changes anything."""
    measured = [(each.comparison.speedup, each.knobs) for each in trials if each.source.is_search and each.comparison]
    speedup, knobs = max(measured, key=lambda pair: pair[0].median, default=(None, None))
    if speedup is None or not knobs:
        return ()
    return (f"Best so far: {in_words(knobs)}, {times_as_fast(speedup)} as the step as given; not confirmed yet.",)


def _faster(what: str, found: Evidence) -> str:
    times = f"{words.ms(found.step_ms)} with the plan against {words.ms(found.baseline_step_ms)} {_baseline(found)}"
    return f"{what}: {times}: {times_as_fast(found.speedup)}{memory_words(found)}"


def _baseline(found: Evidence) -> str:
    if found.baseline == EAGER:
        return "as given, which no stock configuration of torch beats"
    what = "mode of torch.compile" if "compile=" in found.baseline else "stock configuration of torch"
    return f"with the best {what} ({found.baseline})"


def _kept(plan: Plan, found: Evidence) -> str:
    if not plan.knobs:
        return f"Until that is known the plan changes nothing: {words.ms(found.step_ms)} as given."
    return (
        f"Until that is known the plan is the best stock configuration ({found.baseline}): {words.ms(found.step_ms)} "
        f"against {words.ms(found.eager_step_ms)} as given, {times_as_fast(found.speedup_over_eager)}."
    )


def _details(found: Evidence) -> Iterator[str]:
    if found.prediction is not None and found.verdict != "fits":
        again = f"{found.prediction.low:.2f} to {found.prediction.high:.2f} times"
        yield (
            f"Measured in {words.count(found.processes, 'fresh process', 'fresh processes')}. Measured in one more on "
            f"this machine, the gain lies within {again} 95 % of the time."
        )
    if found.verdict == "faster" and found.baseline != EAGER:
        fast = times_as_fast(found.speedup_over_eager)
        yield f"Over the step as given, which takes {words.ms(found.eager_step_ms)}: {fast}."
    saved_ms = found.eager_step_ms - found.step_ms
    if saved_ms > 0:
        steps = f"{found.first_step_s * 1000 / saved_ms:,.0f}"
        first = words.lasted(found.first_step_s)
        yield f"The first step by the plan takes {first} to compile and capture; {steps} steps earn that back."
    yield f"Numbers: {numbers(found)}."


def numbers(found: Evidence) -> str:
    """The numerical errors of the plan, with their tolerances."""
    numerics = found.numerics
    if not numerics.gradient_allowed:
        return numerics.note or "those of the step as given"
    off = errors_of(numerics)
    return f"{off}; {numerics.note}" if numerics.note else off


def errors_of(found: Numerics) -> str:
    """ "loss off by 1.0e-03 (2.0e-03 allowed), gradients by ..."."""
    return (
        f"loss off by {found.loss_error:.1e} ({found.loss_allowed:.1e} allowed), "
        f"gradients by {found.gradient_error:.1e} ({found.gradient_allowed:.1e}), "
        f"parameters by {found.parameter_error:.1e} ({found.parameter_allowed:.1e})"
    )


def _runner_up(trials: Sequence[Trial]) -> Iterator[str]:
    """A line about the best of the search if its confirmation was not a win."""
    confirmed = [(each.knobs, each.comparison) for each in trials if each.source is Source.CONFIRM and each.comparison]
    knobs, found = confirmed[-1] if confirmed else (None, None)
    if knobs and found is not None:
        yield (
            f"The best of the search ({in_words(knobs)}) was measured afresh: {times_as_fast(found.speedup)} as the "
            f"best stock configuration, {_why_not_better(found)}."
        )


def _why_not_better(found: Comparison) -> str:
    return "which is not faster beyond doubt" if found.speedup.low <= 1 else "which is less than a verdict needs"


def _unfinished(run: Run, trials: Sequence[Trial], now: datetime) -> Headline:
    if run.status is RunStatus.QUEUED:
        waited = words.lasted(max(0.0, (now - run.created_at).total_seconds()))
        sentence = f"{subject(run)}: waiting for a worker for {waited}"
        return Headline(Mood.WAITING, sentence, so_far(trials))
    if is_lost(run, now):
        sentence = f"{subject(run)}: its worker does not respond; the next worker of its kind takes it over"
        return Headline(Mood.BAD, sentence, so_far(trials))
    return Headline(Mood.WAITING, f"{subject(run)}: being tuned, {_tried(trials)} done", so_far(trials))


def _tried(trials: Sequence[Trial]) -> str:
    return words.count(len(trials), "trial")
