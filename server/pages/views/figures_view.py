"""The data of the charts of a run."""

from collections.abc import Iterator, Sequence
from statistics import median

from kitsune.knobs import KNOBS, Choice
from kitsune.plan import Evidence, Plan
from server.charts.pareto import Point
from server.charts.samples import Strip
from server.charts.search import TrialPoint
from server.charts.waterfall import Bar
from server.pages.views.choices_view import failure_words
from server.pages.views.trials_view import anchor, last_arm
from tuner.planning.ablation import Ablation
from tuner.records import Arm, Measurement, Source, Trial
from tuner.statistics.plan_evidence import EAGER
from tuner.statistics.plan_evidence import words as in_words

AS_GIVEN = "step as given"
ROLES = {EAGER: AS_GIVEN, "stock": "best of plain torch", "candidate": "best of the search"}


def bars(plan: Plan | None, ablation: Ablation | None) -> tuple[Bar, ...]:
    """The waterfall from the step as given to the plan, by choice if measured; empty if the plan changes nothing."""
    if plan is None or plan.evidence is None or not plan.knobs:
        return ()
    return tuple(_whole(plan.evidence) if ablation is None else _by_choice(ablation))


def points(trials: Sequence[Trial], plan: Plan | None) -> tuple[Point, ...]:
    """Time and memory of all measured trials of the search; empty if memory is not measured."""
    found = [
        _point(trial, arm, plan)
        for trial in trials
        if trial.source.is_search and (arm := last_arm(trial)) is not None and arm.step_ms
    ]
    return tuple(found) if any(point.peak_bytes for point in found) else ()


def tried(trials: Sequence[Trial]) -> tuple[TrialPoint, ...]:
    """The trials of the search."""
    return tuple(_tried(trial) for trial in trials if trial.source.is_search)


def strips(trials: Sequence[Trial]) -> tuple[Strip, ...]:
    """The raw samples of the last confirmation, process by process, which the verdict is based on."""
    processes = _last_confirmed(trials)
    if not processes:
        return ()
    arms = [arm for arm in max((found.arms for found in processes), key=len) if arm.step_ms]
    labels = [_strip_label(arm.name, in_words(arm.knobs)) for arm in arms]
    again = [f"{label}, again" if label in labels[:at] else label for at, label in enumerate(labels)]
    samples = [_samples(processes, arm.name) for arm in arms]
    return tuple(Strip(label, values) for label, values in zip(again, samples, strict=True))


def same_strips(trials: Sequence[Trial]) -> tuple[Strip, ...]:
    """The samples of the step as given, measured against itself."""
    baseline = next((trial.measurement for trial in trials if trial.source is Source.BASELINE), None)
    if baseline is None:
        return ()
    labels = ("as given", "as given, again")
    return tuple(Strip(label, arm.step_ms) for label, arm in zip(labels, baseline.arms, strict=False) if arm.step_ms)


def _last_confirmed(trials: Sequence[Trial]) -> list[Measurement]:
    """The measurements of the last confirmation, one for each process.

    These have the same configuration and arms, except for the step as given, which only some of them time. A
    confirmation before the search, of an earlier run's winner, is a different one.
    """
    since = max((place for place, trial in enumerate(trials) if trial.source.is_search), default=-1) + 1
    confirmed = [trial for trial in trials[since:] if trial.source is Source.CONFIRM and trial.measurement]
    if not confirmed:
        return []
    last = _arm_names(confirmed[-1])
    return [trial.measurement for trial in confirmed if trial.measurement and _arm_names(trial) == last]


def _arm_names(trial: Trial) -> list[tuple[str, dict[str, Choice]]]:
    arms = trial.measurement.arms if trial.measurement else ()
    return [(arm.name, dict(arm.knobs)) for arm in arms if arm.name != EAGER]


def _samples(processes: Sequence[Measurement], name: str) -> tuple[float, ...]:
    return tuple(value for found in processes for arm in found.arms if arm.name == name for value in arm.step_ms)


def _whole(found: Evidence) -> Iterator[Bar]:
    over = found.speedup_over_eager
    low_ms, high_ms = (found.eager_step_ms * (1 / factor - 1) for factor in (over.high, over.low))
    yield Bar(AS_GIVEN, found.eager_step_ms, None, None, "total")
    yield Bar("all choices together", found.step_ms - found.eager_step_ms, low_ms, high_ms, "remainder")
    yield Bar("plan", found.step_ms, None, None, "total")


def _by_choice(ablation: Ablation) -> Iterator[Bar]:
    yield Bar(AS_GIVEN, ablation.eager_ms, None, None, "total")
    for given in ablation.contributions:
        saved = given.saved_ms
        meaning = KNOBS[given.knob].choices.get(given.choice, "") if given.knob in KNOBS else ""
        if given.beside:  # first, because long notes are cut at the end
            meaning = f"beside a plan without {' and '.join(given.beside)}{'; ' if meaning else ''}{meaning}"
        yield Bar(f"{given.knob}={given.choice}", -saved.median, -saved.high, -saved.low, "step", meaning)
    together = ablation.interaction_ms
    note = "the effect of the choices together, beyond the sum of their own"
    yield Bar("interaction", -together.median, -together.high, -together.low, "remainder", note)
    yield Bar("plan", ablation.plan_ms, None, None, "total")


def _point(trial: Trial, arm: Arm, plan: Plan | None) -> Point:
    return Point(
        label=f"trial {trial.number + 1}: {in_words(trial.knobs)}",
        step_ms=median(arm.step_ms),
        peak_bytes=arm.peak_bytes,
        href=f"#{anchor(trial)}",
        is_chosen=plan is not None and dict(plan.knobs) == dict(trial.knobs),
        is_baseline=trial.source is Source.BASELINE,
        name=f"trial {trial.number + 1}",
    )


def _tried(trial: Trial) -> TrialPoint:
    speedup = trial.comparison.speedup if trial.comparison else None
    return TrialPoint(
        number=trial.number + 1,
        speedup=speedup.median if speedup else None,
        low=speedup.low if speedup else None,
        high=speedup.high if speedup else None,
        source=trial.source.value,
        label=in_words(trial.knobs),
        failure=failure_words(trial.failure) if trial.failure else "",
    )


def _strip_label(name: str, configuration: str) -> str:
    return AS_GIVEN if configuration == EAGER else ROLES.get(name, name)
