"""Run a model without leaving a trace: what it was before, it is afterwards."""

import contextlib
import logging
import random
import warnings
from collections.abc import Iterable, Iterator

import torch
from torch import nn


@contextlib.contextmanager
def preserved(roots: Iterable[nn.Module], device: torch.device) -> Iterator[None]:
    """Restores buffers, attributes, training flags of the modules, and the random states of torch and Python.

    Gradients are not touched here: use torch.autograd.grad, which leaves `.grad` alone.
    """
    modules = list({id(module): module for root in roots for module in root.modules()}.values())
    attributes = [(module, dict(module.__dict__)) for module in modules]
    registered = [(module, dict(module._buffers), dict(module._parameters)) for module in modules]
    buffers = [b for _, group, _ in registered for b in group.values() if b is not None]
    values = [(buffer, buffer.detach().clone()) for buffer in {id(b): b for b in buffers}.values()]
    python_state = random.getstate()
    indices = [device] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=indices):
            yield
    finally:
        random.setstate(python_state)
        for module, saved in attributes:
            module.__dict__.clear()
            module.__dict__.update(saved)
        for module, saved_buffers, saved_parameters in registered:
            _refill(module._buffers, saved_buffers)
            _refill(module._parameters, saved_parameters)
        with torch.no_grad():
            for buffer, value in values:
                if not torch.equal(buffer, value):
                    buffer.copy_(value)


def _refill(held: dict[str, object], saved: dict[str, object]) -> None:
    held.clear()
    held.update(saved)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No warnings and no log lines: what export has to say is in the error that we raise."""
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
