"""Patterns of attention without a mask. Each function takes the last node of a possible match."""

from typing import Any

import torch
from torch.fx import Node

from kitsune.fusion import calls
from kitsune.fusion.match import Found, Match
from kitsune.fusion.operations import VIEWS, Operation, is_tensor, memory_of, operation_of, value_of, values_in
from kitsune.kernels import attention as kernel


def attention(node: Node) -> Found:
    """scaled_dot_product_attention without a mask, over as many keys as queries."""
    given = operands_of(node)
    if given is None or isinstance(given, str):
        return given
    packed = packed_of(given)
    if packed is not None:
        arguments = (packed, tuple(value_of(given[0]).shape), *settings_of(node))
        return Match(call=calls.packed_attention, arguments=arguments, results=(node,))
    return Match(call=calls.attention, arguments=(*given, *settings_of(node)), results=(node,))


def projected_attention(node: Node) -> Found:
    """Attention with the three linear layers that give its queries, keys and values from one input."""
    given = operands_of(node)
    if given is None or isinstance(given, str):
        return None  # `attention` says why
    projections = [views_from(operand) for operand in given]
    layers = [operation_of(one[-1]) for one in projections]
    if any(layer.name != "linear" for layer in layers):
        return None
    x, *others = (layer.get("x") for layer in layers)
    weights, biases = ([layer.get(name) for layer in layers] for name in ("weight", "bias"))
    if any(other is not x for other in others) or len(set(weights)) < len(weights):
        return None
    if None in biases and any(bias is not None for bias in biases):
        return "only some of its projections have biases"
    if any(
        not is_split_into_heads(*map(value_of, (one[-1], operand)))
        for one, operand in zip(projections, given, strict=True)
    ):
        return "its projections are not split into heads in their order"
    inner = tuple(dict.fromkeys(one for projection in projections for one in projection))
    arguments = (x, *weights, *biases, tuple(value_of(given[0]).shape), *settings_of(node))
    return Match(call=calls.projected_attention, arguments=arguments, results=(node,), inner=inner)


