"""Leaves of the autograd graph: which there are, and parameters under other names for one capture, without a past."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping

import torch

from kitsune.engine.outputs import edges_behind
from kitsune.errors import CaptureError

Leaves = Mapping[torch.nn.Parameter, torch.nn.Parameter]


def leaves_behind(output: torch.Tensor) -> list[torch.Tensor]:
    """The leaves of the autograd graph that a gradient of this tensor flows to: itself, where it is one."""
    if output.grad_fn is None:
        return [output] if output.requires_grad else []
    nodes = {output.grad_fn} | {node for node, _ in edges_behind([output.grad_fn])}
    return [node.variable for node in nodes if hasattr(node, "variable")]


def why_not_ours(
    what: str, outputs: Iterable[torch.Tensor], parameters: Iterable[torch.Tensor], whose: str
) -> str | None:
    """Why a replay would leave out gradients of what `what` has made, or None. The parameters are `whose`."""
    ours = set(map(id, parameters))
    foreign = [leaf for output in outputs for leaf in leaves_behind(output) if id(leaf) not in ours]
    if not foreign:
        return None
    shape = "x".join(map(str, foreign[0].shape)) or "scalar"
    return (
        f"{what} needs the gradient of a tensor ({shape}) that is no parameter of {whose}, "
        "which a replayed graph would not set"
    )


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
