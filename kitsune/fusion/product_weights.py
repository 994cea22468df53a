"""Finds the weights of a captured graph that one matrix product or convolution reads, and nothing else."""

import operator
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch.fx import GraphModule, Node

from kitsune.fusion.operations import aten, autocasts_at, memory_of, value_of

#: Functions all of whose tensors autocast casts to half precision.
PRODUCTS: Final = frozenset(
    {
        F.linear,
        torch.addmm,
        torch.mm,
        torch.matmul,
        operator.matmul,
        "matmul",
        torch.conv1d,
        torch.conv2d,
        torch.conv3d,
        torch.conv_transpose1d,
        torch.conv_transpose2d,
        torch.conv_transpose3d,
        aten.linear.default,
        aten.addmm.default,
        aten.mm.default,
        aten.matmul.default,
        aten.conv1d.default,
        aten.conv2d.default,
        aten.conv3d.default,
        aten.convolution.default,
    }
)
#: Calls that change autocast from then on.
SETTERS: Final = frozenset(
    {torch.set_autocast_enabled, torch.set_autocast_dtype, torch.set_autocast_cpu_enabled, torch.set_autocast_gpu_dtype}
)
#: Calls of ours with products inside -> the positions of their weights. By name: they load Triton.
OWN: Final[Mapping[str, tuple[int, ...]]] = {
    "kitsune.fusion.calls.mlp": (1, 3),
    "kitsune.fusion.calls.gated_mlp": (1, 2, 3),
    "kitsune.fusion.calls.joined_gated_mlp": (1, 2),
    "kitsune.fusion.calls.linear_activation": (1,),
    "kitsune.fusion.calls.head_cross_entropy": (1,),
    "kitsune.fusion.calls.patch_convolution": (1,),
    "kitsune.fusion.calls.projected_attention": (1, 2, 3),
    "kitsune.fusion.calls.multi_head_attention": (1, 3),
    "kitsune.fusion.calls.stem_convolution": (1,),
    "kitsune.fusion.calls.pointwise_convolution": (1,),
}
#: Functions and methods that only change the view of a weight.
VIEWS: Final = frozenset({torch.t, torch.transpose, "t", "transpose", aten.t.default, aten.transpose.int})


def product_weights(graph: GraphModule, inputs: Sequence[Any], dtype: torch.dtype) -> list[int]:
    """The positions of these among the inputs of a graph. None where autocast to `dtype` is not on.

    A weight that is read twice is left out, since the sum of its gradients is in fp32. So are those that have a hook on
    their gradient, that share memory with another input, or that are read where the model sets autocast by itself.
    """
    if any(node.target in SETTERS for node in graph.graph.nodes):
        return []
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    memories = Counter(memory_of(given) for given in inputs)
    return [
        at
        for at, (node, given) in enumerate(zip(placeholders, inputs, strict=True))
        if is_weight(given, dtype) and memories[memory_of(given)] == 1 and feeds_a_product(node)
    ]


def examples_with(dtype: torch.dtype, graph: GraphModule, inputs: Sequence[Any], positions: Sequence[int]) -> list[Any]:
    """The inputs to compile the graph with, in `dtype` at these positions: fake tensors, whose shapes are static."""
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    examples = list(inputs)
    for at in positions:
        fake = value_of(placeholders[at])
        with fake.fake_mode:
            half = torch.empty_like(fake, dtype=dtype, requires_grad=inputs[at].requires_grad)
        examples[at] = placeholders[at].meta["example_value"] = half
    return examples


def is_weight(given: Any, dtype: torch.dtype) -> bool:
    """Whether it is an fp32 parameter that autocast would cast to `dtype`."""
    if not isinstance(given, torch.nn.Parameter) or given.dtype != torch.float32:
        return False
    kind = given.device.type
    is_cast = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == dtype
    return is_cast and not (given._backward_hooks or given._post_accumulate_grad_hooks)


def feeds_a_product(node: Node) -> bool:
    """Whether the node, or the only view of it, is an argument of one product once, and of nothing else."""
    for given, user in only_users(node):
        if user.target in PRODUCTS or any(user.args[at] is given for at in OWN.get(name_of(user), ())):
            return not autocasts_at(user)
        if user.target not in VIEWS:
            return False
    return False


def name_of(node: Node) -> str:
    return f"{getattr(node.target, '__module__', '')}.{getattr(node.target, '__name__', '')}"


def only_users(node: Node) -> Iterator[tuple[Node, Node]]:
    """(the node, its only user), (that user, its only user), and so on."""
    while len(node.users) == 1:
        (user,) = node.users
        if sum(argument is node for argument in (*user.args, *user.kwargs.values())) != 1:
            return
        yield node, user
        node = user
