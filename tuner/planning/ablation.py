"""A plan's choices and its trials in, what each choice gives out: leave-one-out. Pure.

What a choice gives is by how much a step without it is longer than one of the plan, each pair of blocks from one round
of one process, as a part of the plan's block: processes differ in speed, and a ratio does not see that. Every part is
turned into ms by the same step of the plan. Choices work together, so these do not add up to the gain of the plan: what
is missing is the interaction.

A choice that others need cannot go alone: what it gives is by how much a step without it and them is longer than one
without them.
"""

import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from operator import itemgetter
from typing import Final

from pydantic import Field

from kitsune.base.base_record import Record
from kitsune.knobs import KNOBS, Choice
from kitsune.plan import Interval
from tuner.measuring.protocol import ArmSpec
from tuner.records import Arm, FailureKind, Measurement, Source, Trial
from tuner.search.space import Configuration, Space
from tuner.statistics.block_statistics import MIN_BLOCKS, median
from tuner.statistics.plan_evidence import CANDIDATE, EAGER

#: How the arm is named that leaves a knob at its default.
WITHOUT: Final = "without "
#: Besides the step as given and the plan: each has a model of its own in the memory of one process.
MOST_LEFT_OUT: Final = 2
RESAMPLES: Final = 1000  # half of those for a verdict: a page waits for them, 40 ms for six choices
UNREACHED: Final = "the run ended before it was measured"
TOO_FEW: Final = "too few undisturbed blocks"

#: The knobs that are left out, one at a time, in one process.
Chunk = tuple[str, ...]
#: One resample: takes as many of the blocks of a process as there are, some of them several times.
Draw = Callable[[Sequence[float]], Sequence[float]]
#: Of one process: by block, what the step as given (`GAIN`) takes more than the plan, or the step without the knob, as
#: a part of the plan's block.
Excesses = Mapping[str, Sequence[float]]
GAIN: Final = "eager"
INTERACTION: Final = "interaction"


class Contribution(Record):
    """What one choice of a plan gives, all other choices but `beside` being there: negative when the step is slower."""

    knob: str
    choice: Choice
    beside: tuple[str, ...] = Field(default=(), description="knobs that need this one and were at their defaults too")
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


def without(knobs: Configuration, *left_out: str) -> dict[str, Choice]:
    return {name: choice for name, choice in knobs.items() if name not in left_out}


def companions(knobs: Configuration, space: Space) -> dict[str, tuple[str, ...]]:
    """For each knob that can be left out the others that have to go with it, as few as possible: of most none."""
    found = {}
    for knob in in_order(knobs):
        others = [name for name in in_order(knobs) if name != knob]
        sets = (some for size in range(len(knobs)) for some in combinations(others, size))
        fitting = (some for some in sets if all(is_allowed(knobs, gone, space) for gone in (some, (knob, *some))))
        if (fewest := next(fitting, None)) is not None:
            found[knob] = fewest
    return found


def is_allowed(knobs: Configuration, left_out: Collection[str], space: Space) -> bool:
    return space.allows(without(knobs, *left_out)) is None


def refusals(knobs: Configuration, space: Space) -> dict[str, str]:
    """The knobs that cannot be left out, also with others, each with the reason why not alone."""
    free = companions(knobs, space)
    rests = {knob: space.allows(without(knobs, knob)) for knob in in_order(knobs) if knob not in free}
    return {knob: reason for knob, reason in rests.items() if reason is not None}


def chunks(knobs: Configuration, space: Space) -> list[Chunk]:
    """What is to be measured together. Nothing of a single choice: without it is the step as given."""
    if len(knobs) < 2:
        return []
    found = companions(knobs, space)
    alone = [knob for knob, others in found.items() if not others]
    pairs: list[Chunk] = [tuple(alone[at : at + MOST_LEFT_OUT]) for at in range(0, len(alone), MOST_LEFT_OUT)]
    return [*pairs, *((knob,) for knob, others in found.items() if others)]


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


def arms_without(knobs: Configuration, chunk: Chunk, space: Space) -> tuple[ArmSpec, ...]:
    """The step as given, the plan without each knob of the chunk, and the plan.

    Before a knob that cannot go alone the plan without the others only, which is what it is compared with.
    """
    arms = [ArmSpec(name=EAGER)]
    found = companions(knobs, space)
    for knob in chunk:
        if others := found[knob]:
            arms.append(ArmSpec(name=f"{WITHOUT}{' and '.join(others)}", knobs=without(knobs, *others)))
        arms.append(ArmSpec(name=f"{WITHOUT}{knob}", knobs=without(knobs, knob, *others)))
    return *arms, ArmSpec(name=CANDIDATE, knobs=knobs)


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
    others = {knob: gone for measurement in told for knob, gone in left_out_too(knobs, measurement).items()}
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
                beside=others.get(knob, ()),
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
    return arm_of(measurement, knobs)


