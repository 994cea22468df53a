"""Orders the streams of a device, for memory that one stream uses after another.

The CPU implementation has one stream, on which all work has finished when a call returns.
"""

import contextlib
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch

from kitsune.errors import CaptureError

HOST: Final = "host"


@dataclass(frozen=True, slots=True)
class Mark:
    """A point on a stream; other streams can wait for its `event`."""

    stream: Any
    event: Any


Marks = tuple[Mark, ...]


class Order(Protocol):
    """The streams of one device. A stream is a `torch.cuda.Stream`; on a CPU it is HOST."""

    def current(self) -> Any:
        """The current stream of this thread."""

    def new_stream(self) -> Any:
        """A new stream."""

    def on(self, stream: Any) -> AbstractContextManager[None]:
        """Makes `stream` current in the block."""

    def mark(self, streams: Iterable[Any]) -> Marks:
        """A mark at the current end of each of these streams."""

    def wait(self, stream: Any, marks: Marks) -> None:
        """Makes `stream` wait for the marks. Marks on the stream itself are skipped."""

    def hold(self, tensor: torch.Tensor, stream: Any) -> None:
        """Keeps torch from reusing the memory of the tensor before the work issued to `stream` so far has ended."""

    def is_capturing(self, stream: Any) -> bool:
        """Whether `stream` is being captured into a CUDA graph."""


class HostOrder:
    """The CPU: one stream without pending work."""

    def current(self) -> Any:
        return HOST

    def new_stream(self) -> Any:
        return HOST

    def on(self, stream: Any) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def mark(self, streams: Iterable[Any]) -> Marks:
        return ()

    def wait(self, stream: Any, marks: Marks) -> None:
        return None

    def hold(self, tensor: torch.Tensor, stream: Any) -> None:
        return None

    def is_capturing(self, stream: Any) -> bool:
        return False


class DeviceOrder:
    """The streams of one GPU, which need not be the current one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def current(self) -> Any:
        return torch.cuda.current_stream(self._device)

    def new_stream(self) -> Any:
        return torch.cuda.Stream(self._device)

    def on(self, stream: Any) -> AbstractContextManager[None]:
        return torch.cuda.stream(stream)

    def mark(self, streams: Iterable[Any]) -> Marks:
        return tuple(Mark(stream, stream.record_event()) for stream in dict.fromkeys(streams))

    def wait(self, stream: Any, marks: Marks) -> None:
        for mark in marks:
            if mark.stream != stream:
                stream.wait_event(mark.event)

    def hold(self, tensor: torch.Tensor, stream: Any) -> None:
        tensor.record_stream(stream)

    def is_capturing(self, stream: Any) -> bool:
        with torch.cuda.stream(stream):
            return torch.cuda.is_current_stream_capturing()


def order_of(device: torch.device) -> Order:
    return DeviceOrder(device) if device.type == "cuda" else HostOrder()


def refuse_capture(order: Order, what: str, why: str) -> None:
    """Raises CaptureError during a CUDA graph capture on the current stream."""
    if order.is_capturing(order.current()):
        raise CaptureError(f"{what} during a CUDA graph capture: {why}; do it before the capture")
