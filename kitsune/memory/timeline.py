"""Lifetimes of tensors, and the bytes alive at each step."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True, slots=True)
class Lifetime:
    """The lifetime of a tensor of `nbytes` bytes: steps `first` to `last`, both included."""

    first: int
    last: int
    nbytes: int

    def overlaps(self, other: "Lifetime") -> bool:
        """Whether both are alive at the same step."""
        return self.first <= other.last and other.first <= self.last


@dataclass(frozen=True, slots=True)
class Moment:
    """`nbytes` bytes are alive at step `step`."""

    step: int
    nbytes: int


def timeline(lifetimes: Mapping[str, Lifetime], steps: Iterable[int]) -> tuple[Moment, ...]:
    """The bytes alive at these steps, in ascending order."""
    changes: dict[int, int] = dict.fromkeys(steps, 0)
    shown = sorted(changes)
    for lifetime in lifetimes.values():
        changes[lifetime.first] = changes.get(lifetime.first, 0) + lifetime.nbytes
        changes[lifetime.last + 1] = changes.get(lifetime.last + 1, 0) - lifetime.nbytes
    order = sorted(changes)
    alive = dict(zip(order, accumulate(changes[step] for step in order), strict=True))
    return tuple(Moment(step, alive[step]) for step in shown)


def peak_of(moments: Iterable[Moment]) -> Moment:
    """The first moment with the most bytes alive; step 0 with 0 bytes when there are none."""
    return max(moments, key=lambda moment: moment.nbytes, default=Moment(0, 0))
