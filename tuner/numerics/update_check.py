"""Recomputes an optimizer update in float64 and compares it with the candidate's.

The optimizer as given starts from the candidate's own state and gradients, so that only rounding may differ. A missing
weight decay changes a weight by 1e-5 of its size, rounding in fp32 only by 1e-7.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.utils import _pytree as pytree

from kitsune.long_proof import Margin
from kitsune.update.optimizer_update import parameters_of
from kitsune.workload import Workload
from tuner.numerics.trace_errors import margin_of, nearest
from tuner.numerics.training_trace import cloned

#: Relative to the norm of the update or state. Adam's bias corrections, computed in fp32 within a graph, lose 2e-6.
RELATIVE: Final = 3e-5
#: Units in the last place: an element is rounded at most twice, by half a unit each time.
ROUNDING: Final = 1.0
#: Allowed roundings, in units of the format, that add up within an update or a state; matters for short formats.
ROUNDINGS: Final = 8.0
#: Number of elements recomputed at once for an optimizer of torch: 2 GB for each tensor of its state.
PIECE_ELEMENTS: Final = 2**28
#: Always allowed per element of a state: numbers too small for the format may be lost.
TINY: Final = 1e-37

State = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class OptimizerSnapshot:
    """Parameters and the optimizer's state for each, in the same order; copies or the live tensors."""

    parameters: Sequence[torch.Tensor]
    states: Sequence[State]


def trained_parameters(workload: Workload) -> dict[str, torch.Tensor]:
    """Name -> parameter, including those that only the optimizer holds."""
    named = dict(workload.model.named_parameters())
    known = {id(parameter) for parameter in named.values()}
    others = [parameter for parameter in parameters_of(workload.optimizer) if id(parameter) not in known]
    return {**named, **{f"parameter {index} beside the model's": each for index, each in enumerate(others)}}


def live_state(workload: Workload) -> OptimizerSnapshot:
    parameters = list(trained_parameters(workload).values())
    states = workload.optimizer.state
    return OptimizerSnapshot(
        [parameter.detach() for parameter in parameters], [states.get(each, {}) for each in parameters]
    )


def copied_state(snapshot: OptimizerSnapshot) -> OptimizerSnapshot:
    """A copy on the same device."""
    parameters = [cloned(parameter) for parameter in snapshot.parameters]
    return OptimizerSnapshot(parameters, [pytree.tree_map(_copied, dict(state)) for state in snapshot.states])


