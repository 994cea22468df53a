"""LifetimeAnalyzer: which tensor is touched when goes in; out comes who is alive when, and an arena in which they fit.

Pure: names, bytes and order numbers, whatever they stand for.
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
    """What has a launch graph, as `kitsune.launches.model.recording.Recording`."""

    @property
    def graph(self) -> LaunchGraph: ...


class LifetimeAnalyzer:
    """Collects which tensors are touched at which steps. A step is an order number: larger is later, gaps are fine."""

    def __init__(self) -> None:
        self._nbytes: dict[str, int] = {}
        self._touched: dict[str, list[int]] = {}  # sorted, each step once
        self._kept: set[str] = set()

    @classmethod
    def of(cls, recorded: LaunchGraph | Recorded) -> Self:
        """The storages that a step makes, each touched by its launches; step numbers are those of the launches.

        What was there before the step (parameters, inputs) is left out: it is alive all the time. Storages are named
        by their number and the launch that makes them, as "3 aten.relu".
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
        """Tensor `name`, of so many bytes, is read or written at this step. Steps may come in any order.

        Raises SettingsError when the bytes are negative or not those of an earlier call.
        """
        if nbytes < 0 or self._nbytes.setdefault(name, nbytes) != nbytes:
            known = f"it had {self._nbytes[name]:,} before" if name in self._nbytes else "there are no negative sizes"
            raise SettingsError(f"tensor {name!r} was recorded with {nbytes:,} bytes at step {step}; {known}")
        touched = self._touched.setdefault(name, [])
        if step not in touched:
            insort(touched, step)

    def keep(self, name: str) -> None:
        """The tensor is needed after the last step too. Raises SettingsError when it was never touched."""
        if name not in self._touched:
            raise SettingsError(f"tensor {name!r} was never recorded; call record_usage first")
        self._kept.add(name)

    def lifetimes(self) -> dict[str, Lifetime]:
        """For every tensor, by name, from its first to its last touch; of one that is kept, to the last step of all."""
        end = max((touched[-1] for touched in self._touched.values()), default=0)
        return {
            name: Lifetime(touched[0], end if name in self._kept else touched[-1], self._nbytes[name])
            for name, touched in self._touched.items()
        }

    def live_at(self, step: int) -> tuple[str, ...]:
        """The names of the tensors that must be there at this step, as they were first recorded."""
        return tuple(name for name, each in self.lifetimes().items() if each.first <= step <= each.last)

    def timeline(self) -> tuple[Moment, ...]:
        """The bytes alive at every step that was recorded, in ascending order."""
        steps = {step for touched in self._touched.values() for step in touched}
        return timeline(self.lifetimes(), steps)

    def peak_bytes(self) -> int:
        """The most bytes alive at once; 0 where nothing was recorded."""
        return peak_of(self.timeline()).nbytes

    def compute_reuse_plan(self, alignment_bytes: int = BLOCK_BYTES) -> ReusePlan:
        """An offset for every tensor in one arena, so that no two that are alive at the same step share a byte.

        Greedy by size, see `kitsune.memory.arena`. Tensors begin at multiples of `alignment_bytes`; 512 is what torch's
        allocator aligns to on a GPU. Raises SettingsError when it is below one.
        """
        return plan_arena(self.lifetimes(), self.peak_bytes(), alignment_bytes)

    def get_optimization_suggestions(self) -> tuple[Suggestion, ...]:
        """What holds the peak, which tensors are idle there, and what one arena would save, in bytes as recorded."""
        return suggestions(self.lifetimes(), self._touched, self.timeline(), self.compute_reuse_plan())
