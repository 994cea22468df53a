"""Leaves: parameters under other names for one capture, so that the autograd graph inside has no past."""

import contextlib
from collections.abc import Iterator, Mapping

import torch

from kitsune.errors import CaptureError

Leaves = Mapping[torch.nn.Parameter, torch.nn.Parameter]


@contextlib.contextmanager
def fresh_leaves(model: torch.nn.Module) -> Iterator[Leaves]:
    """Puts aliases in the place of all parameters that require gradients; yields parameter -> alias.

    Autograd keeps one AccumulateGrad node for a parameter as long as any graph refers to it, bound to the stream of its
    birth: the loss of the last iteration, which every training loop still holds, is enough. A captured backward would
    wait for that stream, which breaks the capture. An alias shares the storage and has a node of its own.

    Raises CaptureError when one was given other memory in the block: its parameter, and a replay, know nothing of that.
    """
    aliases: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
    swapped: list[tuple[torch.nn.Module, str, torch.nn.Parameter]] = []
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.requires_grad:
                swapped.append((module, name, parameter))
                aliases.setdefault(parameter, alias_of(parameter))
    try:
        for module, name, parameter in swapped:
            module._parameters[name] = aliases[parameter]
        yield aliases
    finally:
        for module, name, parameter in swapped:
            module._parameters[name] = parameter
    for module, name, parameter in swapped:
        if aliases[parameter].data_ptr() != parameter.data_ptr():
            raise CaptureError(
                f"the step sets {type(module).__name__}.{name}.data to other memory, which a replayed graph would not"
            )


def alias_of(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    alias = torch.nn.Parameter(parameter.detach())
    alias.__dict__.update(parameter.__dict__)  # what frameworks hang on a parameter
    return alias


def joined(first: torch.Tensor | None, second: torch.Tensor | None) -> torch.Tensor | None:
    """The gradient of a parameter that was used under both its names."""
    if first is None or second is None:
        return second if first is None else first
    return first + second
