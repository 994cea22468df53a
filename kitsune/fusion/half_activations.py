"""Rounds activations that autocast leaves in fp32: embeddings, results of norms, and sums with an fp32 parameter.

Autocast casts the inputs of products and computes norms in fp32. So the residual stream of a transformer is in fp32,
and each norm, dropout and sum reads and writes 4 bytes an element. Training whose parameters are in bf16 has always
had 2 (Megatron-LM without `fp32_residual_connection`, FSDP2's `param_dtype`).
"""

import contextlib
import math
import operator
import warnings
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensor
from torch.fx import GraphModule, Interpreter, Node

from kitsune.errors import SURPRISES
from kitsune.fusion.operations import aten, value_of

#: Their results are rounded, whatever their inputs are.
NORMS: Final = frozenset(
    {
        F.embedding,
        torch.embedding,
        aten.embedding.default,
        F.layer_norm,
        torch.layer_norm,
        aten.layer_norm.default,
        F.rms_norm,
        torch.rms_norm,
        aten.rms_norm.default,
        F.group_norm,
        torch.group_norm,
        aten.group_norm.default,
    }
)
#: Their results are rounded where an operand in half precision met one in fp32.
PROMOTING: Final = frozenset(
    {
        *(operator.add, torch.add, aten.add.Tensor, "add"),
        *(operator.sub, torch.sub, aten.sub.Tensor, "sub"),
        *(operator.mul, torch.mul, aten.mul.Tensor, "mul"),
        *(torch.cat, torch.concat, aten.cat.default),
    }
)


#: Functions and methods that give a view of a parameter or buffer, or a cast of it.
VIEWS: Final = frozenset(
    {
        *(operator.getitem, "view", "reshape", "expand", "expand_as", "unsqueeze", "squeeze", "transpose", "permute"),
        *(torch.reshape, torch.unsqueeze, torch.squeeze, torch.transpose, torch.permute, "to", "type_as", "float"),
    }
)


def round_activations(graph: GraphModule, dtype: torch.dtype) -> int:
    """Rounds such results to `dtype` where autocast to it is on, and returns how many.

    What leaves the graph keeps its dtype. What a model casts to fp32 itself stays in fp32, and so does what autocast
    computes in fp32 from results in half precision, such as softmax and losses. The graph stays as it is where an
    operation of it does not accept the other dtype.
    """
    rounding = Rounding(graph, dtype)
    try:
        rounding.run_on_examples()
    except SURPRISES:
        return 0
    if rounding.rounded:
        insert_casts(graph, rounding)
    return len(rounding.rounded)


class Rounding(Interpreter):
    """Runs a graph on the examples of its inputs, rounds on the way, and takes down where. Changes no node."""

    def __init__(self, graph: GraphModule, dtype: torch.dtype) -> None:
        super().__init__(graph, garbage_collect_values=False)
        self.dtype = dtype
        self.inputs = [value_of(node) for node in graph.graph.find_nodes(op="placeholder")]
        self.rounded: list[Node] = []
        self.values: dict[Node, Any] = {}
        self._from_half: set[Node] = set()  # in fp32, but computed from results in half precision

    def run_on_examples(self) -> None:
        example = next((each for each in self.inputs if isinstance(each, FakeTensor)), None)
        if example is None:
            return
        kind = example.device.type
        is_on, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        with contextlib.ExitStack() as stack:
            # These two also restore what the graph would leave changed if it raised an error.
            stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=is_on))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(warnings.catch_warnings(action="ignore"))
            stack.enter_context(example.fake_mode)
            self.run(*self.inputs, enable_io_processing=False)

    def run_node(self, node: Node) -> Any:
        if self.is_changed(node) and any(exceeds(each, self.dtype) for each in (*node.args, *node.kwargs.values())):
            raise ValueError("a number of the model is infinite in half precision")
        value = super().run_node(node)
        if is_wide(value) and node.op != "placeholder":
            given = [each for each in node.all_input_nodes if isinstance(self.values[each], torch.Tensor)]
            if self.is_rounded(node, value, given):
                self.rounded.append(node)
                value = value.to(self.dtype)
            elif any(self.is_half(each) or each in self._from_half for each in given):
                self._from_half.add(node)
        self.values[node] = value
        return value

    def is_rounded(self, node: Node, value: torch.Tensor, given: list[Node]) -> bool:
        kind = value.device.type
        is_cast = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == self.dtype
        if value.ndim < 2 or not is_cast:  # losses have fewer dimensions
            return False
        if node.target in NORMS:
            return True
        others = [each for each in given if not self.is_half(each)]
        return node.target in PROMOTING and len(others) < len(given) and all(map(self.is_stored, others))

    def is_stored(self, node: Node) -> bool:
        """Whether it is a parameter or buffer or computed from parameters. Not a mask that is computed, whose lowest
        number in fp32 is minus infinity in bf16."""
        if self.values[node].requires_grad:
            return node not in self._from_half
        while node.target in VIEWS and isinstance(node.args[0], Node):
            node = node.args[0]
        return node.op in ("placeholder", "get_attr")

    def is_changed(self, node: Node) -> bool:
        """Whether it reads a result that is in fp32 as given."""
        return any(is_wide(value_of(each)) and not is_wide(self.values[each]) for each in node.all_input_nodes)

    def is_half(self, node: Node) -> bool:
        return bool(self.values[node].dtype == self.dtype)


def is_wide(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == torch.float32


def exceeds(number: Any, dtype: torch.dtype) -> bool:
    return isinstance(number, float) and torch.finfo(dtype).max < abs(number) < math.inf


def insert_casts(graph: GraphModule, rounding: Rounding) -> None:
    (output,) = graph.graph.find_nodes(op="output")
    values = {node: value for node, value in rounding.values.items() if node not in rounding.rounded}
    for node in output.all_input_nodes:
        if node in values:
            cast_back(node, output, values[node])
    for node in rounding.rounded:
        cast_after(node, rounding.dtype)
    for node, value in values.items():
        if "example_value" in node.meta:
            node.meta["example_value"] = value
    graph.recompile()


def cast_after(node: Node, dtype: torch.dtype) -> None:
    """What leaves the graph is not rounded."""
    with node.graph.inserting_after(node):
        cast = node.graph.call_method("to", (node, dtype))
    cast.meta = {**node.meta, "example_value": value_of(node).to(dtype)}
    node.replace_all_uses_with(cast, delete_user_cb=lambda user: user is not cast and user.op != "output")


def cast_back(node: Node, output: Node, value: Any) -> None:
    """Gives a result that leaves the graph the dtype that it had before what it was computed from was rounded."""
    given = value_of(node)
    if isinstance(given, torch.Tensor) and value.dtype != given.dtype:
        with node.graph.inserting_before(output):
            back = node.graph.call_method("to", (node, given.dtype))
        back.meta = dict(node.meta)
        output.replace_input_with(node, back)
