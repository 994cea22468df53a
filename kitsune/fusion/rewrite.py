"""Rewriting: a captured graph in, the same graph with calls of our kernels in the place of what they match out.

The graph is changed in place, since torch.compile knows where its inputs come from and a copy does not. Nothing is run
and nothing is measured; what may be replaced is asked of `judge`.
"""

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch.fx import GraphModule, Node

from kitsune.fusion.match import Match, place_of, why_unlike
from kitsune.fusion.operations import aten, operation_of, value_of
from kitsune.fusion.patterns import Pattern
from kitsune.fusion.stats import Benefit, Kept, Refused

#: What a match is worth where that was measured, or why it is not to be replaced.
Judge = Callable[[Pattern, Match], Benefit | str | None]


@dataclass(slots=True)
class Rewriting:
    """The graph, and what happened to it."""

    graph: GraphModule
    operations_before: int
    operations_after: int = 0
    kept: list[Kept] = field(default_factory=list)
    refused: list[Refused] = field(default_factory=list)


def rewrite(graph: GraphModule, patterns: Iterable[Pattern], judge: Judge) -> Rewriting:
    """Every pattern at every node, the patterns in their order: what one has replaced is not there for the next."""
    drop_assertions(graph)
    done = Rewriting(graph, operations_before=count(graph))
    drop_idle_casts(graph)
    for pattern in patterns:
        for node in list(graph.graph.nodes):
            if not node._erased:
                replace_at(node, pattern, judge, done)
    graph.graph.lint()
    graph.recompile()
    done.operations_after = count(graph)
    return done


def replace_at(node: Node, pattern: Pattern, judge: Judge, done: Rewriting) -> None:
    match = pattern.find(node)
    if match is None:
        return
    refusal = match if isinstance(match, str) else replace(match, pattern, judge, done)
    if refusal is not None:
        done.refused.append(Refused(pattern.name, refusal))


def replace(match: Match, pattern: Pattern, judge: Judge, done: Rewriting) -> str | None:
    """Puts the call there, or says why not."""
    place = place_of(match)
    if isinstance(place, str):
        return place
    reason = why_unlike(match) or pattern.why_not(match)
    if reason is not None:
        return reason
    benefit = judge(pattern, match)
    if isinstance(benefit, str):
        return benefit
    put(match, place)
    done.kept.append(Kept(pattern.name, len(match.nodes), benefit))
    return None


def put(match: Match, place: Node) -> None:
    """What the nodes were known to give is known of the call: views of it share its memory, and it has a gradient."""
    graph = place.graph
    values = tuple(value_of(node) for node in match.results)
    with graph.inserting_before(place):
        call = graph.call_function(match.call, match.arguments)
        given = [call]
        if len(values) > 1:
            given = [graph.call_function(operator.getitem, (call, number)) for number in range(len(values))]
    call.meta["example_value"] = values
    for old, new, value in zip(match.results, given, values, strict=True):
        new.meta = {**old.meta, "example_value": value}
        old.replace_all_uses_with(new)
    order = {node: number for number, node in enumerate(graph.nodes)}
    for node in sorted(dict.fromkeys(match.nodes), key=order.__getitem__, reverse=True):
        graph.erase_node(node)


def drop_assertions(graph: GraphModule) -> None:
    """What export noted of dtypes holds, and would count as another user."""
    for node in graph.graph.find_nodes(op="call_function", target=aten._assert_tensor_metadata.default):
        graph.graph.erase_node(node)


def drop_idle_casts(graph: GraphModule) -> None:
    """A cast to the dtype that is there already gives back the very same tensor; export has others use it, too."""
    for node in list(graph.graph.nodes):
        operation = operation_of(node)
        if operation.name != "to" or len(node.args) > 2 or node.kwargs.keys() - {"dtype"}:
            continue
        given, cast = value_of(operation.get("x")), value_of(node)
        if isinstance(given, torch.Tensor) and (given.dtype, given.device) == (cast.dtype, cast.device):
            node.replace_all_uses_with(operation.get("x"))
            graph.graph.erase_node(node)


def count(graph: GraphModule) -> int:
    return sum(node.op.startswith("call_") for node in graph.graph.nodes)
