"""A plan's choices and its trials in, what each choice gives out: leave-one-out. Pure.

What a choice gives is by how much a step without it is longer than one of the plan, each pair of blocks from one round
of one process, as a part of the plan's block: processes differ in speed, and a ratio does not see that. Every part is
turned into ms by the same step of the plan. Choices work together, so these do not add up to the gain of the plan: what
is missing is the interaction.
"""

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from pydantic import Field

from kitsune.knobs import KNOBS, Choice
from kitsune.plan import Interval
from kitsune.record import Record
from tuner.protocol import ArmSpec
from tuner.records import Arm, FailureKind, Measurement, Source, Trial
from tuner.space import Configuration, Space
from tuner.stats import MIN_BLOCKS, median
from tuner.verdicts import CANDIDATE, EAGER

#: How the arm is named that leaves a knob at its default.
WITHOUT: Final = "without "
#: Besides the step as given and the plan: each has a model of its own in the memory of one process.
MOST_LEFT_OUT: Final = 2
RESAMPLES: Final = 1000  # half of those for a verdict: a page waits for them, 60 ms for six choices
UNREACHED: Final = "the run ended before it was measured"
TOO_FEW: Final = "too few undisturbed blocks"

#: The knobs that are left out, one at a time, in one process.
Chunk = tuple[str, ...]
#: Of one process: by block, what the step as given (`GAIN`) takes more than the plan, or the step without the knob, as
#: a part of the plan's block.
Excesses = Mapping[str, Sequence[float]]
GAIN: Final = "eager"
INTERACTION: Final = "interaction"


class Contribution(Record):
    """What one choice of a plan gives, all other choices being there: negative when the step is slower by it."""

    knob: str
    choice: Choice
    saved_ms: Interval = Field(description="how much longer a step is without the choice, where the plan takes plan_ms")
    share: float | None = Field(description="of the whole gain; null when the plan gained nothing here")


class Ablation(Record):
    """What the choices of a plan give: eager_ms - the contributions - interaction_ms = plan_ms, by the medians.

    `interaction_ms` is what the contributions leave of the gain. Positive: choices that stand in for each other, so
    that leaving out one of them does not show what they give. Negative: choices that need each other, so that what they
    give together is in more than one contribution. What was not measured is in it too.
    """

    eager_ms: float
    plan_ms: float
    gain_ms: Interval
    contributions: tuple[Contribution, ...] = Field(description="in the order of the knobs table")
    interaction_ms: Interval
    unmeasured: Mapping[str, str] = Field(description="knob of the plan -> why there is no contribution of it")
    blocks: int = Field(ge=1, description="of the step as given and of the plan, in all processes that had enough")


@dataclass(frozen=True, slots=True)
class Course:
    """How far leaving out one by one has come: which trial measured what, in which order, and what is still to do."""

    ended: tuple[tuple[Chunk, Trial], ...]
    pending: tuple[Chunk, ...]


# What to measure ------------------------------------------------------------------------------------------------------


def without(knobs: Configuration, knob: str) -> dict[str, Choice]:
    return {name: choice for name, choice in knobs.items() if name != knob}


def refusals(knobs: Configuration, space: Space) -> dict[str, str]:
    """The knobs that cannot be left out alone, as the rest is no allowed configuration, each with the reason."""
    rests = {knob: space.allows(without(knobs, knob)) for knob in in_order(knobs)}
    return {knob: reason for knob, reason in rests.items() if reason is not None}


def chunks(knobs: Configuration, space: Space) -> list[Chunk]:
    """What is to be measured together. Nothing of a single choice: without it is the step as given."""
    refused = refusals(knobs, space)
    free = [knob for knob in in_order(knobs) if knob not in refused]
    if len(knobs) < 2:
        return []
    return [tuple(free[at : at + MOST_LEFT_OUT]) for at in range(0, len(free), MOST_LEFT_OUT)]


