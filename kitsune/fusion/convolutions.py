"""Patterns of convolutions: of patches that do not overlap, and of images. Functions take the last node of a match."""

from typing import Any

from torch.fx import Node

from kitsune.fusion import calls
from kitsune.fusion.match import Found, Match
from kitsune.fusion.operations import is_tensor, operation_of, value_of
from kitsune.kernels.layouts import is_channels_last
from kitsune.kernels.max_pool import pair_of
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


def convolution_of(node: Node) -> tuple[Any, Any, Any, Any, Any, Any, int] | None:
    """(x, weight, bias, stride, padding, dilation, groups) of a two-dimensional convolution of images in a batch."""
    operation = operation_of(node)
    x, weight = operation.get("x"), operation.get("weight")
    if operation.name != "conv2d" or not is_tensor(x) or not is_tensor(weight) or value_of(x).ndim != 4:
        return None
    padding = operation.get("padding", 0)
    return (
        x,
        weight,
        operation.get("bias"),
        pair_of(operation.get("stride", 1)),
        padding if isinstance(padding, str) else pair_of(padding),
        pair_of(operation.get("dilation", 1)),
        operation.get("groups", 1),
    )
