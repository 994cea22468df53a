"""The table of trials, and the noise of the measurements."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from server.charts.drawing import words
from server.pages.views.choices_view import failure_words
from server.pages.views.headline_view import errors_of
from tuner.planning.ablation import WITHOUT
from tuner.records import Arm, Measurement, Source, Trial
from tuner.statistics.block_statistics import MIN_BLOCKS, noise_floor
from tuner.statistics.plan_evidence import EAGER
from tuner.statistics.plan_evidence import words as in_words
from tuner.terminal.views import in_a_word

#: Samples shown for an arm; the export has all of them.
MAX_SAMPLES: Final = 400
#: Verdict of a trial that was stopped early because it could not become the best; it has too few blocks for another.
CUT_SHORT: Final = "cut short"

MEANINGS: Final[Mapping[str, str]] = {
    "baseline": "the step as given, against itself",
    "stock": "what one would try by hand in plain torch",
    "known": "the winner of an earlier run",
    "seed": "what an expert would try first",
    "model": "the most promising by what each choice did so far",
    "descent": "one choice changed from the best so far",
    "tpe": "proposed by the search model",
    "playoff": "the best few against each other",
    "confirm": "the winner, measured again in one of several fresh processes",
    "ablation": "the plan with one choice after the other taken back",
}


@dataclass(frozen=True, slots=True)
class ArmRow:
    """An arm of a trial, with its raw samples as text."""

    name: str
    configuration: str
    step: str
    peak: str
    first_step: str
    blocks: int
    samples: str
    left_out: int
    applied: tuple[str, ...]
    declined: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class TrialRow:
    """A row of the table of trials, and its details."""

    number: int
    anchor: str
    source: str
    meaning: str
    configuration: str
    step: str
    gain: str
    spread: str
    verdict: str
    failure: str
    peak: str
    took: str
    arms: tuple[ArmRow, ...]
    notes: tuple[str, ...]
    is_plan: bool


@dataclass(frozen=True, slots=True)
class Noise:
    """The noise floor: how much measurements of the same step differ."""

    sentence: str
    facts: tuple[tuple[str, str], ...]


def trial_rows(trials: Sequence[Trial], plan_knobs: Mapping[str, str | int] | None) -> tuple[TrialRow, ...]:
    """The rows by number. `plan_knobs`: the knobs of the plan, if there is one."""
    return tuple(_row(trial, plan_knobs) for trial in trials)


def anchor(trial: Trial) -> str:
    return f"trial-{trial.number + 1}"


def last_arm(trial: Trial) -> Arm | None:
    """The last arm of a measurement, which is the tried configuration."""
    return None if trial.measurement is None else trial.measurement.arms[-1]


def noise(trials: Sequence[Trial]) -> Noise | None:
    """None until the step has been measured against itself."""
    same = next((each.comparison for each in trials if each.source is Source.BASELINE and each.comparison), None)
    if same is None:
        return None
    speedup, floor = same.speedup, words.percent(noise_floor(same))
    sentence = (
        f"The step as given, measured against itself, came to {speedup.median:.3f} times as fast "
        f"({speedup.low:.3f} to {speedup.high:.3f}): within one process, differences up to {floor} may be nothing but "
        "noise here. What is claimed rests on several processes."
    )
    return Noise(sentence, tuple(_noise_facts(trials)))


def _noise_facts(trials: Sequence[Trial]) -> Iterator[tuple[str, str]]:
    measured = [trial.measurement for trial in trials if trial.measurement is not None]
    rounds = sum(_rounds(measurement) for measurement in measured)
    dropped = sum(measurement.dropped_rounds for measurement in measured)
    yield "rounds kept", f"{rounds:,}, in each of which every arm ran once"
    yield "rounds dropped", f"{dropped:,}, as the machine was disturbed" if dropped else "none"
    medians = [median(arm.step_ms) for measurement in measured for arm in measurement.arms[:1] if arm.name == EAGER]
    apart = words.gain(max(medians) / min(medians))
    yield (
        "between processes",
        f"the step as given took {apart} as long in the slowest of {len(medians)} as in the fastest",
    )
    for note in dict.fromkeys(note for measurement in measured for note in measurement.notes):
        yield "note", note


def _rounds(measurement: Measurement) -> int:
    return len(measurement.arms[0].step_ms)


def _row(trial: Trial, plan_knobs: Mapping[str, str | int] | None) -> TrialRow:
    tried, compared = last_arm(trial), trial.comparison
    return TrialRow(
        number=trial.number + 1,
        anchor=anchor(trial),
        source=trial.source.value,
        meaning=MEANINGS.get(trial.source.value, ""),
        configuration="; ".join([in_words(trial.knobs), *_left_out(trial)]),
        step=words.ms(median(tried.step_ms)) if tried and tried.step_ms else "",
        gain=words.gain(compared.speedup) if compared else "",
        spread=words.spread(compared.speedup) if compared else "",
        verdict=_verdict(trial),
        failure=failure_words(trial.failure) if trial.failure else "",
        peak=_peak(tried.peak_bytes) if tried else "",
        took=words.lasted(trial.took_s),
        arms=tuple(map(_arm, trial.measurement.arms)) if trial.measurement else (),
        notes=tuple(_notes(trial)),
        is_plan=trial.source.is_search and plan_knobs is not None and dict(trial.knobs) == dict(plan_knobs),
    )


def _left_out(trial: Trial) -> Iterator[str]:
    """The arms of an ablation beside the plan."""
    if trial.source is Source.ABLATION and trial.measurement is not None:
        yield from (arm.name for arm in trial.measurement.arms if arm.name.startswith(WITHOUT))


def _verdict(trial: Trial) -> str:
    tried, compared = last_arm(trial), trial.comparison
    if tried is None or compared is None:
        return "failed" if trial.failure else ""
    if trial.source is Source.BASELINE:
        return "noise floor"
    is_confirmed = trial.source is Source.CONFIRM
    return CUT_SHORT if len(tried.step_ms) < MIN_BLOCKS and not is_confirmed else in_a_word(compared.verdict)


def _arm(arm: Arm) -> ArmRow:
    shown = arm.step_ms[:MAX_SAMPLES]
    return ArmRow(
        name=arm.name,
        configuration=in_words(arm.knobs),
        step=words.ms(median(arm.step_ms)) if arm.step_ms else "",
        peak=_peak(arm.peak_bytes),
        first_step=words.lasted(arm.first_step_s),
        blocks=len(arm.step_ms),
        samples=" ".join(f"{value:.4g}" for value in shown),
        left_out=len(arm.step_ms) - len(shown),
        applied=arm.applied,
        declined=tuple(sorted(arm.declined.items())),
    )


def _peak(size: int) -> str:
    """ "" if it is not measured, as on a CPU."""
    return words.mebibytes(size) if size else ""


def _notes(trial: Trial) -> Iterator[str]:
    measurement = trial.measurement
    if measurement is None:
        return
    yield from measurement.notes
    yield from (cause.seen for cause in measurement.causes)
    if measurement.dropped_rounds:
        yield f"{words.count(measurement.dropped_rounds, 'round')} left out, as the machine was disturbed"
    if (found := measurement.numerics) is not None:
        yield f"numbers over {words.count(found.steps, 'step')}: {errors_of(found)}"
        if found.note:
            yield found.note
