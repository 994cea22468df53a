"""Splits an exported program into the forward block and the loss block of a document.

The program is one sequence of nodes. It is split after the last node created by the model's own forward; values from
before the split that the loss reads become outputs of the forward. Sizes never cross the split: each side computes them
from its own inputs, so that the forward needs x only.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node as FxNode

from kitsune.errors import ExportError
from kitsune.submission.exporting.encode import Encoder
from kitsune.submission.format.blocks import Block, Node, Region
from kitsune.submission.format.ops import ASSERTIONS
from kitsune.submission.format.source import WAY_OUT, line_of_node
from kitsune.submission.format.targets import target_name


@dataclass(frozen=True, slots=True)
class Origins:
    """The source of each placeholder of the program ("t0", "x0", "y1"), and which tensors are parameters."""

    of: Mapping[str, str]
    parameters: frozenset[str]

    def source(self, node: FxNode) -> str:
        return self.of.get(node.name, "")


def cut(
    program: torch.export.ExportedProgram, origins: Origins, has_loss: bool, device: torch.device
) -> tuple[Block, Block | None]:
    """The blocks of forward and loss (None when the model returns its loss). Raises ExportError naming the operator."""
    module = program.graph_module
    _merge_ties(module, origins)
    _merge_copies(module)
    calls = [
        node for node in module.graph.nodes if node.op == "call_function" and target_name(node.target) not in ASSERTIONS
    ]
    (result,) = next(node for node in module.graph.nodes if node.op == "output").args[0][-1:]
    if not isinstance(result, FxNode):
        raise ExportError("the loss does not depend on the model; return a tensor computed from its output")
    if not has_loss:
        forward = _Side(module, origins, device, calls)
        return forward.block([result]), None
    border = 1 + max((index for index, node in enumerate(calls) if _is_in_model(node)), default=-1)
    forward = _Side(module, origins, device, calls[:border])
    loss = _Side(module, origins, device, calls[border:], forward)
    loss_block = loss.block([result])
    return forward.block(loss.crossing), loss_block


def _merge_ties(module: torch.fx.GraphModule, origins: Origins) -> None:
    """Merges the placeholders of tied parameters, which have one for each name."""
    first: dict[str, FxNode] = {}
    for node in module.graph.nodes:
        if node.op == "placeholder" and node.users:
            one = first.setdefault(origins.source(node), node)
            if one is not node:
                node.replace_all_uses_with(one)


def _merge_copies(module: torch.fx.GraphModule) -> None:
    """Normalises attention: torch 2.11 copies and views a transposed tensor where 2.13 reshapes it, which is equal."""
    for node in module.graph.nodes:
        copy: Any = next(iter(node.args), None)
        if target_name(node.target) == "aten.view.default" and _is_copy_of_attention(copy):
            node.target = torch.ops.aten.reshape.default
            node.replace_input_with(copy, copy.args[0])
            module.graph.erase_node(copy)


def _is_copy_of_attention(node: Any) -> bool:
    if not isinstance(node, FxNode) or target_name(node.target) != "aten.contiguous.default" or len(node.users) != 1:
        return False
    *_, kind = ["", *(kind for _, kind in node.meta.get("nn_module_stack", {}).values())]
    return kind in (torch.nn.MultiheadAttention, "torch.nn.modules.activation.MultiheadAttention")


def _is_in_model(node: FxNode) -> bool:
    """Whether the model's own forward created the node (`_Step` holds the model as `model`)."""
    return any(path == "model" for path, _ in node.meta.get("nn_module_stack", {}).values())


def _is_size(node: FxNode) -> bool:
    """Whether the node is arithmetic on sizes, which both sides compute for themselves."""
    if node.op != "call_function" or isinstance(node.meta.get("val"), torch.Tensor):
        return False
    name = target_name(node.target)
    return name.startswith("aten.sym_") or (name.startswith("py.") and all(map(_is_size, node.all_input_nodes)))


