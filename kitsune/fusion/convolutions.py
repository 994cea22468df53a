"""The pattern of convolutions of patches that do not overlap. The function takes the last node of a possible match."""

from typing import Any

from torch.fx import Node

from kitsune.fusion import calls
from kitsune.fusion.match import Found, Match
from kitsune.fusion.operations import is_tensor, operation_of, value_of
from kitsune.kernels.max_pool import pair_of


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
