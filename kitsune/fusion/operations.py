"""Maps nodes of a captured graph to operations with one name for each, however the call is written.

Graphs from Dynamo contain calls of torch.nn.functional, torch and tensor methods; graphs of exported and rebuilt models
contain the corresponding aten operators.
"""

import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast
from torch.fx import Node

aten: Final = torch.ops.aten
LINEAR = ("x", "weight", "bias")
LAYER_NORM = ("x", "shape", "weight", "bias", "eps")
RMS_NORM = ("x", "shape", "weight", "eps")
DROPOUT = ("x", "p", "training", "inplace")
CROSS_ENTROPY = ("x", "target", "weight", "averages", "ignore_index", "reduces", "reduction", "label_smoothing")
BATCH_NORM = ("x", "mean", "variance", "weight", "bias", "training", "momentum", "eps")
BATCH_NORM_OF_ATEN = ("x", "weight", "bias", "mean", "variance", "training", "momentum", "eps")
MEAN = ("x", "dim", "keepdim", "dtype")
CONVOLUTION = ("x", "weight", "bias", "stride", "padding", "dilation", "groups")
ATTENTION = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
MULTI_HEAD = (
    *("query", "key", "value", "width", "heads", "weight", "bias", "bias_k", "bias_v", "add_zero_attn", "dropout_p"),
    *("out_weight", "out_bias", "training", "key_padding_mask", "need_weights", "attn_mask", "is_separate"),
)
MAX_POOL = ("x", "kernel", "stride", "padding", "dilation", "ceil_mode", "return_indices")
PAIR = ("x", "y")

