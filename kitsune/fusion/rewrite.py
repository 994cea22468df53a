"""Rewrites a captured graph: replaces matches by kernel calls.

The graph is changed in place, since a copy loses torch.compile's information on the sources of its inputs. Nothing is
run or measured here; `judge` decides which matches are replaced.
"""

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch.fx import GraphModule, Node

from kitsune.fusion.masks import drop_constant_masks
from kitsune.fusion.match import Match, place_of, values_of
from kitsune.fusion.operations import aten, operation_of, value_of, values_in
from kitsune.fusion.patterns import Pattern
from kitsune.fusion.stats import Benefit, Kept, Refused

#: The benefit of a match (None if not measured), or the reason not to replace it.
Judge = Callable[[Pattern, Match], Benefit | str | None]


@dataclass(slots=True)
class Rewriting:
    """A graph and the record of its rewriting."""

    graph: GraphModule
    operations_before: int
    operations_after: int = 0
    kept: list[Kept] = field(default_factory=list)
    refused: list[Refused] = field(default_factory=list)


def rewrite(graph: GraphModule, patterns: Iterable[Pattern], judge: Judge) -> Rewriting:
    """Tries every pattern at every node, in order of the patterns. Nodes that one replaces are gone for the next."""
    drop_assertions(graph)
    done = Rewriting(graph, operations_before=count(graph))
    drop_idle_casts(graph)
    drop_constant_masks(graph)
    transformed = transformed_in(graph)
    for pattern in patterns:
        for node in list(graph.graph.nodes):
            if not node._erased and node not in transformed:
                replace_at(node, pattern, judge, transformed, done)
    graph.graph.lint()
    graph.recompile()
    done.operations_after = count(graph)
    return done


def replace_at(node: Node, pattern: Pattern, judge: Judge, transformed: set[Node], done: Rewriting) -> None:
    match = pattern.find(node)
    if match is None or (isinstance(match, Match) and not transformed.isdisjoint(match.nodes)):
        return
    refusal = match if isinstance(match, str) else replace(match, pattern, judge, done)
    if refusal is not None:
        done.refused.append(Refused(pattern.name, refusal))


def replace(match: Match, pattern: Pattern, judge: Judge, done: Rewriting) -> str | None:
    """Replaces a match by its call, or returns the reason why not."""
    place = place_of(match)
    if isinstance(place, str):
        return place
    values = values_of(match)
    if isinstance(values, str):
        return values
    reason = pattern.why_not(match)
    if reason is not None:
        return reason
    benefit = judge(pattern, match)
    if isinstance(benefit, str):
        return benefit
    for node, value in values.items():
        node.meta["example_value"] = value
    put(match, place)
    done.kept.append(Kept(pattern.name, len(match.nodes), benefit))
    return None


def put(match: Match, place: Node) -> None:
    """Inserts the call. It takes over the fake tensors of the results, so that aliasing and gradients stay known."""
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


def transformed_in(graph: GraphModule) -> set[Node]:
    """From the first to the last node of torch.func, such as vmap: the calls do not have its rules."""
    nodes = list(graph.graph.nodes)
    places = [place for place, node in enumerate(nodes) if is_transformed(node)]
    return set(nodes[places[0] : places[-1] + 1]) if places else set()


def is_transformed(node: Node) -> bool:
    """Whether it gives a tensor of torch.func."""
    return any(
        isinstance(one, torch.Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(one)
        for one in values_in(value_of(node))
    )


def drop_assertions(graph: GraphModule) -> None:
    """Removes the dtype assertions of export, which hold, and would count as other users."""
    for node in graph.graph.find_nodes(op="call_function", target=aten._assert_tensor_metadata.default):
        graph.graph.erase_node(node)


def drop_idle_casts(graph: GraphModule) -> None:
    """Removes casts to the same dtype, which return the same tensor; in exported graphs other nodes use them."""
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
