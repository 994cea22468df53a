"""compile: torch.compile of what the step computes, forward and loss; autograd compiles the backward with it.

Torch loads its compiler when it is first asked for, 2 to 5 s, and so do we: not every process compiles.
"""

import contextlib
import importlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.utils import _pytree as pytree

import kitsune.fusion
from kitsune.capture.compile_isolation import own_code
from kitsune.fusion.cache_key import cache_options
from kitsune.knobs import OWN_GRAPHS, Choice
from kitsune.techniques.technique import Build, Facts, Technique, is_a, is_of_dynamo

# With its static launcher, Inductor takes kernels from its cache as they were before coordinate descent, and every
# process tunes them again (MLP on an H200: 132 measurements in the second process with it, none without; first steps
# 7.4 s and 3.2).
TUNED_ONCE = {"use_static_cuda_launcher": False}
INDUCTOR_ERROR = "torch._inductor.exc.InductorError"


class Compile(Technique):
    name = "compile"

    def why_not(self, choice: Choice, facts: Facts) -> str | None:
        if facts.device != "cuda" and choice in OWN_GRAPHS:
            return "CUDA graphs need a GPU"
        return facts.compiler

    def apply(self, choice: Choice, build: Build) -> None:
        build.hides_hooks = build.frees_activations = build.is_specialised = True
        forward, rewrite = build.forward, None
        if build.fusion is not None and build.unfused is not None:
            build.fusion = kitsune.fusion.FusionEngine(build.fusion.config, compiler="inductor")
            forward, rewrite = build.unfused, build.fusion.rewrite
        options = options_of(str(choice))
        if build.fusion_config is not None:
            options["max_fusion_size"] = build.fusion_config.max_fusion_size
        backend = Inductor(options, build.inductor, may_run_twice=build.in_loop, rewrite=rewrite)
        build.forward = torch.compile(own_code(forward), dynamic=False, backend=backend)
        if choice in OWN_GRAPHS:
            build.forward = copying(build.forward)
        if build.in_loop and any(True for _ in build.model.buffers()):
            build.forward = sparing(build.forward, build.model)

    def blames(self, error: BaseException) -> bool:
        return is_of_dynamo(error) or is_a(error, INDUCTOR_ERROR)


class Inductor:
    """Inductor as a backend of torch.compile, with a mark on what it puts into torch's caches on disk: see `cache_key`.

    `may_run_twice`: a loop may ask for a second backward, whose activations the first must not have used as its own
    memory. `rewrite` changes a graph before Inductor sees it. `asked` are more options, as they are by the time of the
    first call: techniques that come later ask for some.
    """

    def __init__(
        self,
        options: Mapping[str, Any],
        asked: Mapping[str, Any],
        *,
        may_run_twice: bool,
        rewrite: Callable[[torch.fx.GraphModule], torch.fx.GraphModule] | None = None,
    ) -> None:
        self.__name__ = "inductor"  # by which torch speaks of a backend that failed
        self._may_run_twice = may_run_twice
        self._options = {name.replace("-", "_"): value for name, value in options.items()}
        self._asked = asked
        self._rewrite = rewrite

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        if self._rewrite is not None:
            graph = self._rewrite(graph)
        options = {**self._options, **self._asked, **cache_options(graph, may_run_twice=self._may_run_twice)}
        with nothing_donated() if self._may_run_twice else contextlib.nullcontext():
            return torch._inductor.compile(graph, inputs, options=options)


@contextlib.contextmanager
def nothing_donated() -> Iterator[None]:
    """No activation is the backward's own memory in what is compiled within.

    Torch asks its flag for that, `donated_buffer`, again in every backward that keeps its graph, and refuses what was
    compiled without it while it is on elsewhere. So the flag stays, and the list of what is donated is empty.
    """
    graph_compile: Any = importlib.import_module("torch._functorch._aot_autograd.graph_compile")
    given = graph_compile.collect_bw_donated_buffer_idxs
    graph_compile.collect_bw_donated_buffer_idxs = lambda *_, **__: []
    try:
        yield
    finally:
        graph_compile.collect_bw_donated_buffer_idxs = given


def copying(function: Callable[..., Any]) -> Callable[..., Any]:
    """Results that the next replay of Inductor's own CUDA graphs does not overwrite: users keep losses.

    That a new step begins, Inductor sees by the backward of the last one. torch.compiler.cudagraph_mark_step_begin
    would tell it, but for the whole process: from the first mark on, every other compiled function that does not mark
    its steps is recorded again at each call (stock max-autotune beside a plan of it, ResNet-18 on an H200: 15 min).
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        output = function(*args, **kwargs)
        return pytree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, output)

    return call


def sparing(function: Callable[..., Any], model: torch.nn.Module) -> Callable[..., Any]:
    """Forwards that share a step: what Inductor saves for the backward holds statistics of batch norm that the second
    forward updates in place. Training does not read them, but autograd would refuse the backward of the first.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        with _unsafe_preserve_version_counter(tuple(model.buffers())):
            return function(*args, **kwargs)

    return call


def options_of(choice: str) -> dict[str, Any]:
    """Inductor's options behind a choice; torch.compile takes a mode or options, not both."""
    if choice == "coordinate-descent":
        return {"coordinate_descent_tuning": True, **TUNED_ONCE}
    options = dict(torch._inductor.list_mode_options(choice))
    return {**options, **TUNED_ONCE} if options.get("coordinate_descent_tuning") else options


TECHNIQUE = Compile()