def multi_head_attention(node: Node) -> Found:
    """torch's own layer, `nn.MultiheadAttention`, of one input, from what takes its result."""
    taken = operation_of(node)
    whole = taken.get("x")
    layer = operation_of(whole) if taken.name == "item" and taken.get("index") == 0 else None
    if layer is None or layer.name != "multi_head_attention" or not is_tensor(node):
        return None
    reason = why_general(layer) or why_chosen(node)
    if reason is not None or len(whole.users) > 1:
        return reason or "it is asked for its weights"
    x, heads = layer.get("query"), layer.get("heads")
    tokens, _, width = value_of(x).shape
    if not kernel.fits(tokens, width // heads):
        return f"no kernel supports {tokens} positions and heads of {width // heads} elements"
    causal = layer.get("is_causal", False) and layer.get("attn_mask") is not None
    dropout_p = layer.get("dropout_p") if layer.get("training", True) else 0.0
    parameters = (layer.get(name) for name in ("weight", "bias", "out_weight", "out_bias"))
    return Match(
        call=calls.multi_head_attention,
        arguments=(x, *parameters, heads, causal, dropout_p, value_of(node).dtype),
        results=(node,),
        inner=(whole,),
        any_strides=True,
    )


def why_general(layer: Operation) -> str | None:
    """Why torch's layer is more than attention over its own input without a mask, or None."""
    x = layer.get("query")
    if layer.get("key") is not x or layer.get("value") is not x or value_of(x).ndim != 3:
        return "it is not over one batch of its own input"
    if layer.get("need_weights", True):
        return "it is asked for its weights"
    own = (layer.get(name) is not None for name in ("bias_k", "static_k", "static_v"))
    if layer.get("is_separate", False) or layer.get("add_zero_attn") or any(own):
        return "it has projections of other sizes, or keys of its own"
    # As torch does: beside the hint that it is causal, the mask itself is not read.
    has_mask = layer.get("attn_mask") is not None and not layer.get("is_causal", False)
    return "it has a mask" if has_mask or layer.get("key_padding_mask") is not None else None


def operands_of(node: Node) -> tuple[Any, ...] | str | None:
    """(queries, keys, values) of an attention that the kernels support, or the reason why they do not, or None."""
    operation = operation_of(node)
    given = tuple(operation.get(name) for name in ("query", "key", "value"))
    if operation.name != "attention" or not all(map(is_tensor, given)):
        return None
    if operation.get("attn_mask") is not None:
        return "it has a mask"
    if operation.get("enable_gqa", False):
        return "its heads share keys and values"
    return why_unfit(*map(value_of, given)) or why_chosen(node) or given


def settings_of(node: Node) -> tuple[Any, ...]:
    """(scale, is_causal, dropout_p, dtype)."""
    operation = operation_of(node)
    return (
        *(operation.get("scale"), operation.get("is_causal", False), operation.get("dropout_p", 0.0)),
        value_of(node).dtype,
    )


def views_from(operand: Node) -> list[Node]:
    """The operand, and behind it what it is a view of, and so on: the last one is no view."""
    chain = [operand]
    while is_view(chain[-1], operand):
        chain.append(chain[-1].all_input_nodes[0])
    return chain


def is_split_into_heads(projected: Any, operand: torch.Tensor) -> bool:
    """Whether the operand (batch, heads, tokens, head) is all of a projection (batch, tokens, heads * head)."""
    batch, heads, tokens, head = operand.shape
    return (
        isinstance(projected, torch.Tensor)
        and projected.shape == (batch, tokens, heads * head)
        and projected.is_contiguous()
        and operand.stride() == (tokens * heads * head, head, heads * head, 1)
        and operand.storage_offset() == projected.storage_offset()
    )


def packed_of(given: tuple[Any, ...]) -> Node | None:
    """The node that query, key and value are views of, in this order and nothing else; None if there is no such.

    None, too, where gradients do not flow through the views as through the node.
    """
    whole = {viewed(node) for node in given}
    if len(whole) != 1 or any(node.target is torch._C._set_grad_enabled for node in given[0].graph.nodes):
        return None
    (packed,) = whole
    values, memory = [value_of(node) for node in given], value_of(packed)
    if not isinstance(memory, torch.Tensor) or packed in given:
        return None
    batch, heads, tokens, head = values[0].shape
    width = 3 * heads * head
    are_parts = all(
        value.stride() == (tokens * width, head, width, 1) and value.storage_offset() == part * heads * head
        for part, value in enumerate(values)
    )
    is_whole = memory.is_contiguous() and memory.numel() == batch * tokens * width and memory.storage_offset() == 0
    return packed if are_parts and is_whole else None


def viewed(node: Node) -> Node:
    """What it is a view of: the first of a chain of views in the same memory, with the same gradient."""
    return views_from(node)[-1]


def is_view(node: Node, first: Node) -> bool:
    """Whether it is a view of its input, in the memory of `first` and with its gradient."""
    return (
        node.target in VIEWS
        and bool(node.all_input_nodes)
        and is_same(value_of(first), value_of(node.all_input_nodes[0]))
    )


def is_same(view: torch.Tensor, value: Any) -> bool:
    """Whether one of the values is in the memory of the view, in its dtype, and needs a gradient if the view does."""
    return any(
        memory_of(one) == memory_of(view) is not None
        and (one.dtype, one.requires_grad) == (view.dtype, view.requires_grad)
        for one in values_in(value)
    )


def why_unfit(query: Any, key: Any, value: Any) -> str | None:
    """Why the kernel does not support tensors of these shapes, or None."""
    if query.ndim != 4:
        return "its tensors are not of batch, heads, positions and head"
    if not query.shape == key.shape == value.shape:
        return "its queries, keys and values are of different shapes"
    tokens, head = query.shape[2:]
    if not kernel.fits(tokens, head):
        return f"no kernel supports {tokens} positions and heads of {head} elements"
    return None


def why_chosen(node: Node) -> str | None:
    """The reason where the model itself chooses among torch's implementations, or None."""
    for other in node.graph.nodes:
        if other is node:
            break
        if other.target is torch.nn.attention._sdpa_kernel:
            return "the model chooses its implementation by sdpa_kernel"
    return None
