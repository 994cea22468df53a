"""StaticBatch: the fixed tensors that a captured step reads, and the signature that a batch must have to fit them."""

from collections import OrderedDict, defaultdict
from collections.abc import Iterable
from enum import Enum
from types import NoneType
from typing import Any

import torch
from torch.utils import _pytree as pytree

Signature = tuple[Any, ...]
PLAIN = (
    *(NoneType, bool, int, float, complex, str, bytes, Enum),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
)


def signature_of(value: Any) -> Signature:
    """What a step is specialised to: structure, shapes, dimension orders and dtypes; other leaves by value."""
    if isinstance(value, torch.Tensor):
        if value.is_nested:  # it has no single shape
            return ("nested", value.dtype, value.requires_grad)
        return (value.shape, order_of(value), value.dtype, value.requires_grad)
    if isinstance(value, (tuple, list)):
        return (type(value), *map(signature_of, value))
    if isinstance(value, dict):
        return ("dict", *[(key, signature_of(item)) for key, item in value.items()])
    # Floats by repr: -0.0 then differs from 0.0, and nan equals itself.
    return ("value", type(value), repr(value) if isinstance(value, (float, complex)) else value)


def signature_unless_opaque(batch: Any) -> Signature | None:
    """As `signature_of`; None for a batch that may contain tensors we cannot see, see `opaque_type`.

    Called before every replay, so a tuple of plain tensors, which most batches are, takes a single pass.
    """
    if type(batch) is tuple:
        found: list[Any] = [tuple]
        for item in batch:
            if type(item) is not torch.Tensor or item.is_nested or not is_plain_in_order(item):
                break
            found.append((item.shape, (), item.dtype, item.requires_grad))
        else:
            return tuple(found)
    return signature_of(batch) if opaque_type(batch) is None else None


def is_plain_in_order(tensor: torch.Tensor) -> bool:
    """Whether it is neither sparse nor quantized, and `order_of` is ()."""
    return tensor.layout is torch.strided and not tensor.is_quantized and tensor.is_contiguous()


def order_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """The dimensions of size above 1, from the largest stride to the smallest; () for the default order.

    The strides themselves do not count: batches truncated to one length may be views of tensors of different lengths.
    """
    if tensor.layout is not torch.strided or tensor.is_contiguous():
        return ()
    dimensions = [dimension for dimension, size in enumerate(tensor.shape) if size > 1]
    strides = tensor.stride()
    order = sorted(dimensions, key=lambda dimension: -strides[dimension])
    return () if order == dimensions else tuple(order)


def packing_of(tensor: torch.Tensor) -> str | None:
    """ "nested" or "quantized" for tensors with a strided layout that strides do not fully describe, else None."""
    if tensor.is_nested:
        return "nested"
    return "quantized" if tensor.is_quantized else None


def versions_of(arguments: Any) -> list[int]:
    """The version counters of the tensors in the arguments: how often each was written in place."""
    tensors = (leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, torch.Tensor))
    return [tensor._version for tensor in tensors if not tensor.is_inference()]


def opaque_type(value: Any) -> str | None:
    """The name of the first type in a batch that may contain tensors we cannot see, or None."""
    kind = type(value)
    if isinstance(value, torch.Tensor):
        if packing := packing_of(value):
            return f"{packing} tensor"
        is_plain = kind in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided
        return None if is_plain else f"{kind.__name__} of {value.layout}"
    if kind in (list, tuple) or (isinstance(value, tuple) and hasattr(value, "_fields")):
        return _first_opaque(value)
    if kind in (dict, OrderedDict):
        return _first_opaque(value.values())
    return None if isinstance(value, PLAIN) else kind.__name__


def _first_opaque(values: Iterable[Any]) -> str | None:
    for value in values:
        if (found := opaque_type(value)) is not None:
            return found
    return None


