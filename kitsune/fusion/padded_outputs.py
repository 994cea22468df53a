"""Linear layers whose results leave a graph, such as logits, with rows that begin at multiples of 16 bytes.

Rows of 50257 numbers in half precision begin at odd multiples of two bytes. Then cuBLAS cannot load 16 bytes at once,
so Inductor copies the gradient of such a result to padded rows first, and a loss reads single elements. For GPT-2 with
8 sequences of 512 on an H200 the copy takes 315 us.
"""

import math
from collections.abc import Callable
from typing import Any, Final

import torch
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import register_flop_formula

from kitsune.fusion.operations import aten, operation_of, value_of
from kitsune.kernels.layouts import Shape

#: Rows begin at multiples of so many bytes: a cache line.
ALIGNED_BYTES: Final = 128
#: Without alignment to this, cuBLAS and Triton load less than 16 bytes at once.
LOADED_BYTES: Final = 16
#: Functions and methods that change the shape of all dimensions but the last one, as the checked values show.
VIEWS: Final = frozenset(
    {"view", "reshape", "unflatten", "flatten", torch.reshape, torch.flatten, torch.unflatten, aten.view.default}
)


def pad_outputs(graph: GraphModule, is_wanted: Callable[[torch.Tensor], bool]) -> int:
    """Pads the rows of outputs of the graph, and returns how many: linear layers in half precision and views of them.

    `is_wanted` is asked with the example of each. Values and shapes stay as they are; strides of these outputs change.
    """
    (output,) = graph.graph.find_nodes(op="output")
    layers = [layer_behind(node) for node in pytree.tree_leaves(output.args) if isinstance(node, Node)]
    padded = [layer for layer in dict.fromkeys(layers) if layer is not None and is_wanted(value_of(layer))]
    for layer in padded:
        pad(graph, layer)
    if padded:
        graph.recompile()
    return len(padded)


def layer_behind(node: Node) -> Node | None:
    """The linear layer with unaligned rows that the node is, or is a view of; None if anything else reads it."""
    classes = last_of(node)
    while classes is not None and len(node.users) == 1 and last_of(node) == classes:
        if operation_of(node).name == "linear":
            return node if is_unaligned(node) else None
        if node.target not in VIEWS or not node.args or not isinstance(node.args[0], Node):
            return None
        node = node.args[0]
    return None


def last_of(node: Node) -> int | None:
    """The size of the last dimension of its value."""
    value = value_of(node)
    return value.shape[-1] if isinstance(value, torch.Tensor) and value.ndim > 1 else None


def is_unaligned(layer: Node) -> bool:
    value, weight = value_of(layer), value_of(operation_of(layer).get("weight"))
    is_half = value.dtype in (torch.bfloat16, torch.float16)
    return is_half and weight.ndim == 2 and value.shape[-1] * value.element_size() % LOADED_BYTES > 0


def pad(graph: GraphModule, layer: Node) -> None:
    operation, dtype = operation_of(layer), value_of(layer).dtype
    with graph.graph.inserting_before(layer):
        given = [
            graph.graph.call_method("to", (each, dtype)) if isinstance(each, Node) else each
            for each in map(operation.get, ("x", "weight", "bias"))
        ]
        padded = graph.graph.call_function(torch.ops.kitsune.padded_linear.default, tuple(given))
    padded.meta = dict(layer.meta)
    layer.replace_all_uses_with(padded)
    graph.graph.erase_node(layer)


def parts_of(classes: int, element_size: int) -> list[slice]:
    """The classes that fill whole loads, and the few after them.

    For 4096 rows of 768 and 50257 classes on an H200, cuBLAS has kernels of Turing only: 3360, 2570 and 640 us for the
    product and its two gradients, and 442, 406 and 408 with 50304.
    """
    whole = classes - classes % (LOADED_BYTES // element_size)
    return [part for part in (slice(0, whole), slice(whole, classes)) if part.start < part.stop]


@torch.library.custom_op("kitsune::padded_linear", mutates_args=())
def padded_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`x` (..., n) times the transpose of `weight` (classes, n) plus `bias` (classes,), in rows of padded memory."""
    rows, y = x.flatten(0, -2), results_of(x, weight, bias)
    for part in parts_of(len(weight), x.element_size()):
        into = y.flatten(0, -2)[:, part]
        if bias is None:
            torch.mm(rows, weight[part].t(), out=into)
        else:
            torch.addmm(bias[part], rows, weight[part].t(), out=into)
    return y


@padded_linear.register_fake
def results_of(x: torch.Tensor, weight: torch.Tensor, _: torch.Tensor | None) -> torch.Tensor:
    """A buffer for the result."""
    classes, step = weight.shape[0], ALIGNED_BYTES // x.element_size()
    return x.new_empty(*x.shape[:-1], (classes + step - 1) // step * step)[..., :classes]


@torch.library.custom_op("kitsune::padded_linear_backward", mutates_args=())
def backward(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, needs_x: bool, needs_weight: bool, needs_bias: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of x, weight and bias; empty if not needed. The rows of `dy` may have gaps, which are not read."""
    dy, rows = dy.flatten(0, -2), x.flatten(0, -2)
    dx = torch.empty_like(rows) if needs_x else x.new_empty(0)
    dweight = torch.empty_like(weight) if needs_weight else x.new_empty(0)
    # The few last classes first: their sum is rounded before the large one is added to it in fp32.
    for at, part in enumerate(reversed(parts_of(len(weight), x.element_size()))):
        if needs_x:
            torch.addmm(dx, dy[:, part], weight[part], beta=int(at > 0), out=dx)
        if needs_weight:
            torch.mm(dy[:, part].t(), rows, out=dweight[part])
    return dx.view(x.shape) if needs_x else dx, dweight, dy.sum(0) if needs_bias else x.new_empty(0)


@backward.register_fake
def _(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, needs_x: bool, needs_weight: bool, needs_bias: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dx = x.new_empty(x.shape if needs_x else 0)
    return dx, x.new_empty(weight.shape if needs_weight else 0), x.new_empty(dy.shape[-1] if needs_bias else 0)


@register_flop_formula(torch.ops.kitsune.padded_linear)
def _(x: Shape, weight: Shape, *_: Any, **__: Any) -> int:
    return 2 * math.prod(x) * weight[0]


@register_flop_formula(torch.ops.kitsune.padded_linear_backward)
def _(_: Shape, x: Shape, weight: Shape, needs_x: bool, needs_weight: bool, *__: Any, **___: Any) -> int:
    return 2 * math.prod(x) * weight[0] * (needs_x + needs_weight)


def _keep(ctx: Any, inputs: tuple[Any, ...], **_: Any) -> None:
    x, weight, bias = inputs
    ctx.has_bias = bias is not None
    ctx.save_for_backward(x, weight)


def _gradients(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    needs = ctx.needs_input_grad
    found = backward(dy, *ctx.saved_tensors, needs[0], needs[1], ctx.has_bias and needs[2])
    return tuple(each if each.numel() else None for each in found)


padded_linear.register_autograd(_gradients, setup_context=_keep)
