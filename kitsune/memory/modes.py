"""Modes: torch's thread-local modes, copied to another thread so that it creates tensors in the same way."""

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch

AUTOCAST_DEVICES = ("cpu", "cuda")


@dataclass(frozen=True, slots=True)
class Modes:
    """Grad and inference mode, the default device, and the autocast dtype of each device with autocast enabled."""

    is_grad: bool
    is_inference: bool
    device: torch.device
    autocast: Mapping[str, torch.dtype]

    def enter(self) -> contextlib.ExitStack:
        """Enters these modes in a new thread until the stack is closed; autocast stays until the thread ends."""
        for device, dtype in self.autocast.items():
            # All threads share one cache of cast weights. It does not track streams, so this thread must not use it.
            # torch.autocast is not used, since leaving it would clear the cache during a forward in another thread.
            torch.set_autocast_cache_enabled(False)
            torch.set_autocast_dtype(device, dtype)
            torch.set_autocast_enabled(device, True)
        entered = contextlib.ExitStack()
        if self.is_inference:
            entered.enter_context(torch.inference_mode())
        entered.enter_context(torch.set_grad_enabled(self.is_grad))
        if self.device != torch.get_default_device():  # it slows down every call of torch
            entered.enter_context(self.device)
        return entered


def modes() -> Modes:
    """The modes of this thread."""
    return Modes(
        is_grad=torch.is_grad_enabled(),
        is_inference=torch.is_inference_mode_enabled(),
        device=torch.get_default_device(),
        autocast={
            device: torch.get_autocast_dtype(device) for device in AUTOCAST_DEVICES if torch.is_autocast_enabled(device)
        },
    )
