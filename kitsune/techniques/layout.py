"""layout: weights and images in channels_last, the memory order of tensor-core convolutions."""

import contextlib
from typing import Any

import torch

from kitsune.knobs import Choice
from kitsune.techniques.technique import Build, Facts, Technique


class Layout(Technique):
    name = "layout"

    def why_not(self, choice: Choice, facts: Facts) -> str | None:
        return None if facts.convolutions else "the model has no convolution"

    def apply(self, choice: Choice, build: Build) -> None:
        """Changes strides only, also of optimizer state. Values, names and Parameter objects stay."""
        moved = [tensor for tensor in (*build.model.parameters(), *build.model.buffers()) if is_movable(tensor)]
        _restride(moved, torch.channels_last)
        build.undo.callback(_restride, moved, torch.contiguous_format)
        _Moments(build.optimizer, {tensor for tensor in moved if isinstance(tensor, torch.nn.Parameter)}, build.undo)
        build.memory_format = torch.channels_last

    def blames(self, error: BaseException) -> bool:
        """Whether a `view` failed on the new strides. In compiled code the message is part of Dynamo's."""
        return isinstance(error, RuntimeError) and "view size is not compatible" in str(error)


class _Moments:
    """Keeps optimizer state in the layout of its parameters, as fused updates need it, and checkpoints contiguous."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, moved: set[torch.nn.Parameter], undo: contextlib.ExitStack
    ) -> None:
        self._optimizer = optimizer
        self._moved = moved
        undo.callback(self._put, torch.contiguous_format)
        undo.callback(optimizer.register_state_dict_post_hook(_as_given).remove)
        undo.callback(optimizer.register_load_state_dict_post_hook(lambda _: self._put(torch.channels_last)).remove)
        self._put(torch.channels_last)

    def _put(self, memory_format: torch.memory_format) -> None:
        states = (self._optimizer.state.get(parameter, {}) for parameter in self._moved)
        _restride([value for state in states for value in state.values() if is_image(value)], memory_format)


def _as_given(_: torch.optim.Optimizer, checkpoint: dict[str, Any]) -> None:
    """Makes moments contiguous: a plain fused optimizer does not accept them in another layout than its parameters."""
    checkpoint["state"] = {
        key: {name: value.contiguous() if is_image(value) else value for name, value in state.items()}
        if isinstance(state, dict)
        else state
        for key, state in checkpoint["state"].items()
    }


def is_image(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 4


def is_movable(tensor: torch.Tensor) -> bool:
    """Whether it is a contiguous image that is not channels_last as well. Other strides are the user's choice."""
    return is_image(tensor) and tensor.is_contiguous() and not tensor.is_contiguous(memory_format=torch.channels_last)


def _restride(tensors: list[torch.Tensor], memory_format: torch.memory_format) -> None:
    with torch.no_grad():
        for tensor in tensors:
            tensor.data = tensor.data.contiguous(memory_format=memory_format)
            if tensor.grad is not None:
                tensor.grad.data = tensor.grad.data.contiguous(memory_format=memory_format)


TECHNIQUE = Layout()
