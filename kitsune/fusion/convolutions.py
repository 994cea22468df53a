"""Patterns of convolutions: of patches that do not overlap, of images, and of single positions before a batch norm.

Functions take the last node of a match.
"""

from typing import Any

import torch
from torch.fx import Node

from kitsune.fusion import calls
from kitsune.fusion.match import Found, Match
from kitsune.fusion.operations import Operation, is_tensor, operation_of, value_of
from kitsune.kernels.layouts import is_channels_last
from kitsune.kernels.max_pool import pair_of
from kitsune.kernels.pointwise_convolution import is_offered as is_pointwise_offered
from kitsune.kernels.stem_convolution import MOST_CHANNELS, is_offered


def patch_convolution(node: Node) -> Found:
    """A convolution whose kernel is as large as its stride, as the patch embedding of a vision transformer."""
    layer = convolution_of(node)
    if layer is None:
        return None
    x, weight, bias, stride, padding, dilation, groups = layer
    kernel = pair_of(tuple(value_of(weight).shape[2:]))
    if stride != kernel or kernel == (1, 1):
        return None
    if groups != 1 or padding != (0, 0) or dilation != (1, 1):
        return "its patches are padded, dilated or in groups"
    if any(size % own for size, own in zip(value_of(x).shape[2:], kernel, strict=True)):
        return "the image is not a whole number of patches"
    return Match(call=calls.patch_convolution, arguments=(x, weight, bias), results=(node,), dtype=value_of(node).dtype)


def stem_convolution(node: Node) -> Found:
    """The first convolution of a network, of images with few channels, channels last."""
    layer = convolution_of(node)
    if layer is None:
        return None
    x, weight, bias, stride, padding, dilation, groups = layer
    channels = value_of(x).shape[1]
    if channels > MOST_CHANNELS or groups != 1:
        return None
    if isinstance(padding, str) or dilation != (1, 1):
        return "it is dilated, or padded by a name"
    if not is_channels_last(value_of(x)):
        return "its images are channels first"
    dtype = value_of(node).dtype
    if not is_offered(value_of(x).to(dtype), value_of(weight).to(dtype), stride, padding):
        return "the kernel is not for its sizes and dtype on this device"
    arguments = (x, weight, bias, stride, padding, dtype)
    return Match(call=calls.stem_convolution, arguments=arguments, results=(node,), dtype=dtype)


def pointwise_convolution(node: Node) -> Found:
    """A convolution of single positions and the batch norm after it, in training, channels last."""
    norm = operation_of(node)
    convolved = norm.get("x") if norm.name == "batch_norm" else None
    layer = convolution_of(convolved)
    if layer is None or not isinstance(convolved, Node) or tuple(value_of(layer[1]).shape[2:]) != (1, 1):
        return None
    x, weight, bias, *window = layer
    if bias is not None or window != [(1, 1), (0, 0), (1, 1), 1]:
        return "it has a bias, strides, padding, dilation or groups"
    if not is_channels_last(value_of(x)):
        return "its images are channels first"
    vectors = tuple(norm.get(name) for name in ("weight", "bias", "mean", "variance"))
    reason = why_not_in_training(norm, vectors)
    if reason is not None:
        return reason
    dtype = value_of(convolved).dtype
    if not is_pointwise_offered(value_of(x).to(dtype), value_of(weight).to(dtype)):
        return "the kernel is not for its sizes and dtype on this device"
    return Match(
        call=calls.pointwise_convolution,
        arguments=(x, weight, *vectors, norm.get("momentum", 0.1), norm.get("eps", 1e-5), dtype),
        results=(node,),
        inner=(convolved,),
        writes=vectors[2:],
        dtype=dtype,
    )


def why_not_in_training(norm: Operation, vectors: tuple[Any, ...]) -> str | None:
    """Why a batch norm does not compute statistics with running ones and a gain, all in fp32; None where it does.

    `vectors`: its weight, bias, running mean and running variance.
    """
    if norm.get("training", False) is not True:
        return "the batch norm is not in training"
    if not all(map(is_tensor, vectors)):
        return "the batch norm has no weight, or no running statistics"
    if any(value_of(vector).dtype != torch.float32 for vector in vectors):
        return "the batch norm is not in fp32"
    return None


def convolution_of(node: Any) -> tuple[Any, Any, Any, Any, Any, Any, int] | None:
    """(x, weight, bias, stride, padding, dilation, groups) of a two-dimensional convolution of images in a batch."""
    operation = operation_of(node)
    x, weight = operation.get("x"), operation.get("weight")
    if operation.name != "conv2d" or not is_tensor(x) or not is_tensor(weight) or value_of(x).ndim != 4:
        return None
    padding = operation.get("padding", 0)
    if padding == "valid":
        padding = 0
    return (
        x,
        weight,
        operation.get("bias"),
        pair_of(operation.get("stride", 1)),
        padding if isinstance(padding, str) else pair_of(padding),
        pair_of(operation.get("dilation", 1)),
        operation.get("groups", 1),
    )
