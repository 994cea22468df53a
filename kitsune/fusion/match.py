"""Match: nodes of a graph that one kernel call can replace; and the checks whether the replacement is safe."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch._guards import tracing
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Node

from kitsune.fusion.operations import BORDERS, FRESH, autocasts_at, names_of, operation_of, value_of
from kitsune.fusion.strides import restrided, used_strides
from kitsune.fusion.writes import are_written, memories_of, mutates, written_by
from kitsune.kernels.dtypes import DTYPES


@dataclass(frozen=True, kw_only=True, slots=True)
class Match:
    """Nodes that `call` with `arguments` (nodes and constants) can replace.

    `results`: the nodes that the call replaces, the last in the graph first; for several, the call returns a tuple.
    `inner`: nodes that disappear, so nothing else may use them. `kept`: results that the backward of the call reads,
    besides its arguments. `writes`: arguments that the call writes, as the replaced nodes do. `dtype`: the dtype that
    the kernel reads, if it is not that of the first result. `any_strides`: its results may have other strides than
    those of the nodes, if nothing that reads them depends on strides.
    """

    call: Callable[..., Any]
    arguments: tuple[Any, ...]
    results: tuple[Node, ...]
    inner: tuple[Node, ...] = ()
    kept: tuple[Node, ...] = ()
    writes: tuple[Node, ...] = ()
    dtype: torch.dtype | None = None
    any_strides: bool = False

    @property
    def nodes(self) -> tuple[Node, ...]:
        return (*self.results, *self.inner)

    @property
    def runs_in(self) -> torch.dtype:
        """The dtype that the kernel computes on. Under autocast it may differ from that of the inputs."""
        return self.dtype or value_of(self.results[0]).dtype

    @property
    def inputs(self) -> tuple[Node, ...]:
        """The distinct nodes among the arguments."""
        return tuple(dict.fromkeys(one for one in self.arguments if isinstance(one, Node)))

    @property
    def shared(self) -> tuple[Node, ...]:
        """The inner nodes that other nodes use as well."""
        own = set(self.nodes)
        return tuple(node for node in self.inner if any(user not in own for user in node.users))


#: What a pattern finds at a node: a match, the reason why what is there does not match, or nothing.
Found = Match | str | None


def place_of(match: Match) -> Node | str:
    """The node before which the call can be inserted, or the reason why there is none."""
    order = {node: number for number, node in enumerate(match.results[0].graph.nodes)}
    own = set(match.nodes)
    if match.shared:
        return f"others use the result of {names_of(match.shared)}"
    if not own.isdisjoint(match.inputs):
        return "it needs a tensor that it would replace"
    users = [user for node in match.results for user in node.users if user not in own]
    place = min([match.results[0], *users], key=order.__getitem__)
    if any(order[node] >= order[place] for node in match.inputs):
        return "what it needs is computed after what uses it"
    numbers = [order[node] for node in match.nodes]
    between = [node for node in order if min(numbers) < order[node] < max(*numbers, order[place])]
    if any(node.target in BORDERS for node in between):
        return "an autocast or no_grad block begins or ends in it"
    if any(mutates(node) and not is_count_beside(match, node) for node in between if node not in own):
        return "something is written in place while it runs"
    written = memories_of(match.writes)
    if any(not written.isdisjoint(memories_of(node.all_input_nodes)) for node in between if node not in own):
        return "what it writes is read while it runs"
    if not all(is_free(written, own) for node in match.nodes for written in written_by(node)):
        return "it writes into what others may read"
    later = [node for node in order if order[node] > order[place] and node not in own]
    if has_backward(match) and are_written((*match.inputs, *match.kept), later):
        return "something is written afterwards into what its backward may read"
    return place


def is_count_beside(match: Match, node: Node) -> bool:
    """Whether it writes only into single integers that the match does not use, such as the counters of batch norms."""
    written = written_by(node)
    values = [value_of(one) for one in written]
    are_integers = all(isinstance(one, torch.Tensor) and one.dtype == torch.int64 and one.ndim == 0 for one in values)
    return are_integers and memories_of(written).isdisjoint(memories_of((*match.nodes, *match.inputs)))


def has_backward(match: Match) -> bool:
    return any(isinstance(one, torch.Tensor) and one.requires_grad for one in map(value_of, match.results))


def is_free(written: Node, own: set[Node]) -> bool:
    """Whether only the match reads the memory that one of its nodes writes."""
    return written in own or (len(written.users) == 1 and operation_of(written).name in FRESH)


@contextlib.contextmanager
def surroundings(match: Match) -> Iterator[None]:
    """Enters the autocast blocks of the model around the match."""
    with contextlib.ExitStack() as stack:
        for device, dtype, enabled, cached in autocasts_at(match.results[0]):
            stack.enter_context(torch.autocast(device, dtype, enabled, cached))
        yield


def values_of(match: Match) -> dict[Node, Any] | str:
    """The values of nodes that change if the call replaces those of the match; or why it may not. Needs no data.

    Results must have the shape, dtype and layout of the nodes', so nothing changes. With `any_strides` the layout may
    differ: then these are the results, and what is computed from them in another layout.
    """
    wanted = [value_of(node) for node in match.results]
    values = [value_of(one) for one in match.arguments]
    known = [*wanted, *(value for value, one in zip(values, match.arguments, strict=True) if isinstance(one, Node))]
    if not all(isinstance(value, torch.Tensor) for value in known):
        return "its tensors are not known"
    if not all(isinstance(size, int) for value in known for size in (*value.shape, *value.stride())):
        return "its shapes are not fixed"
    strange = [value.dtype for value in known if value.is_floating_point() and value.dtype not in DTYPES]
    if strange:
        return f"no kernel computes in {strange[0]}"
    # The mode of the values: that of the current compilation differs by the time that a backend is called.
    mode = next((value.fake_mode for value in known if isinstance(value, FakeTensor)), contextlib.nullcontext())
    try:
        with tracing(None), mode, torch.no_grad(), surroundings(match):
            found = match.call(*values)
            given = found if isinstance(found, tuple) else (found,)
            reason = difference(wanted, given, match.any_strides)
            return reason or (restrided(match.results, given) if match.any_strides else {})
    except (RuntimeError, TypeError, ValueError) as error:
        return f"the kernel does not take it: {str(error).partition(chr(10))[0]}"


def difference(wanted: list[Any], given: tuple[Any, ...], any_strides: bool = False) -> str | None:
    if len(wanted) != len(given):
        return f"the kernel gives {len(given)} results for {len(wanted)}"
    for old, new in zip(wanted, given, strict=True):
        if old.shape != new.shape or old.dtype != new.dtype:
            return f"the kernel gives {shown(new)} for {shown(old)}"
        if not any_strides and used_strides(old) != used_strides(new):
            return "the kernel lays its result out in another way"
    return None


def shown(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