def excesses(knobs: Configuration, measurement: Measurement) -> dict[str, list[float]]:
    """Block by block. Without the only choice of a plan, its step is the step as given."""
    plan = plan_arm(knobs, measurement)
    eager = next(arm for arm in measurement.arms if not arm.knobs)
    found = {GAIN: excess(eager, plan, plan)}
    for knob, others in left_out_too(knobs, measurement).items():
        found[knob] = excess(arm_without(measurement, knob), arm_of(measurement, without(knobs, *others)), plan)
    if len(knobs) == 1:
        found |= dict.fromkeys(knobs, found[GAIN])
    return found


def left_out_too(knobs: Configuration, measurement: Measurement) -> dict[str, tuple[str, ...]]:
    """The knobs that were left out in a process, each with those that went with it."""
    left_out = (knob for knob in in_order(knobs) if any(arm.name == WITHOUT + knob for arm in measurement.arms))
    return {knob: tuple(in_order(without(knobs, knob, *arm_without(measurement, knob).knobs))) for knob in left_out}


def arm_without(measurement: Measurement, knob: str) -> Arm:
    return next(arm for arm in measurement.arms if arm.name == WITHOUT + knob)


def arm_of(measurement: Measurement, knobs: Configuration) -> Arm:
    return next(arm for arm in measurement.arms if arm.knobs == knobs)


def excess(slower: Arm, quicker: Arm, plan: Arm) -> list[float]:
    """Block by block, as a part of the plan's."""
    blocks = zip(slower.step_ms, quicker.step_ms, plan.step_ms, strict=True)
    return [(slow_ms - quick_ms) / plan_ms for slow_ms, quick_ms, plan_ms in blocks]


def intervals(processes: Sequence[Excesses], resamples: int = RESAMPLES, seed: int = 0) -> dict[str, Interval]:
    """Medians with their 95 % percentile bootstrap intervals, and what they leave of the gain.

    The blocks of a process are drawn together, all arms of a round or none: what disturbed a round hit them all. For
    the gain the processes are drawn too, as those that were measured are only some of those that could have been; a
    choice has no other process than its own.
    """
    rng = random.Random(seed)  # noqa: S311 - statistics, not secrets
    seen = with_interaction(*[medians(process) for process in processes])
    every = (draws(len(process[GAIN]), resamples, f"{seed} {index}") for index, process in enumerate(processes))
    drawn = redrawn_whole([redrawn_medians(*each) for each in zip(processes, every, strict=True)], rng)
    cut = resamples // 40
    found = {}
    for name, middle in seen.items():
        ordered = sorted(drawn[name])
        found[name] = Interval(median=middle, low=ordered[cut], high=ordered[-1 - cut])
    return found


@lru_cache(maxsize=16)
def draws(blocks: int, resamples: int, seed: str) -> tuple[Draw, ...]:
    """The same for all runs with so many blocks: to draw them took half of the time."""
    rng = random.Random(seed)  # noqa: S311 - statistics, not secrets
    return tuple(itemgetter(*rng.choices(range(blocks), k=blocks)) for _ in range(resamples))


def redrawn_medians(process: Excesses, drawn: Sequence[Draw]) -> Excesses:
    """By name the median of each resample."""
    return {name: [median(draw(values)) for draw in drawn] for name, values in process.items()}


def redrawn_whole(processes: Sequence[Excesses], rng: random.Random) -> Excesses:
    """What `with_interaction` gives of each resample, by name, in columns, which take less time than many records."""
    names = dict.fromkeys(name for process in processes for name in process)
    columns = {name: [process[name] for process in processes if name in process] for name in names}
    gains = [rng.choices(each, k=len(each)) for each in zip(*columns.pop(GAIN), strict=True)]
    parts = {name: list(map(median, zip(*found, strict=True))) for name, found in columns.items()}
    whole = list(map(median, gains))
    left = [gain - sum(each) for gain, *each in zip(whole, *parts.values(), strict=True)]
    return {GAIN: whole, **parts, INTERACTION: left}


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
    fitting = [
        found for found in confirmed if all(any(arm.knobs == each for arm in found.arms) for each in ({}, knobs))
    ]
    return fitting[-1:] if len(knobs) == 1 else []
