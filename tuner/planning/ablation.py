"""Leave-one-out ablation: how much each choice of a plan contributes to its gain.

The contribution of a choice is the extra time of a step without it over a step of the plan. It is computed per pair of
blocks from the same round of the same process, relative to the plan's block, because processes differ in speed and a
ratio cancels that. All relative values are converted to ms with the same step time of the plan. Choices interact, so
contributions do not add up to the gain of the plan; the difference is the interaction.

A choice that other choices depend on cannot be left out alone. Its contribution is the extra time of a step without it
and its dependents over a step without only the dependents.
"""

import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from operator import itemgetter
from statistics import median
from typing import Final

from pydantic import Field

from kitsune.base.base_record import Record
from kitsune.knobs import KNOBS, Choice
from kitsune.plan import Interval
from tuner.measuring.protocol import ArmSpec
from tuner.planning.pace import own_s
from tuner.records import Arm, FailureKind, Measurement, Source, Trial
from tuner.search.space import Configuration, Space
from tuner.statistics.block_statistics import MIN_BLOCKS
from tuner.statistics.plan_evidence import CANDIDATE, EAGER

#: Prefix of the name of an arm that leaves a knob at its default.
WITHOUT: Final = "without "
#: Ablated arms in one process, beside the step as given and the plan. Each arm keeps its own model in memory.
MOST_LEFT_OUT: Final = 2
RESAMPLES: Final = 1000  # half as many as for a verdict, because a page waits for them: 40 ms for six choices
UNREACHED: Final = "the run ended before it was measured"
TOO_FEW: Final = "too few undisturbed blocks"

#: Knobs that are measured in the same process, each left out in an arm of its own.
Chunk = tuple[str, ...]
#: One bootstrap resample: draws n blocks with replacement from the n blocks of a process.
Draw = Callable[[Sequence[float]], Sequence[float]]
#: Extra time per block in one process, relative to the plan's block. Keys: `GAIN` for the step as given, else the knob
#: that was left out.
Excesses = Mapping[str, Sequence[float]]
GAIN: Final = "eager"
INTERACTION: Final = "interaction"


class Contribution(Record):
    """Time saved by one choice of a plan while all others except `beside` are active. Negative: it slows the step."""

    knob: str
    choice: Choice
    beside: tuple[str, ...] = Field(default=(), description="knobs that depend on this one, also at their defaults")
    saved_ms: Interval = Field(description="extra time of a step without the choice, scaled to plan_ms")
    share: float | None = Field(description="fraction of the whole gain; null when the plan gained nothing here")


class Ablation(Record):
    """Contributions of the choices of a plan. Medians satisfy eager_ms - contributions - interaction_ms = plan_ms.

    `interaction_ms` is the gain minus the contributions. Positive: choices replace each other, so leaving out one of
    them hides its effect. Negative: choices depend on each other, so their common effect is counted in more than one
    contribution. Choices that were not measured are included in it.
    """

    eager_ms: float
    plan_ms: float
    gain_ms: Interval
    contributions: tuple[Contribution, ...] = Field(description="in the order of the knobs table")
    interaction_ms: Interval
    unmeasured: Mapping[str, str] = Field(description="knob of the plan -> why it has no contribution")
    blocks: int = Field(ge=1, description="timed blocks of the plan, over all processes with enough blocks")


@dataclass(frozen=True, slots=True)
class AblationProgress:
    """Progress of an ablation: the chunk that each finished trial measured, in order, and the chunks still to do."""

    ended: tuple[tuple[Chunk, Trial], ...]
    pending: tuple[Chunk, ...]


# What to measure ------------------------------------------------------------------------------------------------------


def without(knobs: Configuration, *left_out: str) -> dict[str, Choice]:
    return {name: choice for name, choice in knobs.items() if name not in left_out}


def companions(knobs: Configuration, space: Space) -> dict[str, tuple[str, ...]]:
    """For each knob that can be left out: the smallest set of other knobs to leave out with it, usually empty."""
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
    """Knobs that cannot be left out, even together with others -> the reason why not alone."""
    free = companions(knobs, space)
    rests = {knob: space.allows(without(knobs, knob)) for knob in in_order(knobs) if knob not in free}
    return {knob: reason for knob, reason in rests.items() if reason is not None}


