"""Leaves of the autograd graph: which there are, and parameters under other names for one capture, without a past."""

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
    """All tensors that live in Python now, by id."""
    with torch._C.DisableTorchFunctionSubclass():
        return {id(each): weakref.ref(each) for each in live_tensors()}


def leaves_behind(outputs: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The leaves of the autograd graph that a gradient of these tensors flows to: one itself, where it is one."""
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
    """Why gradients of what `what` has made would be left out where it `runs_as` that, or None. The parameters are
    `whose`.

    A leaf that was not there before is nobody's to ask: its gradient goes with the step.
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
