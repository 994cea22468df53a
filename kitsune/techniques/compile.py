"""compile: torch.compile of forward and loss; AOTAutograd compiles the backward with them.

The compiler is loaded on first use, as torch does: it takes 2 to 5 s, and not every process compiles.
"""

import contextlib
import importlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.utils import _pytree as pytree

import kitsune.fusion
from kitsune.autograd.half_weights import HalfWeights
from kitsune.autograd.random_operations import DRAWS, draws
from kitsune.autograd.sole_outputs import SoleOutputs, has_unaligned_head
from kitsune.capture.compile_isolation import leave_out_repeated_logs, own_code
from kitsune.fusion import tied_gradients
from kitsune.fusion.cache_key import cache_options
from kitsune.fusion.counters import merge_counters
from kitsune.fusion.half_activations import round_activations
from kitsune.fusion.masks import drop_constant_masks
from kitsune.fusion.padded_outputs import pad_outputs
from kitsune.fusion.product_weights import examples_with, product_weights
from kitsune.knobs import OWN_GRAPHS, Choice
from kitsune.techniques.long_kernels import LEAST_MS, SWITCH, leave_short_kernels
from kitsune.techniques.technique import Build, Facts, Technique, is_a, is_of_dynamo

# With its static launcher, Inductor caches kernels as they were before coordinate descent, so every process tunes them
# again (MLP on an H200: 132 measurements in the second process with it, none without; first steps 7.4 s and 3.2 s).
TUNED_ONCE = {"use_static_cuda_launcher": False}
INDUCTOR_ERROR = "torch._inductor.exc.InductorError"


class Compile(Technique):
    name = "compile"

    def why_not(self, choice: Choice, facts: Facts) -> str | None:
        if facts.device != "cuda" and choice in OWN_GRAPHS:
            return "CUDA graphs need a GPU"
        return facts.compiler

    def apply(self, choice: Choice, build: Build) -> None:
        leave_out_repeated_logs(build.undo)
        build.hides_hooks = build.frees_activations = build.is_specialised = True
        forward, rewrite = build.forward, None
        if build.fusion is not None and build.unfused is not None:
            build.fusion = kitsune.fusion.FusionEngine(build.fusion.config, compiler="inductor")
            forward, rewrite = build.unfused, build.fusion.rewrite
        options = options_of(str(choice))
        if build.fusion_config is not None:
            options["max_fusion_size"] = build.fusion_config.max_fusion_size
        if build.in_loop and build.computes_in_half and self.is_padded(build):
            build.sole_outputs = SoleOutputs()
        backend = Inductor(
            options,
            build.inductor,
            may_run_twice=build.in_loop,
            rewrite=rewrite,
            half_weights=build.half_weights,
            sole_outputs=build.sole_outputs,
            rounded_to=build.half_activations,
            kept_share=build.kept_share,
        )
        build.forward = torch.compile(own_code(forward), dynamic=False, backend=backend)
        if choice in OWN_GRAPHS:
            build.forward = with_copied_outputs(build.forward)
        if build.in_loop and any(True for _ in build.model.buffers()):
            build.forward = preserving_buffer_versions(build.forward, build.model)

    def is_padded(self, build: Build) -> bool:
        """Whether rows of outputs may be padded."""
        return build.device.type == "cuda" and has_unaligned_head(build.model)

    def blames(self, error: BaseException) -> bool:
        return is_of_dynamo(error) or is_a(error, INDUCTOR_ERROR)


