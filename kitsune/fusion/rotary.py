"""The pattern of rotary position embedding as written out in Llama.

The kernel reads one half of each row of angles, so both must be equal: the graph must show them as cat((a, a), -1).
"""

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch._higher_order_ops.wrap import wrap_with_autocast, wrap_with_set_grad_enabled
from torch.fx import Node

from kitsune.fusion import calls
from kitsune.fusion.match import Found, Match
from kitsune.fusion.norms import factors, is_sum
from kitsune.fusion.operations import Operation, is_last, is_tensor, operation_of, value_of
from kitsune.fusion.writes import bodies_of, is_written

#: A half of the last dimension: of which tensor, which half, and the nodes that slice it.
Half = tuple[Any, int, tuple[Node, ...]]

#: Elementwise operations.
ELEMENTWISE: Final = frozenset({"cos", "sin", "to", "as_is"})
#: torch.export puts no_grad and autocast blocks into nested graphs.
WRAPS: Final = (wrap_with_set_grad_enabled, wrap_with_autocast)
ALL: Final = slice(None)
NUMBER: Final = (int, float)


def rope(node: Node) -> Found:
    """x * cos + cat((-x[..., half:], x[..., :half]), -1) * sin, with each sum and product in either order."""
    operation = operation_of(node)
    pair = operation.get("x"), operation.get("y")
    if not (is_sum(node) and all(map(is_tensor, pair))):
        return None
    for straight, crossed in (pair, pair[::-1]):
        for rotated, sin in factors(crossed):
            turn = turn_of(rotated)
            for x, cos in factors(straight):
                if turn is not None and turn[0] is x:
                    return matched(node, x, cos, sin, (straight, crossed, *turn[1]))
    return None


def matched(node: Node, x: Node, cos: Node, sin: Node, inner: tuple[Node, ...]) -> Found:
    heads = heads_of(value_of(x).shape, value_of(cos).shape)
    if heads is None or value_of(cos).shape != value_of(sin).shape:
        return "its shapes are not those of heads and the angles of their positions"
    if value_of(cos).requires_grad or value_of(sin).requires_grad:
        return "its angles are learned"
    seen = doubled(cos), doubled(sin)
    if not all(seen):
        return "the graph does not show that both halves of its angles are equal"
    if any(map(is_written, seen)):
        return "something is written into its angles"
    arguments = (x, cos, sin, heads, value_of(node).dtype)
    return Match(call=calls.rope, arguments=arguments, results=(node,), inner=inner)


def turn_of(node: Any) -> tuple[Any, tuple[Node, ...]] | None:
    """(x, the nodes in between) of cat((-x[..., half:], x[..., :half]), -1), or None."""
    parts = parts_of(node)
    if len(parts) != 2 or operation_of(parts[0]).name != "neg":
        return None
    high, low = half_of(operation_of(parts[0]).get("x")), half_of(parts[1])
    if high is None or low is None or high[0] is not low[0] or (high[1], low[1]) != (1, 0):
        return None
    return high[0], tuple(dict.fromkeys((node, parts[0], *high[2], *low[2])))


def parts_of(node: Any) -> Sequence[Any]:
    """The parts of a concatenation along the last dimension; empty for other nodes."""
    operation = operation_of(node)
    if operation.name != "cat" or not is_tensor(node) or not is_last(operation.get("dim", 0), node):
        return ()
    parts = operation.get("tensors")
    return parts if isinstance(parts, list | tuple) else ()


def half_of(node: Any) -> Half | None:
    """The half that a slice or chunk(2, -1) takes, or None."""
    operation = operation_of(node)
    x, index = operation.get("x"), operation.get("index")
    chunks = operation_of(x)
    if operation.name == "item" and chunks.name == "chunk" and index in (0, 1):
        is_half = chunks.get("chunks") == 2 and is_last(chunks.get("dim", 0), chunks.get("x"))
        return (chunks.get("x"), index, (node, x)) if is_half else None
    cut = cut_of(operation)
    if cut is None or not is_tensor(x):
        return None
    size = value_of(x).shape[-1]
    bounds = cut.indices(size) if isinstance(size, int) else None
    for which, wanted in enumerate(((0, size // 2, 1), (size // 2, size, 1))):
        if bounds == wanted:
            return x, which, (node,)
    return None


def cut_of(operation: Operation) -> slice | None:
    """The slice of the last dimension, if all of the others are taken in full; else None."""
    x, index = operation.get("x"), operation.get("index")
    if operation.name == "slice" and is_last(operation.get("dim", 0), x):
        cut = slice(operation.get("start"), operation.get("end"), operation.get("step"))
    elif operation.name == "item" and isinstance(index, tuple) and index and is_tensor(x):
        rest, cut = index[:-1], index[-1]
        reaches = Ellipsis in rest or len(index) == value_of(x).ndim
        if not (reaches and isinstance(cut, slice) and all(one is Ellipsis or one == ALL for one in rest)):
            return None
    else:
        return None
    return cut if all(isinstance(one, int | None) for one in (cut.start, cut.stop, cut.step)) else None


def heads_of(x: torch.Size, angles: torch.Size) -> int | None:
    """The dimension of heads in `x`, 1 or 2, in which the angles have size 1; else None."""
    padded = (*(1 for _ in range(len(x) - len(angles))), *angles)
    if len(x) != 4 or len(padded) != 4 or x[-1] % 2:
        return None
    batch, first, second, head = x
    shapes = {1: (1, second, head), 2: (first, 1, head)}
    fitting = [at for at, shape in shapes.items() if padded[1:] == shape and padded[0] in (1, batch)]
    return fitting[0] if fitting else None


def doubled(node: Any) -> tuple[Node, ...]:
    """The nodes from this one back to cat((a, a), -1), which makes its halves equal; empty if not found."""
    if not is_tensor(node):
        return ()
    parts = parts_of(node)
    if parts:
        return (node,) if len(parts) == 2 and parts[0] is parts[1] else ()
    before = doubled(source_of(node))
    return (node, *before) if before else ()


def source_of(node: Node) -> Any:
    """The input of a node that keeps the order of each row, such as an elementwise operation; else None."""
    operation = operation_of(node)
    x, index = operation.get("x"), operation.get("index")
    if operation.name in ELEMENTWISE or (operation.name in ("mul", "div") and isinstance(operation.get("y"), NUMBER)):
        return x
    if operation.name == "unsqueeze" or (operation.name == "item" and is_unsqueezing(index)):
        return x if is_tensor(x) and value_of(x).shape[-1] == value_of(node).shape[-1] else None
    return within(x, index) if operation.name == "item" else None


def is_unsqueezing(index: Any) -> bool:
    return all(
        one is None or one is Ellipsis or one == ALL for one in (index if isinstance(index, tuple) else (index,))
    )


def within(node: Any, index: Any) -> Any:
    """The node in a nested graph that is its result number `index`; None if there is no such graph."""
    if not isinstance(node, Node) or node.target not in WRAPS or not isinstance(index, int):
        return None
    bodies = bodies_of(node)
    results: Any = bodies[0].output_node().args[0] if bodies else None
    return results[index] if results is not None else None
