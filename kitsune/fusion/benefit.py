"""Measures the benefit of a match on this device: times its nodes and its kernel on tensors of the same shapes."""

import contextlib
import math
import operator
import statistics
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
import torch._functorch.config
from torch._guards import tracing
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from kitsune.device.backend import rng_state, set_rng_state, side_stream
from kitsune.device.cuda_graph import Graph as Recorded
from kitsune.device.cuda_graph import Recorder
from kitsune.errors import CaptureError
from kitsune.fusion.benefits import Benefits, key_of
from kitsune.fusion.cache_key import cache_options, named
from kitsune.fusion.match import Match, surroundings
from kitsune.fusion.operations import autocasts_at, value_of
from kitsune.fusion.stats import Benefit
from kitsune.launches.execution.graph_benchmark import replay_ms

ROUNDS: Final = 11
#: Target duration of a sample: the error of an event, up to 20 us, is 1 % of it.
SAMPLE_MS: Final = 2.0
WARMUPS: Final = 3

Run = Callable[[], Any]
#: Two functions -> milliseconds of a call of each.
Clock = Callable[[Run, Run], tuple[float, float]]

_measured: dict[Any, Benefit] = {}


def benefit_of(name: str, match: Match, compiler: str, clock: Clock) -> Benefit:
    """The benefit of a match, measured once for each pattern, shapes and dtypes: once a machine with the GPU's clock,
    once a process with another. Raises RuntimeError when the match cannot be run."""
    said, device = (name, compiler, *signature_of(match)), value_of(match.inputs[0]).device
    key = (match.call, said, device, clock)
    if key not in _measured:
        lasting_key = key_of(match.call, said, device) if clock is side_by_side_ms else None
        _measured[key] = first_measured(lasting_key, match, compiler, clock)
    return _measured[key]


def first_measured(key: str | None, match: Match, compiler: str, clock: Clock) -> Benefit:
    """The benefit that the first process on this machine measured; without a key, measured now."""
    if key is None:
        return measure(match, compiler, clock)
    kept = Benefits.of_this_machine()
    return kept.find(key) or kept.keep(key, measure(match, compiler, clock))


def signature_of(match: Match) -> Any:
    """What the time of a match depends on besides its call: operations, tensors, constants and precision modes."""
    values = [value_of(node) for node in inputs_of(match)]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    return (
        wiring_of(match),
        tuple((one.shape, one.stride(), one.dtype, one.device.type, one.requires_grad) for one in tensors),
        torch.is_autocast_enabled(tensors[0].device.type),
        str(autocasts_at(match.results[0])),
        torch.get_float32_matmul_precision(),
    )


def wiring_of(match: Match) -> tuple[str, ...]:
    """The inputs of each node, the results and the arguments of the call, with nodes numbered."""
    own = set(match.nodes)
    nodes = [node for node in match.results[0].graph.nodes if node in own]
    names = {node: f"%{number}" for number, node in enumerate((*inputs_of(match), *nodes))}
    given = [*((named(node.target), node.args, node.kwargs) for node in nodes), match.results, match.arguments]
    return tuple(repr(map_arg(one, names.__getitem__)) for one in given)


def measure(match: Match, compiler: str, clock: Clock) -> Benefit:
    device = value_of(match.inputs[0]).device
    state = rng_state(device)
    nodes = inputs_of(match)
    try:
        # Not part of the compilation that is in progress.
        with tracing(None), torch.enable_grad(), surroundings(match), current(device):
            samples = [sample_of(value_of(node)) for node in nodes]
            with backward_at_once():
                runs = [
                    run_of(made(graph, samples, compiler), samples)
                    for graph in (original_of(match, nodes), fused_of(match, nodes))
                ]
            return Benefit(*clock(*runs))
    finally:
        set_rng_state(device, state)


def inputs_of(match: Match) -> list[Node]:
    """The distinct inputs of the nodes and the call from outside the match."""
    own = set(match.nodes)
    outer = [node for inner in match.nodes for node in inner.all_input_nodes if node not in own]
    return list(dict.fromkeys([*match.inputs, *outer]))


