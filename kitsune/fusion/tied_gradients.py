"""The gradient of an embedding, added up within the other gradient of its weight, where the weight is tied to a head.

Inductor fills a tensor of the weight's size with zeros, adds the rows of the embedding to it, and adds it to the
gradient of the head in a third pass. Only the rows that a batch has are needed.
"""

import importlib
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch.fx import Graph, Node

from kitsune.fusion.cache_key import CODE_KEY
from kitsune.fusion.operations import aten

#: Add rows at their places to the first argument. For the former two a fourth argument says that they add.
PUTS: Final = (aten.index_put.default, aten._unsafe_index_put.default)
MASKED_PUTS: Final = (aten._unsafe_masked_index_put_accumulate.default,)
ZEROS: Final = frozenset({aten.full.default, aten.zeros.default, aten.new_zeros.default})
#: In half precision, rows that are small beside the other summand would be lost one by one.
WIDE: Final = (torch.float32, torch.float64)
#: AOTAutograd's name for a gradient that a backward is called with.
TANGENT: Final = "tangents"


def options() -> Mapping[str, Any]:
    """Inductor's options for it. Loads Inductor.

    None where the user has set a pass in its place, or where its code has no key by which Inductor may cache graphs.
    """
    if torch._inductor.config.post_grad_custom_pre_pass or not CODE_KEY:
        return {}
    importlib.import_module("torch._inductor.custom_graph_pass").CustomGraphPass.register(TiedGradients)
    return {"post_grad_custom_pre_pass": TiedGradients()}


class TiedGradients:
    """A pass of Inductor over the operators of a graph. `options` makes it a subclass of Inductor's CustomGraphPass."""

    def __call__(self, graph: Graph) -> None:
        merge(graph)

    def uuid(self) -> str:
        """What Inductor's cache knows it by."""
        return CODE_KEY


def merge(graph: Graph) -> int:
    """Adds rows to the other summand instead of to zeros, wherever nothing else reads either. Returns how often.

    In the graph of a backward only: a sum of the model's own may have small rows and a large other summand.
    """
    if not any(node.name.startswith(TANGENT) for node in graph.find_nodes(op="placeholder")):
        return 0
    return sum(merge_at(total) for total in graph.find_nodes(op="call_function", target=aten.add.Tensor))


def merge_at(total: Node) -> bool:
    """Whether it was a sum of rows on zeros and something else, which is then replaced."""
    found = parts_of(total)
    if found is None:
        return False
    rows, other = found
    put: Any = rows.target
    with total.graph.inserting_before(total):
        merged = total.graph.call_function(put, (other, *rows.args[1:]))
    merged.meta = dict(total.meta)
    total.replace_all_uses_with(merged)
    for node in (total, rows):
        node.graph.erase_node(node)
    return True


def parts_of(total: Node) -> tuple[Node, Node] | None:
    """(the summand that is rows added to zeros, the other one) of a sum in fp32 or fp64 that alone reads both."""
    if total.kwargs or not all(isinstance(each, Node) and len(each.users) == 1 for each in total.args):
        return None
    one, second = total.args
    if not isinstance(one, Node) or not isinstance(second, Node) or one is second or kind_of(total)[-1] not in WIDE:
        return None
    for rows, other in ((one, second), (second, one)):
        if is_rows_on_zeros(rows) and kind_of(rows) == kind_of(other) == kind_of(total):
            return rows, other
    return None


def is_rows_on_zeros(node: Node) -> bool:
    adds = node.target in MASKED_PUTS or (node.target in PUTS and node.args[3:] == (True,))
    base: Any = node.args[0] if adds else None
    if not isinstance(base, Node) or base.target not in ZEROS:
        return False
    return base.target is not aten.full.default or bool(base.args[1] == 0)


def kind_of(node: Node) -> tuple[Any, ...]:
    """Shape, strides and dtype of its value."""
    value = node.meta["val"]
    return tuple(value.shape), tuple(value.stride()), value.dtype