def chunks(knobs: Configuration, space: Space) -> list[Chunk]:
    """Knobs grouped by process. Empty for a plan of one choice: without it, the step is the one as given."""
    if len(knobs) < 2:
        return []
    found = companions(knobs, space)
    alone = [knob for knob, others in found.items() if not others]
    pairs: list[Chunk] = [tuple(alone[at : at + MOST_LEFT_OUT]) for at in range(0, len(alone), MOST_LEFT_OUT)]
    return [*pairs, *((knob,) for knob, others in found.items() if others)]


def progress_of(knobs: Configuration, trials: Iterable[Trial], space: Space) -> AblationProgress:
    """The trials of this plan's ablation, by number, each with the chunk that it measured.

    A chunk of two that failed is split into two chunks, which need less memory; not after a timeout.
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
    return AblationProgress(tuple(ended), tuple(pending))


def next_chunk(knobs: Configuration, trials: Iterable[Trial], space: Space) -> Chunk | None:
    """The next chunk to measure, or None when all are done."""
    return next(iter(progress_of(knobs, trials, space).pending), None)


def arms_without(knobs: Configuration, chunk: Chunk, space: Space) -> tuple[ArmSpec, ...]:
    """The arms of one process: the step as given, the plan without each knob of the chunk, and the plan.

    A knob that cannot be left out alone is preceded by its baseline: the plan without only its dependents.
    """
    arms = [ArmSpec(name=EAGER)]
    found = companions(knobs, space)
    for knob in chunk:
        if others := found[knob]:
            arms.append(ArmSpec(name=f"{WITHOUT}{' and '.join(others)}", knobs=without(knobs, *others)))
        arms.append(ArmSpec(name=f"{WITHOUT}{knob}", knobs=without(knobs, knob, *others)))
    return *arms, ArmSpec(name=CANDIDATE, knobs=knobs)


def expected_s(knobs: Configuration, chunk: Chunk, trials: Iterable[Trial], space: Space) -> float:
    """Expected time of measuring the chunk: that of the plan's own trial for each arm but the step as given."""
    of_plan = [own_s(trial) for trial in trials if trial.source.is_search and trial.knobs == knobs]
    return (len(arms_without(knobs, chunk, space)) - 1) * max(of_plan, default=0.0)


def in_order(knobs: Configuration) -> list[str]:
    return [name for name in KNOBS if name in knobs]


# What was measured ----------------------------------------------------------------------------------------------------


def ablation_of(
    knobs: Configuration, trials: Sequence[Trial], inapplicable: Mapping[str, str] | None = None
) -> Ablation | None:
    """The ablation of the run's plan from the trials of the run; None when no trial has enough blocks.

    `inapplicable` is `Run.inapplicable`.
    """
    measurements = measurements_of(knobs, trials, inapplicable)
    return contributions(knobs, measurements, reasons_of(knobs, trials, inapplicable))


def measurements_of(
    knobs: Configuration, trials: Sequence[Trial], inapplicable: Mapping[str, str] | None = None
) -> list[Measurement]:
    ended = progress_of(knobs, trials, Space.of(inapplicable)).ended
    return [trial.measurement for _, trial in ended if trial.measurement] or _confirmed_alone(knobs, trials)