def course(knobs: Configuration, trials: Iterable[Trial], space: Space) -> Course:
    """The trials of this plan's ablation, by number, each with the chunk that it measured.

    Where two left out together fail, each has its turn alone, which needs less memory; but not where time ran out.
    """
    pending = chunks(knobs, space)
    ended: list[tuple[Chunk, Trial]] = []
    for trial in trials:
        if not pending or trial.source is not Source.ABLATION or trial.knobs != knobs:
            continue
        chunk, *pending = pending
        ended.append((chunk, trial))
        if trial.failure is not None and trial.failure.kind is not FailureKind.TIMEOUT and len(chunk) > 1:
            pending = [*((knob,) for knob in chunk), *pending]
    return Course(tuple(ended), tuple(pending))


def next_chunk(knobs: Configuration, trials: Iterable[Trial], space: Space) -> Chunk | None:
    """What is to be measured next, or None when all is done."""
    return next(iter(course(knobs, trials, space).pending), None)


def arms_without(knobs: Configuration, chunk: Chunk) -> tuple[ArmSpec, ...]:
    """The step as given, the plan without each knob of the chunk, and the plan."""
    left_out = (ArmSpec(name=f"{WITHOUT}{knob}", knobs=without(knobs, knob)) for knob in chunk)
    return ArmSpec(name=EAGER), *left_out, ArmSpec(name=CANDIDATE, knobs=knobs)


def in_order(knobs: Configuration) -> list[str]:
    return [name for name in KNOBS if name in knobs]


# What was measured ----------------------------------------------------------------------------------------------------


def ablation_of(
    knobs: Configuration, trials: Sequence[Trial], inapplicable: Mapping[str, str] | None = None
) -> Ablation | None:
    """What each choice of the run's plan gives, by the trials of the run; None when none of them tells.

    `inapplicable` is `Run.inapplicable`.
    """
    measurements = measurements_of(knobs, trials, inapplicable)
    return contributions(knobs, measurements, reasons_of(knobs, trials, inapplicable))


def measurements_of(
    knobs: Configuration, trials: Sequence[Trial], inapplicable: Mapping[str, str] | None = None
) -> list[Measurement]:
    ended = course(knobs, trials, Space.of(inapplicable)).ended
    return [trial.measurement for _, trial in ended if trial.measurement] or _confirmed_alone(knobs, trials)