def why_not_static(batch: Any) -> str | None:
    """The reason why the tensors of a batch cannot be copied into static ones at every step, or None."""
    opaque = opaque_type(batch)
    if opaque is not None:
        return f"the batch holds a {opaque}, whose tensors cannot be found"
    if any(tensor.requires_grad for tensor in tensors_of(batch)):
        return "the batch requires a gradient, but the step would compute it for a copy"
    return None


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The tensors of a batch, in the order of `signature_of`."""
    found: list[torch.Tensor] = []
    _collect(value, found)
    return found


def _collect(value: Any, found: list[torch.Tensor]) -> None:
    if isinstance(value, torch.Tensor):
        found.append(value)
    elif isinstance(value, dict):
        for item in value.values():
            _collect(item, found)
    elif isinstance(value, (tuple, list)):
        for item in value:
            _collect(item, found)


class StaticBatch:
    """A copy of a batch on the device whose tensors keep their addresses."""

    def __init__(self, batch: Any, device: torch.device, memory_format: torch.memory_format | None = None) -> None:
        self.batch = pytree.tree_map(lambda leaf: _static(leaf, device, memory_format), batch)
        self._tensors = tensors_of(self.batch)
        self._is_cuda = device.type == "cuda"
        alike: defaultdict[torch.dtype, list[int]] = defaultdict(list)
        for index, tensor in enumerate(self._tensors):
            alike[tensor.dtype].append(index)
        self._alike = [indices for indices in alike.values() if len(indices) > 1]

    def load(self, batch: Any) -> None:
        """Copies a batch of the same signature into the static tensors.

        Tensors of one dtype that are on the device already are copied by one call: 28 calls for a batch of DLRM take
        the host of an H200 longer than the step takes the GPU.
        """
        values = tensors_of(batch)
        together: set[int] = set()
        for alike in self._alike:
            together.update(self._copied_together(alike, values))
        for index, value in enumerate(values):
            static = self._tensors[index]
            if static is not value and index not in together:
                static.copy_(value, non_blocking=self._is_cuda)

    def _copied_together(self, alike: list[int], values: list[torch.Tensor]) -> list[int]:
        """Copies the tensors at these indices that are on the device, if there are several. Returns their indices."""
        tensors = self._tensors
        here = [i for i in alike if values[i] is not tensors[i] and values[i].device == tensors[i].device]
        if len(here) < 2:
            return []
        torch._foreach_copy_([tensors[i] for i in here], [values[i] for i in here])
        return here


def place(value: Any, device: torch.device, memory_format: torch.memory_format | None = None) -> Any:
    """The batch on the device, 4-d tensors in the memory format. Tensors that already fit are not copied."""
    if isinstance(value, torch.Tensor):
        return _placed(value, device, memory_format)
    if type(value) is tuple:  # most batches are tuples and dicts: pytree takes 15 us
        return tuple([place(item, device, memory_format) for item in value])
    if type(value) is dict:
        return {key: place(item, device, memory_format) for key, item in value.items()}
    return pytree.tree_map(lambda leaf: _placed(leaf, device, memory_format), value)


def restrided(value: Any, memory_format: torch.memory_format) -> Any:
    """The batch on its devices, 4-d tensors in the memory format."""

    def in_format(leaf: Any) -> Any:
        return _placed(leaf, leaf.device, memory_format) if isinstance(leaf, torch.Tensor) else leaf

    return pytree.tree_map(in_format, value)


def _placed(leaf: Any, device: torch.device, memory_format: torch.memory_format | None) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    if memory_format is None and leaf.device == device:
        return leaf
    non_blocking = device.type == "cuda"  # after a non-blocking copy to the host nothing would wait for it
    if memory_format is not None and leaf.dim() == 4 and leaf.is_floating_point():
        return leaf.to(device, non_blocking=non_blocking, memory_format=memory_format)
    return leaf.to(device, non_blocking=non_blocking)


def _static(leaf: Any, device: torch.device, memory_format: torch.memory_format | None) -> Any:
    placed = _placed(leaf, device, memory_format)
    return copy_of(placed) if isinstance(placed, torch.Tensor) else placed


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides and gaps, since kernels may be specialised to them. Without the gaps where they are
    larger than the tensor, or where elements overlap."""
    tensor = tensor.detach()
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    if not 0 < span <= 2 * tensor.numel() or may_overlap(tensor):
        return tensor.clone(memory_format=torch.preserve_format)
    return tensor.new_zeros(span).as_strided(tensor.shape, tensor.stride()).copy_(tensor)


def may_overlap(tensor: torch.Tensor) -> bool:
    """Whether two elements may share an address, as in an expanded tensor."""
    end = 0
    for stride, size in sorted((stride, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        if size > 1:
            if stride <= end:
                return True
            end += (size - 1) * stride
    return False
