"""Rounds activations that autocast leaves in fp32: embeddings, results of norms, and sums with an fp32 parameter.

Autocast casts the inputs of products and computes norms in fp32. So the residual stream of a transformer is in fp32,
and each norm, dropout and sum reads and writes 4 bytes an element. Training whose parameters are in bf16 has always
had 2 (Megatron-LM without `fp32_residual_connection`, FSDP2's `param_dtype`).

Only operations that are known to be meant for activations read what was rounded. All others get fp32 as before.
"""

import contextlib
import math
import operator
import warnings
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensor
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from kitsune.errors import SURPRISES
from kitsune.fusion.operations import CALLS, VIEWS, aten, memory_of, operation_of, value_of
from kitsune.fusion.writes import is_written, mutates

EMBEDDINGS: Final = frozenset({F.embedding, torch.embedding, aten.embedding.default})
#: Their results are rounded, whatever their inputs are.
NORMS: Final = frozenset(
    {
        *(F.layer_norm, torch.layer_norm, aten.layer_norm.default),
        *(F.rms_norm, torch.rms_norm, aten.rms_norm.default),
        *(F.group_norm, torch.group_norm, aten.group_norm.default),
    }
)
#: Their results are rounded where an operand in half precision met a parameter in fp32.
PROMOTING: Final = frozenset(
    {
        *(operator.add, torch.add, aten.add.Tensor, "add"),
        *(operator.sub, torch.sub, aten.sub.Tensor, "sub"),
        *(operator.mul, torch.mul, aten.mul.Tensor, "mul"),
        *(torch.cat, torch.concat, aten.cat.default),
    }
)
#: By the names of `operation_of`: they read activations in half precision, as they do behind a product.
READERS: Final = frozenset(
    {
        *("linear", "matmul", "conv2d", "attention", "layer_norm", "rms_norm", "batch_norm"),
        *("gelu", "silu", "relu", "tanh", "dropout", "add", "mul", "div", "neg", "view", "cat", "chunk", "item"),
    }
)
#: Others that do. Kitsune's own calls are recognised by their module.
OTHERS: Final = frozenset({torch.bmm, torch.baddbmm, torch.addmm, torch.mm, torch.einsum, torch.conv1d, torch.sigmoid})


def round_activations(graph: GraphModule, dtype: torch.dtype) -> int:
    """Rounds such results to `dtype` where autocast to it is on, and returns how many.

    What leaves the graph keeps its dtype. What a model casts to fp32 itself stays in fp32, and so does what autocast
    computes in fp32 from results in half precision, such as softmax and losses. The graph stays as it is where an
    operation of it does not accept the other dtype, or where it writes in place into what would be rounded.
    """
    rounding = Rounding(graph, dtype)
    try:
        rounding.run_on_examples()
    except SURPRISES:
        return 0
    if rounding.rounded:
        rounding.apply(graph)
    return len(rounding.rounded)


