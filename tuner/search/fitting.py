"""Proposals for a search with a memory limit: what was too large, made smaller in two ways.

More of it is computed again (`recompute`), on one stream where that may do; or its batch is split (`accumulation`). The
choices of both are tried by how much they are expected to save. The first one is picked by the part of the measured
peak that the limit leaves; then come stronger ones, until one fits or none is left.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from kitsune.knobs import SHARES_KEPT, Choice
from tuner.records import Source, Trial
from tuner.search.outcomes import is_caused_by_choices, is_too_large
from tuner.search.presets import is_stock
from tuner.search.proposal import Proposal
from tuner.search.space import Configuration, Space

RECOMPUTE: Final = "recompute"
SPLIT: Final = "accumulation"
#: From the weakest to the strongest, with the part of the whole peak that each is expected to leave: weights, gradients
#: and states stay, which are half of the peak of a transformer with a batch that fills a GPU, so a first guess only.
LADDER: Final[tuple[tuple[Choice, float], ...]] = (
    ("off", 1.0),
    ("keep-75", 0.9),
    ("keep-50", 0.75),
    ("keep-30", 0.65),
    ("blocks-keep-attention", 0.5),
    ("blocks", 0.0),
)
#: The least part of a peak on several streams that one stream needs.
ONE_STREAM: Final = 0.8
OF_STREAMS: Final = ("streams", "pool_bytes")
#: Sources of what is made smaller; proposals of a model that were too large are left to the model.
PRESETS: Final = (Source.BASELINE, Source.STOCK, Source.KNOWN, Source.SEED)
STRENGTHS: Final = {choice: strength for strength, (choice, _) in enumerate(LADDER)}
#: Part of a peak that does not shrink with the batch, for a first guess.
FIXED: Final = 0.4


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """`is_random`: whether the step draws random numbers, so that shares of a compiled step do not apply. `rows`: of
    the batch; None if they are not known."""

    limit_bytes: int
    is_random: bool = False
    rows: int | None = None


def fitting(space: Space, trials: Sequence[Trial], limit: MemoryLimit) -> Iterator[Proposal]:
    """What saves memory, for each preset that was too large: those of plain torch first, the step as given last."""
    large = [trial for trial in trials if is_too_large(trial) and trial.source in PRESETS]
    failed = {space.key(trial.knobs) for trial in filter(is_caused_by_choices, trials)}
    for trial in sorted(large, key=lambda trial: (not trial.knobs, not is_stock(trial.knobs))):
        for ways in (split(space, trial, limit), smaller(space, trial, limit)):
            # One that fits ends it, and one that is too large again is made smaller itself.
            knobs = next((each for each in ways if space.key(each) not in failed), None)
            if knobs is not None:
                yield Proposal(knobs, Source.STOCK if is_stock(knobs) else Source.SEED, "to fit into the memory")


def split(space: Space, trial: Trial, limit: MemoryLimit) -> Iterator[dict[str, Choice]]:
    """The configuration with the batch in more parts, the first guess first. At most as many as the batch has rows."""
    now = int(trial.knobs.get(SPLIT, 1))
    most = math.inf if limit.rows is None else limit.rows
    counts = [int(count) for count in space.choices(SPLIT) if now < int(count) <= most]
    reached = left_of(trial, limit) * (FIXED + (1 - FIXED) / now)
    guesses = [count for count in counts if FIXED + (1 - FIXED) / count <= reached]
    for count in guesses + [count for count in reversed(counts) if count not in guesses]:
        knobs = space.repair({**trial.knobs, SPLIT: count}, keep=SPLIT)
        if knobs.get(SPLIT) == count:
            yield knobs


def left_of(trial: Trial, limit: MemoryLimit) -> float:
    """The part of the trial's peak that the limit leaves; 0 of what ran out of memory, whose peak is not known."""
    peak_bytes = trial.failure.peak_bytes if trial.failure else None
    return limit.limit_bytes / peak_bytes if peak_bytes else 0.0


def smaller(space: Space, trial: Trial, limit: MemoryLimit) -> Iterator[dict[str, Choice]]:
    """The configuration on one stream where that may do, then with stronger recomputation.

    What ran out of memory has no known peak, so it begins with the strongest.
    """
    left = left_of(trial, limit)
    if "streams" in trial.knobs and left >= ONE_STREAM:
        yield space.repair({name: choice for name, choice in trial.knobs.items() if name not in OF_STREAMS})
    for choice in stronger(trial.knobs.get(RECOMPUTE, "off"), left, is_random=limit.is_random):
        knobs = space.repair({**trial.knobs, RECOMPUTE: choice}, keep=RECOMPUTE)
        if knobs.get(RECOMPUTE) == choice:
            yield knobs


def stronger(now: Choice, left: float, *, is_random: bool) -> list[Choice]:
    """The choices to try after `now`, the first guess first. `left`: the part of its peak that the limit leaves."""
    place = STRENGTHS[now]
    after = [each for each in LADDER[place + 1 :] if not (is_random and each[0] in SHARES_KEPT)]
    guesses = [choice for choice, part in after if part <= left * LADDER[place][1]]
    return guesses + [choice for choice, _ in reversed(after) if choice not in guesses]


def is_known_too_large(knobs: Configuration, trials: Sequence[Trial]) -> bool:
    """Whether the same configuration with as much or more recomputation, in as many or more parts, was too large."""
    return any(
        is_too_large(trial)
        and others(trial.knobs) == others(knobs)
        and strength(knobs) <= strength(trial.knobs)
        and int(knobs.get(SPLIT, 1)) <= int(trial.knobs.get(SPLIT, 1))
        for trial in trials
    )


def others(knobs: Configuration) -> dict[str, Choice]:
    return {name: choice for name, choice in knobs.items() if name not in (RECOMPUTE, SPLIT)}


def strength(knobs: Configuration) -> int:
    return STRENGTHS[knobs.get(RECOMPUTE, "off")]
