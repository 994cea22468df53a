"""Modes: what torch keeps for each thread of how tensors are made, so that another thread can make them alike."""

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch

AUTOCAST_DEVICES = ("cpu", "cuda")


@dataclass(frozen=True, slots=True)
class Modes:
    """Grad and inference mode, the default device, and the dtype of autocast for each device on which it is on."""

    is_grad: bool
    is_inference: bool
    device: torch.device
    autocast: Mapping[str, torch.dtype]

    def enter(self) -> contextlib.ExitStack:
        """Takes them on for a new thread, until the stack is closed; autocast until the thread ends."""
        for device, dtype in self.autocast.items():
            # All threads share one cache of weights that were cast. It knows no streams, so nothing of this thread may
            # come from it or go there; and leaving torch.autocast would empty it in the midst of a forward elsewhere.
            torch.set_autocast_cache_enabled(False)
            torch.set_autocast_dtype(device, dtype)
            torch.set_autocast_enabled(device, True)
        entered = contextlib.ExitStack()
        if self.is_inference:
            entered.enter_context(torch.inference_mode())
        entered.enter_context(torch.set_grad_enabled(self.is_grad))
        if self.device != torch.get_default_device():  # it costs something at every call of torch
            entered.enter_context(self.device)
        return entered


def modes() -> Modes:
    """Those of this thread."""
    return Modes(
        is_grad=torch.is_grad_enabled(),
        is_inference=torch.is_inference_mode_enabled(),
        device=torch.get_default_device(),
        autocast={
            device: torch.get_autocast_dtype(device) for device in AUTOCAST_DEVICES if torch.is_autocast_enabled(device)
        },
    )