class Inductor:
    """Inductor as a backend of torch.compile. Marks its entries in torch's caches on disk: see `cache_key`.

    `may_run_twice`: a loop may run a second backward, so the first must not reuse the memory of activations. `rewrite`
    changes a graph before Inductor sees it; `half_weights` copies the weights that only products read; rows of
    `sole_outputs` are padded; what autocast leaves in fp32 is rounded to `rounded_to`; counters of batch norms are
    merged. Of what the backward reads, at most `kept_share` is kept and the rest computed again. `asked`: more options,
    read at the first call, because techniques that are applied later add some.
    """

    def __init__(
        self,
        options: Mapping[str, Any],
        asked: Mapping[str, Any],
        *,
        may_run_twice: bool,
        rewrite: Callable[[torch.fx.GraphModule], torch.fx.GraphModule] | None = None,
        half_weights: HalfWeights | None = None,
        sole_outputs: SoleOutputs | None = None,
        rounded_to: torch.dtype | None = None,
        kept_share: float = 1.0,
    ) -> None:
        self.__name__ = "inductor"  # torch's error messages name the backend by it
        self._may_run_twice = may_run_twice
        self._options = {name.replace("-", "_"): value for name, value in options.items()}
        self._asked = asked
        self._rewrite = rewrite
        self._half_weights = half_weights
        self._sole_outputs = sole_outputs
        self._rounded_to = rounded_to
        self._kept_share = kept_share

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        sole_outputs = self._sole_outputs if is_whole(graph) else None
        if self._rewrite is not None:
            graph = self._rewrite(graph)
        else:  # a rewrite does that as well
            drop_constant_masks(graph)
        merge_counters(graph)
        if self._rounded_to is not None:
            round_activations(graph, self._rounded_to)
        half = self._half_weights
        positions = [] if half is None else product_weights(graph, inputs, half.dtype)
        is_padded = sole_outputs is not None and pad_outputs(graph, sole_outputs.__contains__) > 0
        marks = cache_options(graph, may_run_twice=self._may_run_twice)
        options = {**self._options, **self._asked, **tied_gradients.options(), **marks}
        if options.get(SWITCH) == LEAST_MS:
            leave_short_kernels()
        with contextlib.ExitStack() as stack:
            if self._may_run_twice:
                stack.enter_context(without_donated_buffers())
            if is_padded:
                stack.enter_context(with_strides_of_outputs())
            if self._kept_share < 1:
                if draws(graph, inputs):
                    raise RuntimeError(DRAWS)
                stack.enter_context(keeping(self._kept_share))
            if half is None or not positions:
                return torch._inductor.compile(graph, inputs, options=options)
            examples = examples_with(half.dtype, graph, inputs, positions)
            return half.with_copies(torch._inductor.compile(graph, examples, options=options), positions)


def is_whole(graph: torch.fx.GraphModule) -> bool:
    """Whether the graph ends because its function returns: what leaves it goes to no other code of that function."""
    reason: Any = getattr(graph, "compile_subgraph_reason", None)
    return reason is not None and not reason.graph_break


def keeping(share: float) -> contextlib.AbstractContextManager[Any]:
    """Code compiled in the block keeps at most this share of what its backward reads."""
    config: Any = importlib.import_module("torch._functorch.config")
    patched: contextlib.AbstractContextManager[Any] = config.patch(activation_memory_budget=share)
    return patched


def with_strides_of_outputs() -> contextlib.AbstractContextManager[Any]:
    """Code compiled in the block reads gradients of outputs in the layout of these, as torch does since 2.13. Before,
    it copied those with gaps between their rows: 484 us for GPT-2's on an H200, and products over the copy are slow."""
    config: Any = importlib.import_module("torch._functorch.config")
    if not hasattr(config, "guess_tangent_strides_as_outputs"):
        return contextlib.nullcontext()
    patched: contextlib.AbstractContextManager[Any] = config.patch(guess_tangent_strides_as_outputs=True)
    return patched


@contextlib.contextmanager
def without_donated_buffers() -> Iterator[None]:
    """Code compiled in the block does not donate buffers: its backward does not reuse the memory of activations.

    Torch's flag for that, `donated_buffer`, will not do: torch reads it again in every backward that retains its graph,
    and raises an error if it is on for code that was compiled with it off. So the flag stays on, and the list of
    donated buffers is made empty.
    """
    graph_compile: Any = importlib.import_module("torch._functorch._aot_autograd.graph_compile")
    given = graph_compile.collect_bw_donated_buffer_idxs
    graph_compile.collect_bw_donated_buffer_idxs = lambda *_, **__: []
    try:
        yield
    finally:
        graph_compile.collect_bw_donated_buffer_idxs = given


def with_copied_outputs(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with its results copied, because users keep losses and the next replay would overwrite them.

    That is for the CUDA graphs of Inductor's own, which see by the last backward that a new step begins.
    torch.compiler.cudagraph_mark_step_begin would tell them too, but for the whole process: after the first call, every
    other compiled function that does not call it is recorded again at each call (stock max-autotune beside a plan of
    it, ResNet-18 on an H200: 15 min).
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        output = function(*args, **kwargs)
        return pytree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, output)

    return call


def preserving_buffer_versions(function: Callable[..., Any], model: torch.nn.Module) -> Callable[..., Any]:
    """The function, but its in-place updates of buffers do not invalidate an earlier forward of the same step.

    Inductor saves statistics of batch norm for the backward, and a second forward updates them in place. In training
    the backward does not read them, but autograd would raise an error in the backward of the first forward.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        with _unsafe_preserve_version_counter(tuple(model.buffers())):
            return function(*args, **kwargs)

    return call


def options_of(choice: str) -> dict[str, Any]:
    """Inductor's options for a choice. Modes become options, because torch.compile does not accept both."""
    if choice == "coordinate-descent":
        return {SWITCH: LEAST_MS, **TUNED_ONCE}
    options = dict(torch._inductor.list_mode_options(choice))
    return {**options, **TUNED_ONCE} if options.get(SWITCH) else options


TECHNIQUE = Compile()