class Rounding(Interpreter):
    """Runs a graph on the examples of its inputs, rounds on the way, and takes down where. Changes no node.

    A node is changed if its result is in fp32 as given and in half precision now. `wide` are the edges (reader, node)
    by which an operation that is not for activations reads such a node.
    """

    def __init__(self, graph: GraphModule, dtype: torch.dtype) -> None:
        super().__init__(graph, garbage_collect_values=False)
        self.dtype = dtype
        self.inputs = [value_of(node) for node in graph.graph.find_nodes(op="placeholder")]
        self.kind = next((each.device.type for each in self.inputs if isinstance(each, FakeTensor)), "cpu")
        self.rounded: dict[Node, torch.Tensor] = {}  # with the result before it was rounded
        self.wide: dict[tuple[Node, Node], None] = {}
        self.values: dict[Node, Any] = {}
        self._from_half: set[Node] = set()  # in fp32, but computed from results in half precision
        self._blocks: list[Any] = []  # blocks of autocast in the graph that have not ended

    def run_on_examples(self) -> None:
        """Raises one of SURPRISES where nothing may be rounded."""
        example = next((each for each in self.inputs if isinstance(each, FakeTensor)), None)
        if example is None:
            return
        is_on, dtype = torch.is_autocast_enabled(self.kind), torch.get_autocast_dtype(self.kind)
        with contextlib.ExitStack() as stack:
            # These two also restore what the graph would leave changed if it raised an error.
            stack.enter_context(torch.autocast(self.kind, dtype=dtype, enabled=is_on))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(warnings.catch_warnings(action="ignore"))
            stack.enter_context(example.fake_mode)
            try:
                self.run(*self.inputs, enable_io_processing=False)
            finally:  # or torch would count a block that has not ended, and keep its casts for ever
                while self._blocks:
                    _exit_autocast(self._blocks.pop())
        changed = [node for node in self.values if self.is_changed(node)]
        if changed and (is_written(changed) or share_memory(changed)):
            raise ValueError("something is written in place, or given out twice")

    def fetch_args_kwargs_from_env(self, node: Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What the node reads: in fp32 as given, unless it is an operation for activations."""
        load = self.load_half if self.reads_half(node) else self.load_wide(node)
        return map_arg(node.args, load), map_arg(node.kwargs, load)

    def load_half(self, node: Node) -> Any:
        return self.env[node]

    def load_wide(self, reader: Node) -> Callable[[Node], Any]:
        def load(node: Node) -> Any:
            if not self.is_changed(node):
                return self.env[node]
            self.wide[reader, node] = None
            return self.rounded[node] if node in self.rounded else self.env[node].float()

        return load

    def run_node(self, node: Node) -> Any:
        value = super().run_node(node)
        if node.target is _enter_autocast:
            self._blocks.append(value)
        elif node.target is _exit_autocast:
            self._blocks.pop()
        if is_wide(value) and node.op != "placeholder":
            given = [each for each in node.all_input_nodes if isinstance(self.values[each], torch.Tensor)]
            if self.is_rounded(node, value, given):
                self.rounded[node] = value
                value = value.to(self.dtype)
            elif any(self.is_half(each) or each in self._from_half for each in given):
                self._from_half.add(node)
        self.values[node] = value
        return value

    def reads_half(self, node: Node) -> bool:
        """Whether it is an operation for activations, under autocast, that writes nowhere and names no dtype."""
        is_known = (
            node.target in VIEWS
            or node.target in OTHERS
            or node.target in PROMOTING
            or getattr(node.target, "__module__", None) == CALLS
            or operation_of(node).name in READERS
        )
        if not is_known or mutates(node) or not self.is_autocast():
            return False
        constants = [each for each in pytree.tree_leaves((node.args, dict(node.kwargs))) if not isinstance(each, Node)]
        has_dtype = any(isinstance(each, torch.dtype) for each in constants)
        return not has_dtype and not any(exceeds(each, self.dtype) for each in constants)

    def is_rounded(self, node: Node, value: torch.Tensor, given: list[Node]) -> bool:
        if value.ndim < 2 or not self.is_autocast():  # losses have fewer dimensions
            return False
        if node.target in NORMS:
            return True
        if node.target in EMBEDDINGS:
            table = node.args[1 if node.target is F.embedding else 0]
            return isinstance(table, Node) and self.is_parameter(table)
        others = [each for each in given if not self.is_half(each)]
        return node.target in PROMOTING and len(others) < len(given) and all(map(self.is_parameter, others))

    def is_parameter(self, node: Node) -> bool:
        """Whether it is computed from parameters only, or a view of one. Not data of the batch, whose numbers may be
        large, nor a mask, whose lowest number in fp32 is minus infinity in bf16."""
        if self.values[node].requires_grad:
            return node not in self._from_half
        while node.target in VIEWS and isinstance(node.args[0], Node):
            node = node.args[0]
        return isinstance(value_of(node), torch.nn.Parameter)

    def is_half(self, node: Node) -> bool:
        return bool(self.values[node].dtype == self.dtype)

    def is_changed(self, node: Node) -> bool:
        return is_wide(value_of(node)) and not is_wide(self.values.get(node, value_of(node)))

    def is_autocast(self) -> bool:
        """Whether autocast is on where the run has come to."""
        return torch.is_autocast_enabled(self.kind) and torch.get_autocast_dtype(self.kind) == self.dtype

    def apply(self, graph: GraphModule) -> None:
        """Puts the casts into the graph."""
        for reader, node in self.wide:
            if node not in self.rounded:
                cast_for(reader, node, self.values[node])
        for node in self.rounded:
            cast_after(node, self.dtype, [reader for reader, read in self.wide if read is node])
        for node, value in self.values.items():
            if node not in self.rounded and "example_value" in node.meta:
                node.meta["example_value"] = value
        graph.recompile()


def cast_after(node: Node, dtype: torch.dtype, wide: list[Node]) -> None:
    """Rounds a result for all of its readers but those that want it as it is."""
    with node.graph.inserting_after(node):
        cast = node.graph.call_method("to", (node, dtype))
    cast.meta = {**node.meta, "example_value": value_of(node).to(dtype)}
    node.replace_all_uses_with(cast, delete_user_cb=lambda user: user is not cast and user not in wide)


def cast_for(reader: Node, node: Node, value: torch.Tensor) -> None:
    """Gives a reader a result that is in half precision now in fp32."""
    with node.graph.inserting_before(reader):
        cast = node.graph.call_method("to", (node, torch.float32))
    cast.meta = {**node.meta, "example_value": value.float()}
    reader.replace_input_with(node, cast)


def is_wide(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == torch.float32


def exceeds(number: Any, dtype: torch.dtype) -> bool:
    return isinstance(number, float) and torch.finfo(dtype).max < abs(number) < math.inf


def share_memory(changed: list[Node]) -> bool:
    """Whether two results that leave the graph are views of the same memory, as given, and one of these is changed."""
    (output,) = changed[0].graph.find_nodes(op="output")
    memories = [memory_of(value_of(node)) for node in output.all_input_nodes]
    twice = {memory for memory in memories if memory is not None and memories.count(memory) > 1}
    return not twice.isdisjoint(memory_of(value_of(node)) for node in changed)
