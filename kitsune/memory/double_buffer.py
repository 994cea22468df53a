"""DoubleBuffer: copies the next batch into one of two static buffers while the other is in use."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from kitsune.device.backend import pick_device
from kitsune.device.cuda_graph import tensors_in
from kitsune.errors import SettingsError
from kitsune.launches.planning.memory_plan import BLOCK_BYTES
from kitsune.memory.geometry import bytes_of, rounded_up, tensor_on
from kitsune.memory.order import Marks, order_of, refuse_capture
from kitsune.memory.transfer import pinned

UNKNOWN_TO_A_GRAPH = "a replay would not wait for later copies"


@dataclass(frozen=True, slots=True)
class Coming:
    """A batch that is being copied into a buffer; complete after `marks`."""

    batch: Any
    marks: Marks


class DoubleBuffer:
    """Two buffers of `buffer_size` bytes on a device: one is in use while the next batch is copied into the other.

    Batches of the same shapes alternate between two fixed sets of addresses, so that CUDA graphs can read them: one
    graph for each buffer. Tensors are aligned to 512 bytes. Not thread-safe. On a CPU the copy is synchronous.

    `buffer_size`: bytes, or a string like '512MB'. `device`: None means the current GPU, or the CPU without one.

    Raises SettingsError for an invalid size, UnfitError when the device does not exist.
    """

    def __init__(self, buffer_size: int | str, device: torch.device | str | None = None) -> None:
        self.buffer_size = bytes_of("buffer_size", buffer_size)
        self.device = pick_device(device)
        self._order = order_of(self.device)
        self._copies = self._order.new_stream()
        self._buffers = [torch.empty(self.buffer_size, dtype=torch.uint8, device=self.device) for _ in range(2)]
        for buffer in self._buffers:
            self._order.hold(buffer, self._copies)
        # For each buffer, the marks to wait for before it is written; at first those of earlier users of its memory.
        self._done = [self._order.mark([self._order.current()])] * 2
        self._current = 1
        self._taker: Any = None
        self._coming: Coming | None = None

    def prefetch_next(self, batch: Any) -> None:
        """Starts copying a batch, a tensor or a pytree of tensors, into the buffer that is not in use.

        The copy waits for the work on that buffer issued before the last `get_current`. Do not write to a pinned tensor
        before its copy has ended. Leaves that are no tensors are passed on.

        Raises SettingsError when the batch is larger than a buffer, or the last one was not taken yet; CaptureError
        during a CUDA graph capture.
        """
        refuse_capture(self._order, "prefetch_next() was called", UNKNOWN_TO_A_GRAPH)
        if self._coming is not None:
            raise SettingsError("prefetch_next() was called twice; take the batch with get_current() in between")
        leaves, structure = pytree.tree_flatten(batch)
        target = 1 - self._current
        places = iter(self._places(self._buffers[target], tensors_in(batch)))
        placed = [next(places) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        if any(leaf.device == self.device for leaf in tensors_in(batch)):
            self._order.wait(self._copies, self._order.mark([self._order.current()]))
        self._order.wait(self._copies, self._done[target])
        with self._order.on(self._copies), torch.no_grad():
            for place, leaf in zip(tensors_in(placed), tensors_in(batch), strict=True):
                self._copy(place, leaf)
        self._coming = Coming(pytree.tree_unflatten(placed, structure), self._order.mark([self._copies]))

    def get_current(self) -> Any:
        """The batch of the last `prefetch_next`, on the device. The current stream waits for its copy.

        The tensors are valid until the next call, which frees their buffer for the next batch.

        Raises SettingsError when no batch was prefetched since the last call; CaptureError during a CUDA graph capture.
        """
        refuse_capture(self._order, "get_current() was called", UNKNOWN_TO_A_GRAPH)
        if self._coming is None:
            raise SettingsError("get_current() has no batch to give; call prefetch_next(batch) before each call")
        stream = self._order.current()
        if self._taker is not None:
            self._done[self._current] = self._order.mark([self._taker, stream])
        self._order.wait(stream, self._coming.marks)
        batch, self._coming = self._coming.batch, None
        self._current, self._taker = 1 - self._current, stream
        self._order.hold(self._buffers[self._current], stream)
        return batch

    def _places(self, buffer: torch.Tensor, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Consecutive tensors on the buffer with the shapes, strides and dtypes of the originals."""
        places, end_bytes = [], 0
        for tensor in tensors:
            begin_bytes = rounded_up(end_bytes, BLOCK_BYTES)
            end_bytes = begin_bytes + tensor.numel() * tensor.dtype.itemsize
            if end_bytes <= self.buffer_size:
                stride = torch.empty_like(tensor, device="meta").stride()
                places.append(tensor_on(buffer.untyped_storage(), begin_bytes, tensor.dtype, tensor.shape, stride))
        if end_bytes > self.buffer_size:
            raise SettingsError(
                f"the batch takes {end_bytes:,} bytes, but buffer_size is {self.buffer_size:,}; make the buffers larger"
            )
        return places

    def _copy(self, place: torch.Tensor, tensor: torch.Tensor) -> None:
        if self.device.type == "cuda":
            tensor = pinned(tensor)
        if tensor.device == self.device:
            self._order.hold(tensor, self._copies)
        place.copy_(tensor, non_blocking=True)
