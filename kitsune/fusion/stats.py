"""FusionStats: which pattern matches in a model's graphs were replaced, and which were not."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Benefit:
    """Milliseconds of forward and backward for the nodes of a match, and for the kernel that replaces them."""

    original_ms: float
    fused_ms: float

    @property
    def ratio(self) -> float:
        return self.original_ms / self.fused_ms


@dataclass(frozen=True, slots=True)
class Kept:
    """A match that was replaced: `operations` nodes became one. `benefit` is None if it was not measured."""

    pattern: str
    operations: int
    benefit: Benefit | None


@dataclass(frozen=True, slots=True)
class Refused:
    """A match or a near miss that was not replaced, with the reason."""

    pattern: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class FusionStats:
    """The result of a FusionEngine over all its graphs.

    `operations_before` and `operations_after`: calls in all graphs. `launches_before` and `launches_after`: kernels
    that the GPU ran, forward and backward, for the graphs with a replacement: unmodified and eager, and fused. They are
    None where launches are not counted: on a CPU, and in the step of a plan. `notes`: why nothing was fused or counted.
    """

    kept: tuple[Kept, ...] = ()
    refused: tuple[Refused, ...] = ()
    operations_before: int = 0
    operations_after: int = 0
    launches_before: int | None = None
    launches_after: int | None = None
    notes: tuple[str, ...] = field(default=())

    @property
    def matches(self) -> Mapping[str, int]:
        """How often each pattern was replaced."""
        return dict(Counter(one.pattern for one in self.kept))

    def __str__(self) -> str:
        found = ", ".join(f"{name} {count} times" for name, count in self.matches.items()) or "nothing"
        text = f"replaced {found}; {self.operations_before} operations became {self.operations_after}"
        if self.launches_before is not None:
            text += f", {self.launches_before} launches became {self.launches_after}"
        refused = Counter(one.pattern for one in self.refused)
        reasons = {one.pattern: one.reason for one in self.refused}
        told = ", ".join(f"{name} {count} times ({reasons[name]})" for name, count in refused.items())
        return f"{text}; refused {told}" if told else text
