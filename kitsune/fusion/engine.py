"""FusionEngine: a model or function in, the same with kernels of ours in it out, where these are faster."""

from collections.abc import Callable
from typing import Any, Final, Literal

import torch
import torch._inductor
from torch.fx import GraphModule
from triton.errors import TritonError

from kitsune.errors import SettingsError
from kitsune.fusion.benefit import Clock, benefit_of, side_by_side_ms
from kitsune.fusion.config import FusionConfig
from kitsune.fusion.match import Match
from kitsune.fusion.operations import value_of
from kitsune.fusion.patterns import PATTERNS, Pattern
from kitsune.fusion.rewrite import rewrite
from kitsune.fusion.stats import Benefit, FusionStats, Kept, Refused

Compiler = Literal["eager", "inductor"]
COMPILERS: Final = ("eager", "inductor")
NO_GPU: Final = "nothing was fused: kernels of ours run on a GPU, and the graph is on a CPU"


class FusionEngine:
    """Replaces patterns in the graphs that torch.compile captures; the rest runs eagerly, or goes to Inductor.

        fused = FusionEngine().fuse(model)
        loss = fused(x).sum()

    Parameters stay the model's own. A match is kept where its kernel, forward and backward, is measured to be
    `min_fusion_benefit` times as fast on this device as what it replaces, as `compiler` runs that. `clock` times
    otherwise than on the GPU: tests decide by one. Raises SettingsError for a compiler that there is not.
    """

    def __init__(
        self,
        config: FusionConfig | None = None,
        *,
        compiler: Compiler = "eager",
        clock: Clock | None = None,
    ) -> None:
        if compiler not in COMPILERS:
            raise SettingsError(f"compiler is {compiler!r}; use 'eager' or 'inductor'")
        self.config = config or FusionConfig()
        self.compiler: Compiler = compiler
        self._clock = clock
        self._patterns = list(PATTERNS)
        self._kept: list[Kept] = []
        self._refused: list[Refused] = []
        self._operations = [0, 0]
        self._notes: dict[str, None] = {}

    def fuse(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A model or a function as torch.compile gives it back: fused at its first call with tensors of a shape."""
        return torch.compile(function, backend=self._compile, dynamic=False)

    def register_pattern(self, pattern: Pattern) -> None:
        """Looked for before those of ours, and in the place of one of the same name."""
        others = [one for one in self._patterns if one.name != pattern.name]
        self._patterns = [pattern, *others]

    def get_fusion_stats(self) -> FusionStats:
        """Of all graphs so far."""
        before, after = self._operations
        return FusionStats(
            kept=tuple(self._kept),
            refused=tuple(self._refused),
            operations_before=before,
            operations_after=after,
            notes=tuple(self._notes),
        )

    def rewrite(self, graph: GraphModule) -> GraphModule:
        """The graph with what is worth it replaced, in place."""
        clock = self._clock_for(graph)
        if clock is None:
            self._notes[NO_GPU] = None
            return graph

        def judge(pattern: Pattern, match: Match) -> Benefit | str:
            return self._judge(pattern, match, clock)

        enabled = [pattern for pattern in self._patterns if pattern.is_enabled(self.config)]
        done = rewrite(graph, enabled, judge)
        self._kept += done.kept
        self._refused += done.refused
        self._operations[0] += done.operations_before
        self._operations[1] += done.operations_after
        return done.graph

    def _clock_for(self, graph: GraphModule) -> Clock | None:
        if self._clock is not None:
            return self._clock
        values = (value_of(node) for node in graph.graph.nodes)
        is_on_gpu = any(isinstance(value, torch.Tensor) and value.is_cuda for value in values)
        return side_by_side_ms if is_on_gpu else None

    def _judge(self, pattern: Pattern, match: Match, clock: Clock) -> Benefit | str:
        size, most, least = len(match.nodes), self.config.max_fusion_size, self.config.min_fusion_benefit
        if size > most:
            return f"{size} operations are more than max_fusion_size={most}"
        try:
            benefit = benefit_of(pattern.name, match, self.compiler, clock)
        except (RuntimeError, TritonError) as error:
            return f"it could not be measured: {str(error).partition(chr(10))[0]}"
        if benefit.ratio < least:
            return f"{benefit.ratio:.2f} times as fast, and min_fusion_benefit={least:g}"
        return benefit

    def _compile(self, graph: GraphModule, inputs: list[Any]) -> Any:
        graph = self.rewrite(graph)
        return torch._inductor.compile(graph, inputs) if self.compiler == "inductor" else graph.forward
