"""Assigns tensors offsets in one arena so that no two that are alive at the same time overlap.

"Greedy by Size for Offset Calculation" of Yury Pisarchyk and Juhyun Lee, "Efficient Memory Management for Deep Neural
Net Inference", 2020 (arXiv:2001.03288): the largest tensor first, each into the smallest gap that it fits into.
"""

from bisect import insort
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kitsune.errors import SettingsError
from kitsune.memory.geometry import rounded_up
from kitsune.memory.timeline import Lifetime


@dataclass(frozen=True, slots=True)
class ReusePlan:
    """The offsets of tensors in an arena, in bytes.

    `arena_bytes`: size of the arena. `peak_bytes`: the most bytes alive at once, a lower bound for every plan.
    `naive_bytes`: all tensors without reuse, aligned as in the arena.
    """

    offsets: Mapping[str, int]
    arena_bytes: int
    peak_bytes: int
    naive_bytes: int


def plan_arena(lifetimes: Mapping[str, Lifetime], peak_bytes: int, alignment_bytes: int) -> ReusePlan:
    """A reuse plan. Offsets are multiples of `alignment_bytes`. Raises SettingsError when that is below 1."""
    if alignment_bytes < 1:
        raise SettingsError(f"alignment_bytes is {alignment_bytes!r}; it must be at least 1")
    placed: list[tuple[int, int, Lifetime]] = []  # begin, number, lifetime; by begin
    offsets: dict[str, int] = {}
    by_size = sorted(lifetimes.items(), key=lambda item: (-item[1].nbytes, item[1].first, item[0]))
    for number, (name, lifetime) in enumerate(by_size):
        taken = ((begin, begin + other.nbytes) for begin, _, other in placed if other.overlaps(lifetime))
        offsets[name] = best_gap(taken, lifetime.nbytes, alignment_bytes)
        insort(placed, (offsets[name], number, lifetime))
    return ReusePlan(
        offsets={name: offsets[name] for name in lifetimes},
        arena_bytes=max((begin + lifetime.nbytes for begin, _, lifetime in placed), default=0),
        peak_bytes=peak_bytes,
        naive_bytes=sum(rounded_up(lifetime.nbytes, alignment_bytes) for lifetime in lifetimes.values()),
    )


def best_gap(taken: Iterable[tuple[int, int]], nbytes: int, alignment_bytes: int) -> int:
    """The start of the smallest gap that fits between the taken spans (sorted by start), else their end."""
    best: tuple[int, int] | None = None  # size, begin
    end = 0
    for begin, its_end in taken:
        gap = begin - end
        if gap >= nbytes and (best is None or gap < best[0]):
            best = gap, end
        end = max(end, rounded_up(its_end, alignment_bytes))
    return end if best is None else best[1]
