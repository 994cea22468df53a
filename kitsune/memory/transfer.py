"""Batches from a loader go in, batches on the device come out, with what the consumer's stream must wait for.

Sending runs in the thread that fetches ahead, receiving in the thread that trains.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils import _pytree as pytree

from kitsune.device.cuda_graph import tensors_in


class Transfer(Protocol):
    """One way from a loader to the step."""

    def send(self, batches: Iterator[Any]) -> Any:
        """Takes the next batch and sends it off. Raises what the loader raises, StopIteration at the end."""

    def receive(self, sent: Any) -> Any:
        """The batch, ready for the current stream of this thread."""


class HostTransfer:
    """On a CPU a batch stays where it is."""

    def send(self, batches: Iterator[Any]) -> Any:
        return next(batches)

    def receive(self, sent: Any) -> Any:
        return sent


@dataclass(frozen=True, slots=True)
class Sent:
    """A batch on its way; it is there when `arrived` is over."""

    batch: Any
    arrived: torch.cuda.Event


@functools.cache
def copy_stream(index: int) -> torch.cuda.Stream:
    """The stream of a GPU on which batches are fetched ahead, one for all: torch keeps freed memory by stream."""
    return torch.cuda.Stream(index)


class DeviceTransfer:
    """Copies to a GPU on a stream of its own, beside the work of the consumer.

    The loader runs on that stream too, after what the consumer had issued before: a loader may cut its batches from
    tensors that are on the GPU already.
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
            # The memory belongs to the copy stream: without this, torch gives it to the next batch as soon as the
            # consumer drops the tensor, while kernels of the consumer have still to read it.
            tensor.record_stream(stream)
        return sent.batch

    def _copied(self, tensor: torch.Tensor) -> torch.Tensor:
        return pinned(tensor).to(self._device, non_blocking=True)


def transfer_to(device: torch.device) -> Transfer:
    return DeviceTransfer(device) if device.type == "cuda" else HostTransfer()


def pinned(tensor: torch.Tensor) -> torch.Tensor:
    """A host tensor in pinned memory, from which copies run beside the host; what is there already is not copied."""
    is_pageable = tensor.device.type == "cpu" and tensor.layout == torch.strided and not tensor.is_pinned()
    return tensor.pin_memory() if is_pageable else tensor
