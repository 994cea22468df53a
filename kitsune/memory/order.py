"""A device goes in; out comes how its streams are put in order, for memory that goes from one stream to another.

The CPU twin has one stream, on which everything has ended when the call returns.
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
    """How far a stream had come: `event` is what others wait for."""

    stream: Any
    event: Any


Marks = tuple[Mark, ...]


class Order(Protocol):
    """The streams of one device. A stream is a `torch.cuda.Stream`; on a CPU it is HOST."""

    def current(self) -> Any:
        """The stream to which this thread issues."""

    def new_stream(self) -> Any:
        """A stream beside all others."""

    def on(self, stream: Any) -> AbstractContextManager[None]:
        """What this thread issues in the block goes to `stream`."""

    def mark(self, streams: Iterable[Any]) -> Marks:
        """How far each of these streams has come."""

    def wait(self, stream: Any, marks: Marks) -> None:
        """What is issued to `stream` from now on runs after the marks; those of the stream itself cost nothing."""

    def hold(self, tensor: torch.Tensor, stream: Any) -> None:
        """Torch gives the memory of the tensor to nobody else before what `stream` does with it now has ended."""

    def is_capturing(self, stream: Any) -> bool:
        """Whether what is issued to `stream` goes into a CUDA graph."""


class HostOrder:
    """One stream, which is always done."""

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
    """The streams of one GPU, whichever one is current."""

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
    """Raises CaptureError when what this thread issues now goes into a CUDA graph."""
    if order.is_capturing(order.current()):
        raise CaptureError(f"{what} during a CUDA graph capture: {why}; do it before the capture")
