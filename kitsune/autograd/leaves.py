"""Leaves of the autograd graph: finds them, and replaces parameters by fresh aliases for one capture."""

import contextlib
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import torch

from kitsune.autograd.outputs import edges_behind
from kitsune.device.gc_control import live_tensors
from kitsune.errors import CaptureError

ACCUMULATES: Final = "torch::autograd::AccumulateGrad"

Leaves = Mapping[torch.nn.Parameter, torch.nn.Parameter]
There = Mapping[int, weakref.ref[torch.Tensor]]


def tensors_there() -> There:
    """Weak references to all tensors that live in Python now, by id."""
    with torch._C.DisableTorchFunctionSubclass():
        return {id(each): weakref.ref(each) for each in live_tensors()}


def leaves_behind(outputs: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The leaves of the autograd graph that a gradient of these tensors flows to. A leaf among these is included."""
    wanted = [output for output in outputs if output.requires_grad]
    starts: set[Any] = {output.grad_fn for output in wanted if output.grad_fn is not None}
    nodes = {node for node, _ in edges_behind(starts)}
    own = [output for output in wanted if output.grad_fn is None]
    return [*own, *(node.variable for node in nodes if node.name() == ACCUMULATES)]


def why_not_ours(
    what: str,
    outputs: Iterable[torch.Tensor],
    parameters: Iterable[torch.Tensor],
    whose: str,
    before: There,
    runs_as: str = "a replayed graph",
) -> str | None:
    """Why a gradient of `outputs`, which `what` has made, would be missing if it ran as `runs_as`; None if none would.

    A gradient would be missing if it flows to a leaf that is not one of the `parameters` of `whose`. Leaves that did
    not exist `before` are ignored, because the user cannot hold them.
    """
    ours = set(map(id, parameters))
    for leaf in leaves_behind(outputs):
        known = before.get(id(leaf))
        if id(leaf) not in ours and known is not None and known() is leaf:
            shape = "x".join(map(str, leaf.shape)) or "scalar"
            return (
                f"{what} needs the gradient of a tensor ({shape}) that is no parameter of {whose}, "
                f"which {runs_as} would not set"
            )
    return None


@contextlib.contextmanager
def fresh_leaves(model: torch.nn.Module) -> Iterator[Leaves]:
    """Replaces all parameters that require gradients by aliases in the block; yields {parameter: alias}.

    Autograd keeps one AccumulateGrad node for a parameter as long as any graph refers to it, bound to the stream on
    which it was made. The loss of the last iteration, which every training loop still holds, is enough. A captured
    backward would wait for that stream, which breaks the capture. An alias shares the storage and has its own node.

    Raises CaptureError when an alias was given other memory in the block: neither the parameter nor a replay would see
    it.
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
    alias.__dict__.update(parameter.__dict__)  # attributes that frameworks set on a parameter
    return alias


def joined(first: torch.Tensor | None, second: torch.Tensor | None) -> torch.Tensor | None:
    """The sum of the gradients of a parameter and its alias; None if both are None."""
    if first is None or second is None:
        return second if first is None else first
    return first + second
