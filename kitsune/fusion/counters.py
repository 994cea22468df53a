"""Counters of a captured graph, as each batch norm has one, counted by one call instead of one launch each.

A ResNet-50 has 53 of them: at batch 8 on an H200 they took 60 us of a step of 3.5 ms, and the gaps between them 26 us
(benchmarks/results/replays/2026-11-24-h200-2.jsonl).
"""

from collections import Counter
from typing import Final

import torch
from torch.fx import GraphModule, Node

from kitsune.fusion.operations import is_tensor, memory_of, value_of

IN_PLACE: Final = ("add_", torch.Tensor.add_)


def merge_counters(graph: GraphModule) -> int:
    """Counts all counters at the place of the last one. Returns how many there are; fewer than two stay as they are."""
    memories = Counter(memory_of(value_of(node)) for node in graph.graph.nodes if node.op == "placeholder")
    counts = [node for node in graph.graph.nodes if is_count(node) and memories[memory_of(value_of(node.args[0]))] == 1]
    if len(counts) < 2:
        return 0
    with graph.graph.inserting_before(counts[-1]):
        merged = graph.graph.call_function(torch._foreach_add_, ([node.args[0] for node in counts], 1))
    merged.meta = {**counts[-1].meta, "example_value": None}
    for node in counts:
        graph.graph.erase_node(node)
    graph.recompile()
    return len(counts)


def is_count(node: Node) -> bool:
    """Whether the node adds one to an integer of the model, which nothing else in the graph reads or writes."""
    if node.target not in IN_PLACE or node.users or node.kwargs or node.args[1:] != (1,):
        return False
    counter = node.args[0]
    is_of_model = isinstance(counter, Node) and counter.op == "placeholder" and len(counter.users) == 1
    return is_of_model and is_tensor(counter) and value_of(counter).dtype == torch.int64 and not value_of(counter).ndim
