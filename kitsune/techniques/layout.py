"""layout: channels_last weights and images, the order in which tensor-core convolutions read memory."""

import torch

from kitsune.knobs import Choice
from kitsune.techniques.technique import Build, Facts, Technique


class Layout(Technique):
    name = "layout"

    def why_not(self, choice: Choice, facts: Facts) -> str | None:
        return None if facts.convolutions else "the model has no convolution"

    def apply(self, choice: Choice, build: Build) -> None:
        """Changes strides only: values, names and Parameter objects stay, and optimizer state keeps in step."""
        moved = [
            tensor
            for tensor in (*build.model.parameters(), *build.model.buffers(), *state_tensors(build.optimizer))
            if tensor.dim() == 4 and not tensor.is_contiguous(memory_format=torch.channels_last)
        ]
        _restride(moved, torch.channels_last)
        build.undo.callback(lambda: _restride([*moved, *state_tensors(build.optimizer)], torch.contiguous_format))
        build.memory_format = torch.channels_last


def state_tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The 4-d tensors of the optimizer's state: fused updates need them in the layout of their parameters."""
    values = (value for state in optimizer.state.values() for value in state.values())
    return [value for value in values if isinstance(value, torch.Tensor) and value.dim() == 4]


def _restride(tensors: list[torch.Tensor], memory_format: torch.memory_format) -> None:
    with torch.no_grad():
        for tensor in tensors:
            tensor.data = tensor.data.contiguous(memory_format=memory_format)


TECHNIQUE = Layout()