class _Side:
    """Builds the block of one side of the split: first orders the values it needs, then numbers them."""

    def __init__(
        self,
        module: torch.fx.GraphModule,
        origins: Origins,
        device: torch.device,
        calls: list[FxNode],
        before: "_Side | None" = None,
    ) -> None:
        self.module, self.origins, self.device, self.before = module, origins, device, before
        self.calls = [node for node in calls if not _is_size(node) and not _is_idle(node)]
        self.members = set(self.calls)
        self.order: list[FxNode] = []
        self.placed: set[FxNode] = set()
        self.inputs: dict[FxNode, str] = {}
        self.crossing: list[FxNode] = []
        self.sizes: dict[FxNode, tuple[FxNode, int]] = {}

    def block(self, outputs: list[FxNode]) -> Block:
        for node in (*self.calls, *outputs):
            self._place(node)
        first = len(self.inputs)
        number = {node: index for index, node in enumerate(self.inputs)}
        number |= {node: first + index for index, node in enumerate(self.order)}
        encoder = Encoder(self.module, self.device, number)
        nodes = [self._written(node, encoder) for node in self.order]
        return Block(list(self.inputs.values()), nodes, [encoder.reference(node) for node in outputs])

    def _written(self, node: FxNode, encoder: Encoder) -> Node | Region:
        if node not in self.sizes:
            return encoder.node(node)
        tensor, dimension = self.sizes[node]
        return Node("aten.sym_size.int", [encoder.reference(tensor), dimension], {})

    def _place(self, node: FxNode) -> None:
        """Appends the node after everything that it needs from this side."""
        if node in self.placed or node.op == "get_attr":
            return
        self.placed.add(node)
        if node.op == "placeholder":
            self._place_input(node)
        elif _is_size(node):
            for part in self._size_inputs(node):
                self._place(part)
            self.order.append(node)
        elif node in self.members:
            for part in node.all_input_nodes:
                self._place(part)
            self.order.append(node)
        else:
            self._cross(node)

    def _place_input(self, node: FxNode) -> None:
        source = self.origins.source(node)
        if self.before is None:
            if source[0] == "y":
                raise ExportError(f"the forward seems to read {source}, a leaf of y; {WAY_OUT}")
            self.inputs[node] = source
        elif source[0] == "x" or source in self.origins.parameters or self._is_used_before(node):
            self._cross(node)
        else:
            self.inputs[node] = source

    def _is_used_before(self, node: FxNode) -> bool:
        return self.before is not None and any(user in self.before.members for user in node.users)

    def _cross(self, node: FxNode) -> None:
        if self.before is None:
            raise ExportError(f"{target_name(node.target)}{line_of_node(node)} runs after the model; {WAY_OUT}")
        if not isinstance(node.meta.get("val"), torch.Tensor):
            raise ExportError(f"the loss uses a number that the model computed{line_of_node(node)}; {WAY_OUT}")
        self.inputs[node] = f"o{len(self.crossing)}"
        self.crossing.append(node)

    def _size_inputs(self, node: FxNode) -> Iterator[FxNode]:
        if target_name(node.target) != "aten.sym_size.int":
            yield from node.all_input_nodes
            return
        own: tuple[Any, ...] = node.args
        tensor, dimension = self._same_size(str(node.meta["val"])) or (own[0], own[1])
        self.sizes[node] = (tensor, dimension)
        yield tensor

    def _same_size(self, size: str) -> tuple[FxNode, int] | None:
        """An input of this side and its dimension of that size: a leaf of the batch, or an output of the forward."""
        leaf = "x" if self.before is None else "y"
        placeholders = (node for node in self.module.graph.nodes if node.op == "placeholder")
        leaves = [node for node in placeholders if self.origins.source(node)[:1] == leaf]
        for node in (*leaves, *self.crossing):
            for dimension, here in enumerate(node.meta["val"].shape):
                if isinstance(here, torch.SymInt) and str(here) == size:
                    return node, dimension
        return None


def _is_idle(node: FxNode) -> bool:
    """Whether the node is unused and has no effect; torch 2.11 leaves empty tensors of transformer layers."""
    return target_name(node.target).startswith(("py.getitem", "aten.empty.")) and not node.users
