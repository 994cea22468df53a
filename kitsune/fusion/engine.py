"""FusionEngine: replaces patterns in a model or function by Kitsune's kernels, where these are faster."""

from collections.abc import Callable
from typing import Any, Final, Literal

import torch
from torch.fx import GraphModule
from triton.errors import TritonError

from kitsune.capture.compile_isolation import own_code
from kitsune.device.backend import first_line
from kitsune.errors import SURPRISES, CaptureError, SettingsError
from kitsune.fusion.benefit import Clock, backward_at_once, benefit_of, made, side_by_side_ms
from kitsune.fusion.config import FusionConfig
from kitsune.fusion.launches import Counter, counter_of, launches_of, twin_of
from kitsune.fusion.match import Match
from kitsune.fusion.operations import value_of
from kitsune.fusion.patterns import PATTERNS, Pattern
from kitsune.fusion.rewrite import rewrite
from kitsune.fusion.stats import Benefit, FusionStats, Kept, Refused

Compiler = Literal["eager", "inductor"]
COMPILERS: Final = ("eager", "inductor")
NO_GPU: Final = "nothing was fused: Kitsune's kernels run on a GPU, but the graph is on a CPU"
GAVE_UP: Final = "some calls ran as given: torch.compile takes no more shapes than torch._dynamo.config.recompile_limit"


class FusionEngine:
    """Replaces patterns in the graphs that torch.compile captures. The rest runs eagerly or is compiled by Inductor.

        fused = FusionEngine().fuse(model)
        loss = fused(x).sum()

    Parameters stay the model's own. A match is replaced if its kernel, forward and backward, is measured to be at least
    `min_fusion_benefit` times as fast on this device as the replaced nodes when run by `compiler`. `clock` and
    `counter` replace timing and launch counting on the GPU, for tests. Raises SettingsError for an unknown compiler,
    and when `config` is not a FusionConfig.
    """

    def __init__(
        self,
        config: FusionConfig | None = None,
        *,
        compiler: Compiler = "eager",
        clock: Clock | None = None,
        counter: Counter | None = None,
    ) -> None:
        if compiler not in COMPILERS:
            raise SettingsError(f"compiler is {compiler!r}; use 'eager' or 'inductor'")
        if not isinstance(config, FusionConfig | None):
            raise SettingsError(f"FusionEngine() takes a FusionConfig, not {config!r:.100}")
        self.config = config or FusionConfig()
        self.compiler: Compiler = compiler
        self._clock = clock
        self._counter = counter
        self._patterns = list(PATTERNS)
        self._kept: list[Kept] = []
        self._refused: list[Refused] = []
        self._operations = [0, 0]
        self._launches: list[tuple[int, int] | None] = []
        self._notes: dict[str, None] = {}

    def fuse(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The result of torch.compile for a model or function: fused at its first call with tensors of a shape.

        If something was replaced, that call also counts kernel launches, unmodified and fused: it runs each twice,
        forward and backward, on copies of its inputs and of the weights. After eight shapes torch.compile stops
        recompiling; further shapes run unmodified, and the stats have a note. Raises SettingsError when `function` is
        not callable.
        """
        if not callable(function):
            raise SettingsError(f"fuse() takes a model or a function, not {function!r:.100}")
        own = torch.compile(own_code(function, self._note_uncompiled), backend=self._compile, dynamic=False)
        if not isinstance(function, torch.nn.Module):
            return own
        module: Any = torch.compile(function, backend=self._compile, dynamic=False)
        module.forward = own  # torch's wrapper has the same code object for every module
        return module

    def register_pattern(self, pattern: Pattern) -> None:
        """Adds a pattern, which is tried before the built-in ones and replaces one of the same name.

        Raises SettingsError when it is not a Pattern.
        """
        if not isinstance(pattern, Pattern):
            raise SettingsError(f"register_pattern() takes a Pattern, not {pattern!r:.100}")
        others = [one for one in self._patterns if one.name != pattern.name]
        self._patterns = [pattern, *others]

    def get_fusion_stats(self) -> FusionStats:
        """The statistics of all graphs so far."""
        before, after = self._operations
        counted = [counts for counts in self._launches if counts is not None]
        is_known = bool(counted) and len(counted) == len(self._launches)
        return FusionStats(
            kept=tuple(self._kept),
            refused=tuple(self._refused),
            operations_before=before,
            operations_after=after,
            launches_before=sum(given for given, _ in counted) if is_known else None,
            launches_after=sum(fused for _, fused in counted) if is_known else None,
            notes=tuple(self._notes),
        )

    def rewrite(self, graph: GraphModule) -> GraphModule:
        """Replaces the matches that are worth it, in place, and returns the graph."""
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

    def _note_uncompiled(self) -> None:
        self._notes[GAVE_UP] = None

    def _clock_for(self, graph: GraphModule) -> Clock | None:
        if self._clock is not None:
            return self._clock
        return side_by_side_ms if gpu_of(graph) is not None else None

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
        if self._clock_for(graph) is None:
            return made(self.rewrite(graph), inputs, self.compiler)
        given, kept = twin_of(graph), len(self._kept)
        graph = self.rewrite(graph)
        if len(self._kept) == kept:
            return made(graph, inputs, self.compiler)
        with backward_at_once():
            fused = made(graph, inputs, self.compiler)
        self._launches.append(self._counted(given, fused, inputs))
        return fused

    def _counted(self, given: GraphModule, fused: Callable[..., Any], inputs: list[Any]) -> tuple[int, int] | None:
        gpu = gpu_of(given)
        try:
            counter = self._counter or counter_of(gpu)
            return launches_of(given, fused, inputs, counter, gpu or torch.device("cpu"))
        except (CaptureError, TritonError, *SURPRISES) as error:
            self._notes[f"launches were not counted: {first_line(error)}"] = None
            return None


def gpu_of(graph: GraphModule) -> torch.device | None:
    """The GPU that a graph computes on; None for a CPU."""
    values = (value_of(node) for node in graph.graph.nodes)
    return next((value.device for value in values if isinstance(value, torch.Tensor) and value.is_cuda), None)
