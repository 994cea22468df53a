"""Suggests how a step could use less memory, from the lifetimes and accesses of its tensors.

All numbers are computed from what was recorded. The cost of a suggestion in time is not estimated.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Final

from kitsune.memory.arena import ReusePlan
from kitsune.memory.timeline import Lifetime, Moment, peak_of

NAMED: Final = 3  # how many of the largest tensors are named
IDLERS: Final = 5  # the most idle tensors that are named


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A suggestion to reduce the memory of a step.

    `text`: the suggestion as a sentence. `names`: the tensors. `nbytes` depends on `kind`: "peak": bytes that these
    tensors hold at the peak; "idle": by how much the peak falls if this tensor is not in memory while unused; "reuse":
    by how much one arena is smaller than all tensors without reuse.
    """

    kind: str
    names: tuple[str, ...]
    nbytes: int
    text: str


def suggestions(
    lifetimes: Mapping[str, Lifetime],
    touched: Mapping[str, Sequence[int]],
    moments: Sequence[Moment],
    plan: ReusePlan,
) -> tuple[Suggestion, ...]:
    """The largest tensors at the peak, tensors idle there, and what an arena saves. Empty when nothing is alive."""
    peak = peak_of(moments)
    if not peak.nbytes:
        return ()
    alive = {name: each for name, each in lifetimes.items() if each.first <= peak.step <= each.last}
    largest = sorted(alive, key=lambda name: -alive[name].nbytes)[:NAMED]
    idle = (idle_at(peak, name, alive[name], touched[name], moments) for name in alive)
    most_first = sorted(filter(None, idle), key=lambda each: -each.nbytes)
    return (holders(peak, largest, alive), *most_first[:IDLERS], *reuse(plan))


def holders(peak: Moment, largest: Sequence[str], alive: Mapping[str, Lifetime]) -> Suggestion:
    held_bytes = sum(alive[name].nbytes for name in largest)
    named = ", ".join(f"{name} ({alive[name].nbytes:,} bytes)" for name in largest)
    text = (
        f"most memory is in use at step {peak.step}: {peak.nbytes:,} bytes in {len(alive)} tensors; "
        f"the largest hold {held_bytes:,} of them: {named}"
    )
    return Suggestion("peak", tuple(largest), held_bytes, text)


def idle_at(
    peak: Moment, name: str, lifetime: Lifetime, touched: Sequence[int], moments: Sequence[Moment]
) -> Suggestion | None:
    """A suggestion for a tensor that is alive but unused at the peak, if the peak falls without it; else None."""
    before, after = around(touched, peak.step)
    if before is None or before == peak.step:
        return None
    without = (moment.nbytes - (lifetime.nbytes if before < moment.step < after else 0) for moment in moments)
    saved_bytes = peak.nbytes - max(without)
    if not saved_bytes:
        return None
    until = f"between steps {before} and {after}" if after != inf else f"after step {before}, and kept to the end"
    text = (
        f"{name} ({lifetime.nbytes:,} bytes) is alive at the peak, but is not touched {until}: recomputing or "
        f"offloading it would lower the peak by {saved_bytes:,} bytes"
    )
    return Suggestion("idle", (name,), saved_bytes, text)


def around(touched: Sequence[int], step: int) -> tuple[int | None, float]:
    """The last access at or before this step (None if none), and the first after it (infinity if none)."""
    before = max((each for each in touched if each <= step), default=None)
    return before, min((each for each in touched if each > step), default=inf)


def reuse(plan: ReusePlan) -> Iterator[Suggestion]:
    saved_bytes = plan.naive_bytes - plan.arena_bytes
    if saved_bytes > 0:
        text = (
            f"one arena of {plan.arena_bytes:,} bytes holds what takes {plan.naive_bytes:,} bytes side by side; "
            "compute_reuse_plan() has the offsets"
        )
        yield Suggestion("reuse", tuple(plan.offsets), saved_bytes, text)