def original_of(match: Match, inputs: list[Node]) -> GraphModule:
    graph = Graph()
    places = {node: graph.placeholder(f"input_{number}") for number, node in enumerate(inputs)}
    own = set(match.nodes)
    for node in match.results[0].graph.nodes:
        if node in own:
            places[node] = graph.node_copy(node, places.__getitem__)
    graph.output(tuple(places[node] for node in match.results))
    return GraphModule(torch.nn.Module(), graph)


def fused_of(match: Match, inputs: list[Node]) -> GraphModule:
    graph = Graph()
    places = {node: graph.placeholder(f"input_{number}") for number, node in enumerate(inputs)}
    arguments = tuple(places[one] if isinstance(one, Node) else one for one in match.arguments)
    call = graph.call_function(match.call, arguments)
    several = len(match.results) > 1
    graph.output(
        tuple(graph.call_function(operator.getitem, (call, at)) for at in range(len(match.results)))
        if several
        else (call,)
    )
    return GraphModule(torch.nn.Module(), graph)


def made(graph: GraphModule, inputs: list[Any], compiler: str) -> Callable[..., Any]:
    """The graph as the compiler runs it."""
    if compiler != "inductor":
        return graph
    return torch._inductor.compile(graph, list(inputs), options=cache_options(graph))


def backward_at_once() -> contextlib.AbstractContextManager[Any]:
    """Compiles backwards eagerly in the block: torch cannot compile one lazily during an outer compilation."""
    config: Any = torch._functorch.config
    name = "force_non_lazy_backward_lowering"
    return config.patch({name: True}) if hasattr(config, name) else contextlib.nullcontext()


def sample_of(value: torch.Tensor) -> torch.Tensor:
    """A tensor of the same shape, strides and dtype: floats uniform in [0, 1), booleans True, integers 0."""
    sample = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    if not value.is_floating_point():
        return sample.fill_(value.dtype == torch.bool)
    return sample.uniform_().requires_grad_(value.requires_grad)


def run_of(function: Callable[..., Any], samples: list[Any]) -> Run:
    """A call that runs forward, and backward if a gradient is required."""
    leaves = [sample for sample in samples if is_sloped(sample)]
    slopes: list[torch.Tensor] = []

    def run() -> Any:
        results = function(*samples)
        sloped = [result for result in results if is_sloped(result)]
        if not leaves or not sloped:
            return results
        if not slopes:
            slopes.extend(torch.ones_like(result) for result in sloped)
        return torch.autograd.grad(sloped, leaves, slopes, allow_unused=True)

    return run


def is_sloped(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def side_by_side_ms(original: Run, fused: Run) -> tuple[float, float]:
    """Medians of interleaved samples on the current GPU, in milliseconds.

    Both are captured into CUDA graphs, as whole steps are, so launch overhead of the host does not count. A function
    that cannot be captured is timed with its launches.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    with sync_checks_off():
        with side_stream(device):
            for _ in range(WARMUPS):
                original()
                fused()
        torch.cuda.synchronize(device)
        graphs = [recorded(run, device) for run in (original, fused)]
        counts = [max(1, math.ceil(SAMPLE_MS / max(replay_ms(graph), 1e-3))) for graph in graphs]
        samples: tuple[list[float], list[float]] = ([], [])
        for _ in range(ROUNDS):
            for graph, count, found in zip(graphs, counts, samples, strict=True):
                found.append(replay_ms(Repeated(graph, count)) / count)
    return statistics.median(samples[0]), statistics.median(samples[1])


def recorded(run: Run, device: torch.device) -> Recorded:
    try:
        graph, _ = Recorder(device).apart().capture(run)
    except CaptureError:
        return Issued(run)
    graph.replay()
    return graph


class Issued:
    """A run that could not be captured, with the interface of a graph."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def replay(self) -> None:
        self._run()


class Repeated:
    """Replays a graph `count` times."""

    def __init__(self, graph: Recorded, count: int) -> None:
        self._graph = graph
        self._count = count

    def replay(self) -> None:
        for _ in range(self._count):
            self._graph.replay()


def current(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


@contextlib.contextmanager
def sync_checks_off() -> Iterator[None]:
    """Disables torch's detection of host synchronisations in the block, since those of a measurement do not count."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("default")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
