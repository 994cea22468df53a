"""Context managers that run a model without side effects."""

import contextlib
import io
import logging
import random
import warnings
from collections.abc import Iterator

import torch
from torch import nn


@contextlib.contextmanager
def preserved(root: nn.Module, device: torch.device) -> Iterator[None]:
    """Restores buffers, attributes and training flags of a module and its submodules, and random states afterwards.

    The random states are those of torch and Python. Gradients are not restored: use torch.autograd.grad, which does not
    change `.grad`.
    """
    modules = list(root.modules())
    attributes = [(module, dict(module.__dict__)) for module in modules]
    registered = [(module, dict(module._buffers), dict(module._parameters)) for module in modules]
    buffers = {id(buffer): buffer for _, group, _ in registered for buffer in group.values() if buffer is not None}
    values = [(buffer, buffer.detach().clone()) for buffer in buffers.values() if buffer.layout is torch.strided]
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
            module._buffers.clear()
            module._buffers.update(saved_buffers)
            module._parameters.clear()
            module._parameters.update(saved_parameters)
        with torch.no_grad():
            for buffer, value in values:
                if not torch.equal(buffer, value):
                    buffer.copy_(value)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppresses warnings, log lines and dumps of graphs: everything relevant is in the error that export raises."""
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        # torch.export prints the partial graph directly to stderr.
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
