"""LifetimeAnalyzer: lifetimes of tensors from their recorded accesses, peak memory, and an arena plan.

It works on names, bytes and step numbers only, so they may stand for anything.
"""

from bisect import insort
from typing import Protocol, Self

from kitsune.errors import SettingsError
from kitsune.launches.model.launch_graph import LaunchGraph
from kitsune.launches.planning.memory_plan import BLOCK_BYTES
from kitsune.memory.arena import ReusePlan, plan_arena
from kitsune.memory.suggestion import Suggestion, suggestions
from kitsune.memory.timeline import Lifetime, Moment, peak_of, timeline


class Recorded(Protocol):
    """An object with a launch graph, such as `kitsune.launches.model.recording.Recording`."""

    @property
    def graph(self) -> LaunchGraph: ...


class LifetimeAnalyzer:
    """Records which tensors are accessed at which steps. A step is any integer; a larger one is later."""

    def __init__(self) -> None:
        self._nbytes: dict[str, int] = {}
        self._touched: dict[str, list[int]] = {}  # sorted, each step once
        self._kept: set[str] = set()

    @classmethod
    def of(cls, recorded: LaunchGraph | Recorded) -> Self:
        """An analyzer of the storages that a training step allocates; its steps are the indices of the launches.

        Storages that exist before (parameters, inputs) are left out, since they are always alive. Storages are named by
        their number and the launch that allocates them, as "3 aten.relu".
        """
        graph = recorded if isinstance(recorded, LaunchGraph) else recorded.graph
        analyzer = cls()
        for number, (storage, touchers) in enumerate(zip(graph.storages, graph.touchers(), strict=True)):
            if not storage.is_own or not touchers:
                continue
            name = f"{number} {graph.launches[touchers[0]].name}"
            for launch in touchers:
                analyzer.record_usage(name, storage.nbytes, launch)
            if storage.is_kept:
                analyzer.keep(name)
        return analyzer

    def record_usage(self, name: str, nbytes: int, step: int) -> None:
        """Records that the tensor `name` of `nbytes` bytes is read or written at this step, in any order.

        Raises SettingsError when `nbytes` is negative or differs from an earlier call.
        """
        if nbytes < 0 or self._nbytes.setdefault(name, nbytes) != nbytes:
            known = f"it had {self._nbytes[name]:,} before" if name in self._nbytes else "there are no negative sizes"
            raise SettingsError(f"tensor {name!r} was recorded with {nbytes:,} bytes at step {step}; {known}")
        touched = self._touched.setdefault(name, [])
        if step not in touched:
            insort(touched, step)

    def keep(self, name: str) -> None:
        """Marks a tensor as needed after the last step. Raises SettingsError when it was never recorded."""
        if name not in self._touched:
            raise SettingsError(f"tensor {name!r} was never recorded; call record_usage first")
        self._kept.add(name)

    def lifetimes(self) -> dict[str, Lifetime]:
        """Name -> lifetime, from first to last access; for tensors marked by `keep` to the last step of all."""
        end = max((touched[-1] for touched in self._touched.values()), default=0)
        return {
            name: Lifetime(touched[0], end if name in self._kept else touched[-1], self._nbytes[name])
            for name, touched in self._touched.items()
        }

    def live_at(self, step: int) -> tuple[str, ...]:
        """The names of the tensors alive at this step, in the order in which they were first recorded."""
        return tuple(name for name, each in self.lifetimes().items() if each.first <= step <= each.last)

    def timeline(self) -> tuple[Moment, ...]:
        """The bytes alive at every recorded step, in ascending order."""
        steps = {step for touched in self._touched.values() for step in touched}
        return timeline(self.lifetimes(), steps)

    def peak_bytes(self) -> int:
        """The most bytes alive at once; 0 when nothing was recorded."""
        return peak_of(self.timeline()).nbytes

    def compute_reuse_plan(self, alignment_bytes: int = BLOCK_BYTES) -> ReusePlan:
        """An offset for every tensor in one arena, so that no two that are alive at the same step share a byte.

        Greedy by size, see `kitsune.memory.arena`. Offsets are multiples of `alignment_bytes`; torch's allocator aligns
        to 512 on a GPU. Raises SettingsError when it is below 1.
        """
        return plan_arena(self.lifetimes(), self.peak_bytes(), alignment_bytes)

    def get_optimization_suggestions(self) -> tuple[Suggestion, ...]:
        """The largest tensors at the peak, tensors idle there, and what one arena saves, in bytes."""
        return suggestions(self.lifetimes(), self._touched, self.timeline(), self.compute_reuse_plan())
