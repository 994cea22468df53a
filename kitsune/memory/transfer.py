"""Copies batches to the device on a separate stream, and makes the consumer's stream wait for them.

`send` runs in the prefetch thread, `receive` in the training thread.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils import _pytree as pytree

from kitsune.device.cuda_graph import tensors_in


class Transfer(Protocol):
    """Transfers batches from a loader to the training thread."""

    def send(self, batches: Iterator[Any]) -> Any:
        """Fetches the next batch and starts its copy. Raises what the loader raises, StopIteration at the end."""

    def receive(self, sent: Any) -> Any:
        """The batch, ready for the current stream of this thread."""


class HostTransfer:
    """The CPU: batches are not copied."""

    def send(self, batches: Iterator[Any]) -> Any:
        return next(batches)

    def receive(self, sent: Any) -> Any:
        return sent


@dataclass(frozen=True, slots=True)
class Sent:
    """A batch that is being copied; `arrived` is recorded after the copy."""

    batch: Any
    arrived: torch.cuda.Event


@functools.cache
def copy_stream(index: int) -> torch.cuda.Stream:
    """The stream for prefetching on a GPU. There is only one, since torch reuses freed memory by stream."""
    return torch.cuda.Stream(index)


class DeviceTransfer:
    """Copies to a GPU on a separate stream, concurrently with the consumer.

    The loader runs on that stream too, after the work that the consumer has issued before: a loader may slice its
    batches from tensors on the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = copy_stream(device.index or 0)
        self._stream.wait_stream(torch.cuda.current_stream(device))

    def send(self, batches: Iterator[Any]) -> Sent:
        with torch.cuda.stream(self._stream):
            batch = pytree.tree_map_only(torch.Tensor, self._copied, next(batches))
            return Sent(batch, self._stream.record_event())

    def receive(self, sent: Sent) -> Any:
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(sent.arrived)
        for tensor in tensors_in(sent.batch):
            # The memory belongs to the copy stream: without this, torch would reuse it for the next batch as soon as
            # the consumer drops the tensor, while the consumer's kernels may still read it.
            tensor.record_stream(stream)
        return sent.batch

    def _copied(self, tensor: torch.Tensor) -> torch.Tensor:
        return pinned(tensor).to(self._device, non_blocking=True)


def transfer_to(device: torch.device) -> Transfer:
    return DeviceTransfer(device) if device.type == "cuda" else HostTransfer()


def pinned(tensor: torch.Tensor) -> torch.Tensor:
    """A host tensor in pinned memory, from which copies are asynchronous. A pinned or GPU tensor is returned as is."""
    is_pageable = tensor.device.type == "cpu" and tensor.layout == torch.strided and not tensor.is_pinned()
    return tensor.pin_memory() if is_pageable else tensor