#: Target of a node -> (operation, names of its arguments in order).
SPELLINGS: Final[Mapping[Any, tuple[str, tuple[str, ...]]]] = {
    F.linear: ("linear", LINEAR),
    aten.linear.default: ("linear", LINEAR),
    **dict.fromkeys((torch.addmm, aten.addmm.default), ("addmm", ("bias", "x", "weight"))),
    **dict.fromkeys((operator.matmul, torch.matmul, aten.matmul.default, "matmul"), ("matmul", PAIR)),
    **dict.fromkeys((torch.t, aten.t.default, "t", aten.numpy_T.default), ("transposed", ("x",))),
    **dict.fromkeys((torch.transpose, aten.transpose.int, "transpose"), ("transpose", ("x", "one", "other"))),
    getattr: ("attribute", ("x", "name")),
    F.layer_norm: ("layer_norm", LAYER_NORM),
    torch.layer_norm: ("layer_norm", LAYER_NORM),
    aten.layer_norm.default: ("layer_norm", LAYER_NORM),
    F.rms_norm: ("rms_norm", RMS_NORM),
    torch.rms_norm: ("rms_norm", RMS_NORM),
    aten.rms_norm.default: ("rms_norm", RMS_NORM),
    F.gelu: ("gelu", ("x", "approximate")),
    aten.gelu.default: ("gelu", ("x", "approximate")),
    F.silu: ("silu", ("x", "inplace")),
    **dict.fromkeys((aten.silu.default, aten.silu_.default), ("silu", ("x",))),
    F.relu: ("relu", ("x", "inplace")),
    **dict.fromkeys((torch.relu, torch.relu_, "relu", "relu_"), ("relu", ("x",))),
    **dict.fromkeys((aten.relu.default, aten.relu_.default), ("relu", ("x",))),
    **dict.fromkeys((F.dropout, torch.dropout, aten.dropout.default), ("dropout", DROPOUT)),
    **dict.fromkeys((torch.conv2d, aten.conv2d.default, aten.conv2d.padding), ("conv2d", CONVOLUTION)),
    **dict.fromkeys((F.max_pool2d, torch.max_pool2d, aten.max_pool2d.default), ("max_pool2d", MAX_POOL)),
    F.batch_norm: ("batch_norm", BATCH_NORM),
    **dict.fromkeys((torch.batch_norm, aten.batch_norm.default), ("batch_norm", BATCH_NORM_OF_ATEN)),
    F.softmax: ("softmax", ("x", "dim", "stack", "dtype")),
    **dict.fromkeys((torch.softmax, "softmax", aten.softmax.int), ("softmax", ("x", "dim", "dtype"))),
    **dict.fromkeys(
        (F.scaled_dot_product_attention, aten.scaled_dot_product_attention.default), ("attention", ATTENTION)
    ),
    F.multi_head_attention_forward: ("multi_head_attention", MULTI_HEAD),
    F.cross_entropy: ("cross_entropy", CROSS_ENTROPY),
    aten.cross_entropy_loss.default: (
        "cross_entropy",
        ("x", "target", "weight", "reduction", "ignore_index", "label_smoothing"),
    ),
    **dict.fromkeys(
        (operator.add, operator.iadd, torch.add, aten.add.Tensor, aten.add_.Tensor, "add", "add_"),
        ("add", (*PAIR, "alpha")),
    ),
    **dict.fromkeys((operator.mul, torch.mul, aten.mul.Tensor, "mul"), ("mul", PAIR)),
    **dict.fromkeys((operator.truediv, torch.div, aten.div.Tensor, "div"), ("div", (*PAIR, "rounding_mode"))),
    **dict.fromkeys((operator.pow, torch.pow, aten.pow.Tensor_Scalar, "pow"), ("pow", PAIR)),
    **dict.fromkeys((torch.square, aten.square.default, "square"), ("square", ("x",))),
    **dict.fromkeys((torch.rsqrt, aten.rsqrt.default, "rsqrt"), ("rsqrt", ("x",))),
    **dict.fromkeys((torch.tanh, aten.tanh.default, "tanh"), ("tanh", ("x",))),
    **dict.fromkeys((torch.sigmoid, aten.sigmoid.default, "sigmoid"), ("sigmoid", ("x",))),
    **dict.fromkeys((torch.erf, torch.special.erf, aten.erf.default, "erf"), ("erf", ("x",))),
    **dict.fromkeys((torch.mean, "mean", aten.mean.dim), ("mean", MEAN)),
    **dict.fromkeys(("to", aten.to.dtype), ("to", ("x", "dtype"))),
    **dict.fromkeys(("float", "type_as", aten.type_as.default), ("to", ("x",))),
    **dict.fromkeys(("bool", "contiguous"), ("as_is", ("x",))),
    **dict.fromkeys(("view", "reshape", torch.reshape, aten.view.default, aten.reshape.default), ("view", ("x",))),
    **dict.fromkeys(("flatten", torch.flatten, aten.flatten.using_ints), ("view", ("x",))),
    **dict.fromkeys((aten.contiguous.default,), ("as_is", ("x",))),
    **dict.fromkeys(
        (torch.masked_fill, aten.masked_fill.Scalar, "masked_fill"), ("masked_fill", ("x", "mask", "value"))
    ),
    **dict.fromkeys((torch.cos, aten.cos.default, "cos"), ("cos", ("x",))),
    **dict.fromkeys((torch.sin, aten.sin.default, "sin"), ("sin", ("x",))),
    **dict.fromkeys((operator.neg, torch.neg, aten.neg.default, "neg"), ("neg", ("x",))),
    **dict.fromkeys((torch.cat, torch.concat, aten.cat.default), ("cat", ("tensors", "dim"))),
    **dict.fromkeys((torch.chunk, aten.chunk.default, "chunk"), ("chunk", ("x", "chunks", "dim"))),
    **dict.fromkeys((torch.unsqueeze, aten.unsqueeze.default, "unsqueeze"), ("unsqueeze", ("x", "dim"))),
    operator.getitem: ("item", ("x", "index")),
    aten.slice.Tensor: ("slice", ("x", "dim", "start", "end", "step")),
    **dict.fromkeys((torch.triu, aten.triu.default, "triu"), ("triu", ("x", "diagonal"))),
    **dict.fromkeys((torch.ones, aten.ones.default), ("ones", ("shape",))),
}
#: torch's keyword -> the name of the argument here, where they differ.
KEYWORDS: Final[Mapping[str, str]] = {
    "input": "x",
    "self": "x",
    "other": "y",
    "exponent": "y",
    "normalized_shape": "shape",
    "size_average": "averages",
    "reduce": "reduces",
    "kernel_size": "kernel",
    "train": "training",
    "running_mean": "mean",
    "running_var": "variance",
    "use_separate_proj_weight": "is_separate",
}
#: Functions and methods that give a view, or the same numbers in another layout.
VIEWS: Final = frozenset(
    {
        *(operator.getitem, "view", "reshape", "flatten", "unflatten", "expand", "expand_as", "contiguous"),
        *("unsqueeze", "squeeze", "transpose", "permute", "t", "chunk", "split", "unbind", "select", "narrow"),
        *(torch.reshape, torch.flatten, torch.unflatten, torch.unsqueeze, torch.squeeze, torch.transpose),
        *(torch.permute, torch.t, torch.chunk, torch.split, torch.unbind, torch.select, torch.narrow),
        *(aten.view.default, aten.reshape.default, aten.flatten.using_ints, aten.unflatten.int, aten.t.default),
        *(aten.transpose.int, aten.permute.default, aten.chunk.default, aten.split.Tensor, aten.unbind.int),
        *(aten.slice.Tensor, aten.select.int),
    }
)
#: The module of Kitsune's own calls. By name: it loads Triton.
CALLS: Final = "kitsune.fusion.calls"
#: Calls that change a mode (autocast, grad): nodes cannot be moved across them.
BORDERS: Final = (
    *(_enter_autocast, _exit_autocast, torch._C._set_grad_enabled),
    *(torch.autograd.grad_mode._enter_inference_mode, torch.autograd.grad_mode._exit_inference_mode),
)
#: Operations whose result is a new tensor that aliases nothing.
FRESH: Final = frozenset({"linear", "matmul", "layer_norm", "rms_norm", "batch_norm"})