def reasons_of(
    knobs: Configuration, trials: Sequence[Trial], inapplicable: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Knob of the run's plan -> why it was not measured. Knobs that were not reached are missing."""
    space = Space.of(inapplicable)
    ended = progress_of(knobs, trials, space).ended
    failed = {knob: trial.failure.reason for chunk, trial in ended if trial.failure for knob in chunk}
    few = too_few(knobs, measurements_of(knobs, trials, inapplicable))
    return {**failed, **few, **refusals(knobs, space)}


def contributions(
    knobs: Configuration, measurements: Sequence[Measurement], reasons: Mapping[str, str] | None = None
) -> Ablation | None:
    """The ablation from measurements with the arms of `arms_without`; None when none has enough blocks.

    Each choice is compared with the plan in the same process. For the gain, all processes have equal weight.
    `reasons`: knob -> why it was not measured.
    """
    usable = [measurement for measurement in measurements if has_enough(knobs, measurement)]
    if not usable:
        return None
    plans = [arm_of(measurement, knobs) for measurement in usable]
    plan_ms = median([median(arm.step_ms) for arm in plans])
    parts = intervals([excesses(knobs, measurement) for measurement in usable])
    others = {knob: gone for measurement in usable for knob, gone in left_out_too(knobs, measurement).items()}
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
    return len(arm_of(measurement, knobs).step_ms) >= MIN_BLOCKS


def too_few(knobs: Configuration, measurements: Iterable[Measurement]) -> dict[str, str]:
    """Knobs that were left out in a process with too few blocks -> the reason."""
    short = [measurement for measurement in measurements if not has_enough(knobs, measurement)]
    return {knob: TOO_FEW for measurement in short for knob in excesses(knobs, measurement) if knob != GAIN}


def in_ms(part: Interval, plan_ms: float) -> Interval:
    return Interval(median=part.median * plan_ms, low=part.low * plan_ms, high=part.high * plan_ms)


def excesses(knobs: Configuration, measurement: Measurement) -> dict[str, list[float]]:
    """Extra time per block and knob. A plan of one choice without that choice is the step as given."""
    plan = arm_of(measurement, knobs)
    eager = next(arm for arm in measurement.arms if not arm.knobs)
    found = {GAIN: excess(eager, plan, plan)}
    for knob, others in left_out_too(knobs, measurement).items():
        found[knob] = excess(arm_without(measurement, knob), arm_of(measurement, without(knobs, *others)), plan)
    if len(knobs) == 1:
        found |= dict.fromkeys(knobs, found[GAIN])
    return found


def left_out_too(knobs: Configuration, measurement: Measurement) -> dict[str, tuple[str, ...]]:
    """Each knob that was left out in a process, with the knobs that were left out with it."""
    left_out = (knob for knob in in_order(knobs) if any(arm.name == WITHOUT + knob for arm in measurement.arms))
    return {knob: tuple(in_order(without(knobs, knob, *arm_without(measurement, knob).knobs))) for knob in left_out}


def arm_without(measurement: Measurement, knob: str) -> Arm:
    return next(arm for arm in measurement.arms if arm.name == WITHOUT + knob)


def arm_of(measurement: Measurement, knobs: Configuration) -> Arm:
    return next(arm for arm in measurement.arms if arm.knobs == knobs)


def excess(slower: Arm, quicker: Arm, plan: Arm) -> list[float]:
    """`slower` minus `quicker` per block, relative to the plan's block."""
    blocks = zip(slower.step_ms, quicker.step_ms, plan.step_ms, strict=True)
    return [(slow_ms - quick_ms) / plan_ms for slow_ms, quick_ms, plan_ms in blocks]


def intervals(processes: Sequence[Excesses], resamples: int = RESAMPLES, seed: int = 0) -> dict[str, Interval]:
    """Median and 95 % percentile bootstrap interval of each excess, and of the interaction.

    Rounds are resampled as a whole, with all their arms, because a disturbance hits every arm of a round. For the gain,
    processes are resampled too, since they are a sample of all possible processes. A choice is measured in one process
    only.
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
    """Cached resamples, shared by all processes with this number of blocks: drawing took half of the time."""
    rng = random.Random(seed)  # noqa: S311 - statistics, not secrets
    return tuple(itemgetter(*rng.choices(range(blocks), k=blocks)) for _ in range(resamples))


def redrawn_medians(process: Excesses, drawn: Sequence[Draw]) -> Excesses:
    """Name -> the median of each resample."""
    return {name: [median(draw(values)) for draw in drawn] for name, values in process.items()}


def redrawn_whole(processes: Sequence[Excesses], rng: random.Random) -> Excesses:
    """`with_interaction` of every resample, computed in columns per name because that is faster than row by row."""
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
    """Medians over the processes, with equal weights, and the interaction: the gain minus all contributions."""
    names = dict.fromkeys(name for process in processes for name in process)
    found = {name: median([process[name] for process in processes if name in process]) for name in names}
    return {**found, INTERACTION: found[GAIN] - sum(part for name, part in found.items() if name != GAIN)}


def _confirmed_alone(knobs: Configuration, trials: Sequence[Trial]) -> list[Measurement]:
    """For a plan of one choice: its last confirmation, which timed the step as given and so the plan without it."""
    confirmed = [
        trial.measurement for trial in trials if trial.source is Source.CONFIRM and trial.measurement is not None
    ]
    fitting = [
        found for found in confirmed if all(any(arm.knobs == each for arm in found.arms) for each in ({}, knobs))
    ]
    return fitting[-1:] if len(knobs) == 1 else []
