"""The pattern of max pooling. The function takes the last node of a possible match."""

from torch.fx import Node

from kitsune.fusion.match import Found, Match
from kitsune.fusion.operations import is_tensor, operation_of, value_of
from kitsune.kernels.max_pool import is_offered, pair_of
from kitsune.kernels.max_pool import max_pool as max_pool_kernel


def max_pool(node: Node) -> Found:
    operation = operation_of(node)
    x, size = operation.get("x"), operation.get("kernel")
    if operation.name != "max_pool2d" or not is_tensor(x):
        return None
    if operation.get("return_indices", False):
        return "its indices are returned"
    if operation.get("ceil_mode", False) or pair_of(operation.get("dilation", 1)) != (1, 1):
        return "it is dilated or its size is rounded up"
    stride = operation.get("stride") or size  # None or, in exported graphs, an empty list
    window = tuple(pair_of(one) for one in (size, stride, operation.get("padding", 0)))
    if not is_offered(value_of(x), *window):
        return "the kernel is not for its sizes and dtype on this device"
    return Match(call=max_pool_kernel, arguments=(x, *window), results=(node,))