def reasons_of(
    knobs: Configuration, trials: Sequence[Trial], inapplicable: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Why knobs of the run's plan were not measured, also where none was; of one that was not reached nothing."""
    space = Space.of(inapplicable)
    ended = course(knobs, trials, space).ended
    failed = {knob: trial.failure.reason for chunk, trial in ended if trial.failure for knob in chunk}
    few = too_few(knobs, measurements_of(knobs, trials, inapplicable))
    return {**failed, **few, **refusals(knobs, space)}


def contributions(
    knobs: Configuration, measurements: Sequence[Measurement], reasons: Mapping[str, str] | None = None
) -> Ablation | None:
    """What each choice gives, by measurements with the arms of `arms_without`; None when none has enough blocks.

    Each choice is compared with the plan in the same process; in the gain every process has the same weight.
    `reasons` say why a choice was not measured.
    """
    told = [measurement for measurement in measurements if has_enough(knobs, measurement)]
    if not told:
        return None
    plans = [plan_arm(knobs, measurement) for measurement in told]
    plan_ms = median([median(arm.step_ms) for arm in plans])
    parts = intervals([excesses(knobs, measurement) for measurement in told])
    found = {name: in_ms(part, plan_ms) for name, part in parts.items()}
    gain = found[GAIN]
    known = {**(reasons or {}), **too_few(knobs, measurements)}
    return Ablation(
        eager_ms=plan_ms + gain.median,
        plan_ms=plan_ms,
        gain_ms=gain,
        contributions=tuple(
            Contribution(
                knob=knob,
                choice=knobs[knob],
                saved_ms=found[knob],
                share=found[knob].median / gain.median if gain.median > 0 else None,
            )
            for knob in in_order(knobs)
            if knob in found
        ),
        interaction_ms=found[INTERACTION],
        unmeasured={knob: known.get(knob, UNREACHED) for knob in in_order(knobs) if knob not in found},
        blocks=sum(len(arm.step_ms) for arm in plans),
    )


def has_enough(knobs: Configuration, measurement: Measurement) -> bool:
    return len(plan_arm(knobs, measurement).step_ms) >= MIN_BLOCKS


def too_few(knobs: Configuration, measurements: Iterable[Measurement]) -> dict[str, str]:
    """The knobs that were left out in a process that had too few blocks to tell."""
    short = [measurement for measurement in measurements if not has_enough(knobs, measurement)]
    return {knob: TOO_FEW for measurement in short for knob in excesses(knobs, measurement) if knob != GAIN}


def in_ms(part: Interval, plan_ms: float) -> Interval:
    return Interval(median=part.median * plan_ms, low=part.low * plan_ms, high=part.high * plan_ms)


def plan_arm(knobs: Configuration, measurement: Measurement) -> Arm:
    return next(arm for arm in measurement.arms if arm.knobs == knobs)


def excesses(knobs: Configuration, measurement: Measurement) -> dict[str, list[float]]:
    """Block by block. Without the only choice of a plan, its step is the step as given."""
    plan = plan_arm(knobs, measurement)
    eager = next(arm for arm in measurement.arms if not arm.knobs)
    found = {GAIN: paired(eager, plan)}
    for arm in measurement.arms:
        if arm.name.startswith(WITHOUT):
            found[arm.name.removeprefix(WITHOUT)] = paired(arm, plan)
    if len(knobs) == 1:
        found |= dict.fromkeys(knobs, found[GAIN])
    return found


def paired(slower: Arm, plan: Arm) -> list[float]:
    return [(slow_ms - plan_ms) / plan_ms for slow_ms, plan_ms in zip(slower.step_ms, plan.step_ms, strict=True)]


def intervals(processes: Sequence[Excesses], resamples: int = RESAMPLES, seed: int = 0) -> dict[str, Interval]:
    """Medians with their 95 % percentile bootstrap intervals, as in `tuner.stats`, and what they leave of the gain.

    The blocks of a process are drawn together, all arms of a round or none: what disturbed a round hit them all. For
    the gain the processes are drawn too, as those that were measured are only some of those that could have been; a
    choice has no other process than its own.
    """
    rng = random.Random(seed)  # noqa: S311 - statistics, not secrets
    seen = with_interaction(*[medians(process) for process in processes])
    drawn = [redrawn_medians(processes, rng) for _ in range(resamples)]
    cut = resamples // 40
    found = {}
    for name, middle in seen.items():
        ordered = sorted(draw[name] for draw in drawn)
        found[name] = Interval(median=middle, low=ordered[cut], high=ordered[-1 - cut])
    return found


def redrawn_medians(processes: Sequence[Excesses], rng: random.Random) -> dict[str, float]:
    own = [medians(redrawn(process, rng)) for process in processes]
    gains = rng.choices([process[GAIN] for process in own], k=len(own))
    return with_interaction(*[{**process, GAIN: gain} for process, gain in zip(own, gains, strict=True)])


def redrawn(process: Excesses, rng: random.Random) -> Excesses:
    blocks = len(process[GAIN])
    rounds = rng.choices(range(blocks), k=blocks)
    return {name: [values[block] for block in rounds] for name, values in process.items()}


def medians(process: Excesses) -> dict[str, float]:
    return {name: median(values) for name, values in process.items()}


def with_interaction(*processes: Mapping[str, float]) -> dict[str, float]:
    """What was found in each process, each of them with the same weight, and what the choices leave of the gain."""
    names = dict.fromkeys(name for process in processes for name in process)
    found = {name: median([process[name] for process in processes if name in process]) for name in names}
    return {**found, INTERACTION: found[GAIN] - sum(part for name, part in found.items() if name != GAIN)}


def _confirmed_alone(knobs: Configuration, trials: Sequence[Trial]) -> list[Measurement]:
    """The last confirmation of a plan of one choice, which has the step without it: as given."""
    confirmed = [
        trial.measurement for trial in trials if trial.source is Source.CONFIRM and trial.measurement is not None
    ]
    fitting = [found for found in confirmed if any(arm.knobs == knobs for arm in found.arms)]
    return fitting[-1:] if len(knobs) == 1 else []
