"""Converts nodes of an exported graph to nodes of a document, with arguments as JSON."""

import cmath
import math
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch.fx import GraphModule
from torch.fx import Node as FxNode

from kitsune.errors import ExportError
from kitsune.submission.format.blocks import Block, Node, Region
from kitsune.submission.format.limits import ITEM_BYTES, MAX_INTEGER
from kitsune.submission.format.ops import ASSERTIONS, is_allowed
from kitsune.submission.format.source import WAY_OUT, line_of_node
from kitsune.submission.format.targets import target_name

# torch writes the state of torch.backends.cudnn into these calls, which is not part of the model.
_CUDNN_ARGUMENT: Final = {"aten.batch_norm.default": 8, "aten.instance_norm.default": 8}
_CUDNN_WITH_DEFAULT: Final = {"aten.layer_norm.default": 5, "aten.group_norm.default": 5}
_REGIONS: Final = ("wrap_with_set_grad_enabled", "wrap_with_autocast")


def word(value: torch.dtype | torch.memory_format | torch.layout) -> str:
    """torch.float32 -> "float32"."""
    return str(value).removeprefix("torch.")


class Encoder:
    """Encodes the nodes of one graph, given the number of each value. Device `own` is the device of the model."""

    def __init__(self, module: GraphModule, device: torch.device, number: Mapping[FxNode, int]) -> None:
        self.module, self.device, self.number = module, device, number

    def reference(self, node: FxNode) -> str:
        return f"%{self.number[node]}"

    def node(self, node: FxNode) -> Node | Region:
        """Encodes a node. Raises ExportError naming the operator and its line when it cannot be exported."""
        name = target_name(node.target)
        if name in _REGIONS:
            return self._region(node, name)
        if not is_allowed(name):
            raise ExportError(f"operator {name} cannot be exported{line_of_node(node)}; {WAY_OUT}")
        try:
            args = [self._argument(argument) for argument in node.args]
            kwargs = {key: self._argument(value) for key, value in sorted(node.kwargs.items())}
        except ValueError as error:
            raise ExportError(
                f"operator {name} has an argument that cannot be exported: {error}{line_of_node(node)}; {WAY_OUT}"
            ) from error
        return _without_machine(Node(name, args, kwargs))

    def _region(self, node: FxNode, name: str) -> Region:
        settings = 1 if name == "wrap_with_set_grad_enabled" else 4
        holder = node.args[settings]
        body = self.module.get_submodule(str(holder.target)) if isinstance(holder, FxNode) else holder
        if not isinstance(body, GraphModule):
            raise ExportError(f"{name} without a graph{line_of_node(node)}; {WAY_OUT}")
        args = [self._argument(argument) for argument in node.args[settings + 1 :]]
        block = self._body(body)
        if settings == 1:
            return Region("grad", bool(node.args[0]), args, block)
        arguments: tuple[Any, ...] = node.args
        kind, dtype, enabled, cache = arguments[:4]
        own = kind == self.device.type
        return Region(
            "autocast", bool(enabled), args, block, None if dtype is None else word(dtype), cache is not False,
            "own" if own else str(kind),
        )  # fmt: skip

    def _body(self, body: GraphModule) -> Block:
        nodes = list(body.graph.nodes)
        calls = [n for n in nodes if n.op == "call_function" and target_name(n.target) not in ASSERTIONS]
        placeholders = [node for node in nodes if node.op == "placeholder"]
        number = {node: index for index, node in enumerate((*placeholders, *calls))}
        encoder = Encoder(body, self.device, number)
        written = [encoder.node(node) for node in calls]
        results = nodes[-1].args[0]
        results = results if isinstance(results, (tuple, list)) else (results,)
        inputs = [f"a{index}" for index in range(len(placeholders))]
        return Block(inputs, written, [encoder.reference(result) for result in results])

    def _argument(self, value: Any) -> Any:
        if isinstance(value, FxNode):
            return self.reference(value)
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, (list, tuple)):
            return [self._argument(part) for part in value]
        if isinstance(value, slice):
            return {"slice": [self._argument(part) for part in (value.start, value.stop, value.step)]}
        if isinstance(value, (int, float, complex)):
            return _number(value)
        return self._word(value)

    def _word(self, value: Any) -> dict[str, str]:
        if isinstance(value, str):
            return {"text": value}
        if isinstance(value, torch.device):
            return {"device": "own" if value.type == self.device.type else _other_device(value)}
        if isinstance(value, torch.dtype) and word(value) in ITEM_BYTES:
            return {"dtype": word(value)}
        if isinstance(value, torch.memory_format):
            return {"memory_format": word(value)}
        if value is torch.strided:
            return {"layout": "strided"}
        raise ValueError(f"{value!r} ({type(value).__name__})")


def _number(value: complex) -> Any:
    if isinstance(value, int):
        if abs(value) > MAX_INTEGER:
            raise ValueError(f"{value} does not fit in 64 bits")
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"float": str(float(value))}
    if not cmath.isfinite(value):
        raise ValueError(f"{value} is not finite")
    return {"complex": [value.real, value.imag]}


def _other_device(device: torch.device) -> str:
    if device.type != "cpu":
        raise ValueError(f"device {device}, which is not the device of the model")
    return "cpu"


def _without_machine(node: Node) -> Node:
    """The node without arguments that depend only on the machine: the cuDNN flag, pinned memory."""
    args = node.args
    kwargs = {key: value for key, value in node.kwargs.items() if (key, value) != ("pin_memory", False)}
    flag, end = _CUDNN_ARGUMENT.get(node.op), _CUDNN_WITH_DEFAULT.get(node.op)
    if flag is not None and len(args) > flag:
        args = [*args[:flag], True, *args[flag + 1 :]]
    if end is not None:
        args = args[:end]
    return Node(node.op, args, kwargs)