@dataclass(frozen=True, slots=True)
class Operation:
    """The operation of a node and its arguments by name. Missing arguments have torch's default."""

    name: str
    arguments: Mapping[str, Any]

    def get(self, name: str, default: Any = None) -> Any:
        return self.arguments.get(name, default)


NONE: Final = Operation("", MappingProxyType({}))


def operation_of(node: Any) -> Operation:
    """The operation of a node. Its name is empty for a node that is not in the table."""
    if not isinstance(node, Node) or node.op not in ("call_function", "call_method"):
        return NONE
    spelling = SPELLINGS.get(node.target)
    if spelling is None:
        return NONE
    name, parameters = spelling
    given = dict(zip(parameters, node.args, strict=False))
    return Operation(name, given | {KEYWORDS.get(key, key): value for key, value in node.kwargs.items()})


def value_of(node: Any) -> Any:
    """The fake tensor of a node, with its shape and dtype. A value that is not a node is returned unchanged."""
    return node.meta.get("example_value") if isinstance(node, Node) else node


def values_in(value: Any) -> tuple[Any, ...]:
    """The values of a node that gives several, as chunk does, or its one."""
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def is_tensor(node: Any) -> bool:
    return isinstance(node, Node) and isinstance(value_of(node), torch.Tensor)


def memory_of(value: Any) -> int | None:
    """The storage id of a tensor: views share one. None for tensors without one, and for other values."""
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return None
    try:
        return int(value.untyped_storage()._cdata)
    except NotImplementedError:  # a tensor of torch.func
        return None


def is_last(dim: Any, x: Any) -> bool:
    """Whether `dim` is the last dimension of a tensor."""
    return is_tensor(x) and dim in (-1, value_of(x).ndim - 1)


def behind(node: Any, is_passed: Callable[[Any], bool]) -> tuple[Any, list[Node]]:
    """(the input of a chain of nodes, the chain): goes from the last node to its `x` while `is_passed`."""
    passed: list[Node] = []
    while is_passed(node):
        passed.append(node)
        node = operation_of(node).get("x")
    return node, passed


def autocasts_at(node: Node) -> tuple[tuple[Any, ...], ...]:
    """The arguments of the autocast blocks of the model around the node, outermost first."""
    opened: dict[Node, tuple[Any, ...]] = {}
    for other in node.graph.nodes:
        if other is node:
            break
        if other.target is _enter_autocast:
            opened[other] = tuple(other.args)
        elif other.target is _exit_autocast:
            opened.pop(other.args[0], None)
    return tuple(opened.values())


def names_of(nodes: Iterable[Node]) -> str:
    return ", ".join(operation_of(node).name or str(node.target) for node in nodes)
