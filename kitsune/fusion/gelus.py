"""Recognises GELU written out with tanh or erf, and CLIP's with sigmoid.

The comparison of the former is algebraic, so the order of operations does not matter: the expression is reduced to a
polynomial in x inside tanh or erf, and one in x and that tanh or erf around it.
"""

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from torch.fx import Node

from kitsune.fusion.layers import layer_at
from kitsune.fusion.norms import factors
from kitsune.fusion.operations import operation_of
from kitsune.fusion.writes import mutates

#: (power of x, power of its tanh or erf) -> coefficient, for every term of a sum.
Polynomial = Mapping[tuple[int, int], float]

SLOPE: Final = math.sqrt(2 / math.pi)
#: Function -> the kind of GELU, and the polynomial in x that is its argument.
BENDS: Final[Mapping[str, tuple[str, Polynomial]]] = {
    "tanh": ("gelu_tanh", {(1, 0): SLOPE, (3, 0): SLOPE * 0.044715}),
    "erf": ("gelu", {(1, 0): math.sqrt(0.5)}),
}
GELU: Final[Polynomial] = {(1, 0): 0.5, (1, 1): 0.5}
#: The constant of CLIP's.
QUICK: Final = 1.702
#: Relative tolerance: the error of a product of two constants rounded to float32.
ROUNDING: Final = 2.0**-23
#: The longest form found in models has nine.
MOST_OPERATIONS: Final = 16
ARITHMETIC: Final = ("add", "mul", "div", "pow", "square")


@dataclass(frozen=True, slots=True)
class Activation:
    """An activation of `x`, such as a linear layer; `inner`: the nodes in between."""

    kind: str
    x: Any
    inner: tuple[Node, ...] = ()


def written_quick_gelu(node: Node) -> Activation | None:
    """x * sigmoid(1.702 * x), as CLIP has it."""
    for x, share in factors(node):
        inner = operation_of(share).get("x")
        scaled = [operation_of(inner).get(name) for name in ("x", "y")]
        names = operation_of(share).name, operation_of(inner).name
        if names == ("sigmoid", "mul") and scaled in ([x, QUICK], [QUICK, x]):
            return Activation("quick_gelu", x, (share, inner))
    return None


def written_gelu(node: Node) -> Activation | str | None:
    """The GELU of a linear layer; or the reason why it is a near miss; or None."""
    parts = parts_of(node)
    bends = [part for part in parts if operation_of(part).name in BENDS]
    outer = {one for part in parts for one in part.all_input_nodes if one not in parts}
    if len(bends) != 1 or len(outer) != 1:
        return None
    (bend,), (x,) = bends, outer
    kind, wanted = BENDS[operation_of(bend).name]
    within = polynomial_of(operation_of(bend).get("x"), {x: {(1, 0): 1.0}})
    around = polynomial_of(node, {x: {(1, 0): 1.0}, bend: {(0, 1): 1.0}})
    if layer_at(x) is None or within is None or around is None:
        return None
    if (within.keys(), around.keys()) != (wanted.keys(), GELU.keys()):
        return None
    if not (is_close(within, wanted) and is_close(around, GELU)):
        return "it is written as GELU is, with other constants"
    return Activation(kind, x, tuple(part for part in parts if part is not node))


def parts_of(node: Node) -> list[Node]:
    """The node and the arithmetic nodes that compute it; empty if there are more than in a GELU."""
    parts: dict[Node, None] = {}
    waiting = [node] if operation_of(node).name in ARITHMETIC else []
    while waiting:
        one = waiting.pop()
        if operation_of(one).name in (*ARITHMETIC, *BENDS) and not mutates(one):
            parts[one] = None
            waiting += [other for other in one.all_input_nodes if other not in parts]
        if len(parts) > MOST_OPERATIONS:
            return []
    return list(parts)


def polynomial_of(node: Any, known: dict[Node, Polynomial]) -> Polynomial | None:
    """The polynomial that a node computes from known nodes, or None. The result is added to `known`."""
    if isinstance(node, int | float):
        return {(0, 0): float(node)} if node > 0 else None  # terms with positive coefficients cannot cancel
    if node not in known:
        found = sum_or_product(node, known)
        if found is None:
            return None
        known[node] = found
    return known[node]


def sum_or_product(node: Any, known: dict[Node, Polynomial]) -> Polynomial | None:
    operation = operation_of(node)
    if operation.name not in ARITHMETIC:
        return None
    y = 2 if operation.name == "square" else operation.get("y")
    first = polynomial_of(operation.get("x"), known)
    if first is None:
        return None
    if operation.name in ("pow", "square"):
        return {2: times(first, first), 3: times(times(first, first), first)}.get(y)
    if operation.name == "div":
        is_number = isinstance(y, int | float) and y > 0 and operation.get("rounding_mode") is None
        return times(first, {(0, 0): 1 / y}) if is_number else None
    second = polynomial_of(y, known)
    if operation.name == "mul":
        return times(first, second)
    return plus(first, second) if operation.get("alpha", 1) == 1 else None


def plus(one: Polynomial, other: Polynomial | None) -> Polynomial | None:
    if other is None:
        return None
    return {powers: one.get(powers, 0.0) + other.get(powers, 0.0) for powers in one.keys() | other.keys()}


def times(one: Polynomial | None, other: Polynomial | None) -> Polynomial | None:
    """The product; None if an operand is None, or for higher powers than in a GELU."""
    if one is None or other is None:
        return None
    terms: defaultdict[tuple[int, int], float] = defaultdict(float)
    for (x, bend), factor in one.items():
        for (other_x, other_bend), other_factor in other.items():
            terms[x + other_x, bend + other_bend] += factor * other_factor
    return dict(terms) if all(x <= 3 and bend <= 1 for x, bend in terms) else None


def is_close(found: Polynomial, wanted: Polynomial) -> bool:
    return all(math.isclose(found[powers], wanted[powers], rel_tol=ROUNDING) for powers in wanted)
