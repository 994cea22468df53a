"""Builds torch graph modules from blocks of a document. All names in them are generated here."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import fx, nn

from kitsune.errors import ArchiveError
from kitsune.submission.format.blocks import Block, Node, Region
from kitsune.submission.format.limits import ITEM_BYTES
from kitsune.submission.format.ops import DROPOUT
from kitsune.submission.format.targets import target
from kitsune.submission.rebuilding.guards import GUARDS

DTYPES: Final[Mapping[str, torch.dtype]] = {name: getattr(torch, name) for name in ITEM_BYTES}
MEMORY_FORMATS: Final = {
    "contiguous": torch.contiguous_format,
    "contiguous_format": torch.contiguous_format,
    "channels_last": torch.channels_last,
    "channels_last_3d": torch.channels_last_3d,
    "preserve_format": torch.preserve_format,
}


class GradRegion(nn.Module):
    """Runs its body with gradients enabled or disabled."""

    def __init__(self, body: fx.GraphModule, enabled: bool) -> None:
        super().__init__()
        self.body, self.enabled = body, enabled

    def forward(self, *args: Any) -> Any:
        with torch.set_grad_enabled(self.enabled):
            return self.body(*args)


class AutocastRegion(nn.Module):
    """Runs its body with autocast enabled or disabled."""

    def __init__(self, body: fx.GraphModule, region: Region, device: torch.device) -> None:
        super().__init__()
        self.body = body
        self.device_type = device.type if region.device == "own" else region.device
        self.dtype = None if region.dtype is None else DTYPES[region.dtype]
        self.enabled, self.cache = region.enabled, region.cache

    def forward(self, *args: Any) -> Any:
        with torch.autocast(self.device_type, self.dtype, self.enabled, self.cache):
            return self.body(*args)


class Decoder:
    """Builds graph modules for one device."""

    def __init__(self, device: torch.device, randomness: bool) -> None:
        self.device, self.randomness = device, randomness

    def module(self, block: Block, placeholders: Sequence[str], tensors: Mapping[str, torch.Tensor]) -> fx.GraphModule:
        """A module that takes `placeholders` in order. The block's other inputs are `tensors`, by source."""
        root, graph = nn.Module(), fx.Graph()
        values: dict[str, fx.Node] = {name: graph.placeholder(name) for name in placeholders}
        named = set(block.inputs)
        for name, tensor in tensors.items():
            if isinstance(tensor, nn.Parameter):
                root.register_parameter(name, tensor)
            else:
                root.register_buffer(name, tensor)
            if name in named:
                values[name] = graph.get_attr(name)
        results = self._fill(graph, root, block, [values[name] for name in block.inputs])
        graph.output(results[0] if len(results) == 1 else tuple(results))
        module = fx.GraphModule(root, graph)
        _adopt(module, root)
        return module

    def _fill(self, graph: fx.Graph, root: nn.Module, block: Block, values: list[fx.Node]) -> list[fx.Node]:
        for number, node in enumerate(block.nodes):
            if isinstance(node, Region):
                name = f"region{number}"
                root.add_module(name, self._region(node))
                args = tuple(self._argument(argument, values) for argument in node.args)
                values.append(graph.create_node("call_module", name, args, {}, f"n{number}"))
            else:
                values.append(self._call(graph, node, values, f"n{number}"))
        return [values[int(output[1:])] for output in block.outputs]

    def _call(self, graph: fx.Graph, node: Node, values: list[fx.Node], name: str) -> fx.Node:
        try:
            function = target(node.op)
        except LookupError as error:
            raise ArchiveError(f"the archive cannot be rebuilt here: {error}") from error
        args = [self._argument(argument, values) for argument in node.args]
        kwargs = {key: self._argument(value, values) for key, value in node.kwargs.items()}
        if not self.randomness:
            _switch_off_dropout(node.op, args, kwargs)
        _guard(graph, node.op, args, kwargs, name)
        return graph.create_node("call_function", function, tuple(args), kwargs, name)

    def _region(self, region: Region) -> nn.Module:
        root, graph = nn.Module(), fx.Graph()
        inputs = [graph.placeholder(name) for name in region.block.inputs]
        graph.output(tuple(self._fill(graph, root, region.block, inputs)))
        body = fx.GraphModule(root, graph)
        return GradRegion(body, region.enabled) if region.kind == "grad" else AutocastRegion(body, region, self.device)

    def _argument(self, value: Any, values: list[fx.Node]) -> Any:
        if isinstance(value, str):
            return values[int(value[1:])]
        if isinstance(value, list):
            return [self._argument(part, values) for part in value]
        if not isinstance(value, dict):
            return value
        ((kind, content),) = value.items()
        if kind == "slice":
            return slice(*(self._argument(part, values) for part in content))
        return self._special(kind, content)

    def _special(self, kind: str, content: Any) -> Any:
        readers: dict[str, Callable[[Any], Any]] = {
            "dtype": DTYPES.__getitem__,
            "memory_format": MEMORY_FORMATS.__getitem__,
            "layout": lambda _: torch.strided,
            "device": lambda name: self.device if name == "own" else torch.device(name),
            "float": float,
            "complex": lambda parts: complex(*parts),
            "text": str,
        }
        return readers[kind](content)


def _switch_off_dropout(op: str, args: list[Any], kwargs: dict[str, Any]) -> None:
    if op not in DROPOUT:
        return
    name, position = DROPOUT[op]
    if name in kwargs:
        kwargs[name] = 0.0
    elif position < len(args):
        args[position] = 0.0


def _guard(graph: fx.Graph, op: str, args: list[Any], kwargs: dict[str, Any], name: str) -> None:
    """Inserts the guard of an operator before it, if it has one."""
    if op not in GUARDS:
        return
    position, guard = GUARDS[op]
    if position >= len(args):
        raise ArchiveError(f"the archive cannot be rebuilt here: {op} needs {position + 1} arguments by position")
    args[position] = graph.create_node("call_function", guard, (op, *args), kwargs, f"{name}_guarded")


def _adopt(module: fx.GraphModule, root: nn.Module) -> None:
    """Registers tensors that no node reads: a GraphModule drops them, but an optimizer may hold them."""
    for name, parameter in root.named_parameters(recurse=False):
        if not hasattr(module, name):
            module.register_parameter(name, parameter)
    for name, buffer in root.named_buffers(recurse=False):
        if not hasattr(module, name):
            module.register_buffer(name, buffer)