class DoubleUpdate:
    """The optimizer of a fresh workload as given, in float64. The workload cannot be used any more."""

    def __init__(self, workload: Workload) -> None:
        self.optimizer = workload.optimizer
        self._parameters = list(trained_parameters(workload).values())
        self._plain_step = _groups_by_parameter(workload.optimizer)
        for parameter in self._parameters:
            self._clear(parameter)

    def check(
        self,
        names: Sequence[str],
        before: OptimizerSnapshot,
        gradients: Sequence[torch.Tensor | None],
        after: OptimizerSnapshot,
    ) -> list[Margin]:
        """Recomputes the update from `before` with these gradients, and compares the result with `after`.

        Returns, for each kind of tensor, the margin nearest to its limit.
        """
        margins: list[Margin] = []
        for piece in self._pieces(before):
            self._update(piece, before, gradients)
            for index in piece:
                own = self._parameters[index]
                margins.append(_of_parameter(names[index], before.parameters[index], after.parameters[index], own))
                margins += _of_state(names[index], after.states[index], self.optimizer.state.get(own, {}))
                self._clear(own)
        kinds = {margin.what: [each for each in margins if each.what == margin.what] for margin in margins}
        return [nearest(of_kind) for of_kind in kinds.values()]

    def _update(
        self, piece: Sequence[int], before: OptimizerSnapshot, gradients: Sequence[torch.Tensor | None]
    ) -> None:
        for index in piece:
            own, gradient = self._parameters[index], gradients[index]
            own.data = widened(before.parameters[index])
            own.grad = None if gradient is None else widened(gradient)
            if before.states[index]:
                self.optimizer.state[own] = self._wide_state(own, before.states[index])
        self.optimizer.step()

    def _wide_state(self, parameter: torch.Tensor, state: State) -> dict[str, Any]:
        """The state in float64. `step` stays in fp32, where the implementation needs it: on the device for fused or
        capturable optimizers, on the host for all others."""
        wide = pytree.tree_map(lambda leaf: widened(leaf) if isinstance(leaf, torch.Tensor) else leaf, dict(state))
        step = state.get("step")
        if isinstance(step, torch.Tensor):
            there = parameter.device if self._plain_step[parameter] else torch.device("cpu")
            wide["step"] = step.detach().to(there, torch.float32, copy=True)
        return wide

    def _pieces(self, before: OptimizerSnapshot) -> Iterator[list[int]]:
        """All parameters at once for an optimizer that is not torch's, whose updates may depend on each other."""
        limit = PIECE_ELEMENTS if type(self.optimizer).__module__.startswith("torch.optim") else None
        piece: list[int] = []
        elements = 0
        for index, parameter in enumerate(before.parameters):
            if piece and limit is not None and elements + parameter.numel() > limit:
                yield piece
                piece, elements = [], 0
            piece.append(index)
            elements += parameter.numel()
        yield piece

    def _clear(self, parameter: torch.Tensor) -> None:
        parameter.grad = None
        parameter.data = parameter.data.new_empty(0)
        self.optimizer.state.pop(parameter, None)


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in float64 or complex128; integers keep their dtype."""
    tensor = tensor.detach()
    if tensor.is_complex():
        return tensor.to(torch.complex128, copy=True)
    return tensor.to(torch.float64 if tensor.is_floating_point() else tensor.dtype, copy=True)


def _groups_by_parameter(optimizer: torch.optim.Optimizer) -> dict[torch.Tensor, bool]:
    """Parameter -> whether its group keeps `step` on the device."""
    return {
        parameter: bool(group.get("fused") or group.get("capturable"))
        for group in optimizer.param_groups
        for parameter in group["params"]
    }


def _of_parameter(name: str, before: torch.Tensor, after: torch.Tensor, expected: torch.Tensor) -> Margin:
    wide = expected.detach()
    error, moved, size = _norms(after - wide, wide - before, wide)
    unit = _unit(before)
    allowed = max(RELATIVE, ROUNDINGS * unit) * moved + ROUNDING * unit * size
    return margin_of("update of", name, error, allowed, moved)


def _of_state(name: str, after: State, expected: State) -> Iterator[Margin]:
    """A margin for every floating-point tensor of the optimizer's state; a missing one has an error of 1."""
    for key, wide in expected.items():
        if not isinstance(wide, torch.Tensor) or not (wide.is_floating_point() or wide.is_complex()):
            continue
        ours = after.get(key)
        if not isinstance(ours, torch.Tensor) or ours.shape != wide.shape:
            yield margin_of(f"state {key} of", name, 1.0, 0.0, 1.0)
            continue
        error, size = _norms(ours.detach().to(wide.device) - wide, wide)
        relative = max(RELATIVE, ROUNDINGS * _unit(ours))
        allowed = relative * size + TINY * max(1, wide.numel()) ** 0.5
        yield margin_of(f"state {key} of", name, error, allowed, size)


def _norms(*tensors: torch.Tensor) -> list[float]:
    """The norms, with one synchronization with the device."""
    wide = [tensor.abs() if tensor.is_complex() else tensor for tensor in tensors]
    found: list[float] = torch.stack([torch.linalg.vector_norm(each, dtype=torch.float64) for each in wide]).tolist()
    return found


def _unit(tensor: torch.Tensor) -> float:
    return torch.finfo(tensor.dtype).eps if tensor.is_floating_point() or tensor.is_complex() else 0.0


def _copied(leaf: Any) -> Any:
    return cloned(leaf) if isinstance(leaf, torch.Tensor) else leaf
