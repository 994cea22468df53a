"""Exports a training step to an archive. It holds structure only: no weights, batches or code."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import torch
from pydantic import ValidationError
from torch import nn
from torch.export import Dim, ExportedProgram
from torch.utils import _pytree as pytree

from kitsune.autograd.hooks import is_hooked
from kitsune.errors import ArchiveError, ExportError, WorkloadError
from kitsune.submission.exporting import transformer_mask
from kitsune.submission.exporting.preserve import preserved, quiet
from kitsune.submission.exporting.selfcheck import outcome_of, verify
from kitsune.submission.exporting.split_forward_loss import cut
from kitsune.submission.exporting.tensors import Table
from kitsune.submission.format.archive import Archive, checked_document
from kitsune.submission.format.optimizers import describe_optimizer
from kitsune.submission.format.rnn import mended_lstm_shapes
from kitsune.submission.format.source import WAY_OUT, line_of_error
from kitsune.submission.format.structure import describe, substitute
from kitsune.workload import Batch, LossFn, Workload, call_model, own_loss

_Result = TypeVar("_Result")
# What torch.export and the traced code may raise. torch.export's own errors derive from RuntimeError.
_FAILURES: Final = (
    ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, OSError, RuntimeError, TypeError,
    ValueError,
)  # fmt: skip


def export(model: nn.Module, loss_fn: LossFn, optimizer: torch.optim.Optimizer, batch: Batch, path: str | Path) -> str:
    """Writes the archive of a training step to `path` and returns its fingerprint.

    The file holds no weights, no code and no batch. Model, optimizer and random state do not change. Raises
    ExportError, which names the line or the operator, when the step cannot be exported, and OSError when `path` cannot
    be written.
    """
    archive = to_archive(Workload(model, loss_fn, optimizer, batch))
    archive.save(path)
    return archive.fingerprint


def to_archive(workload: Workload) -> Archive:
    """The archive of a workload, verified to give the same loss and gradients. Raises ExportError."""
    step = _Step(workload)
    device = _device_of(step)
    _refuse_hooks(step)
    with transformer_mask.noted() as masks:
        expected = _eager(step, device, lambda: outcome_of(lambda: step(*step.leaves), list(step.parameters())))
    archive, originals = _unchecked(step, workload.optimizer, device, masks)
    with quiet(), preserved(step, device), torch.enable_grad():
        verify(archive, originals, step.leaves, expected)
    return archive


def fingerprint_of(workload: Workload) -> str:
    """The fingerprint of the archive, without verifying the graph, which is not sent anywhere. Raises ExportError."""
    step = _Step(workload)
    device = _device_of(step)
    archive, _ = _unchecked(step, workload.optimizer, device, _masks(step, device))
    return archive.fingerprint


def model_fingerprint_of(model: nn.Module, optimizer: torch.optim.Optimizer, x: Any) -> str:
    """The `model_fingerprint` of this model, which is the same for every loss. Raises ExportError."""
    step = _Step(Workload(model, _any_loss, optimizer, (x, None)))
    device = _device_of(step)
    archive, _ = _unchecked(step, optimizer, device, _masks(step, device))
    return archive.model_fingerprint


def _any_loss(output: Any, _: Any) -> torch.Tensor:
    """The loss that the model returns, or the sum of all its differentiable outputs."""
    own = own_loss(output)
    if isinstance(own, torch.Tensor) and own.dim() == 0:
        return own
    leaves = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    trained = [leaf for leaf in leaves if leaf.requires_grad and leaf.is_floating_point()]
    if not trained:
        raise WorkloadError(f"the model's output, a {type(output).__name__}, holds no differentiable tensor")
    return torch.stack([leaf.sum(dtype=torch.float32) for leaf in trained]).sum()


def _unchecked(
    step: "_Step", optimizer: torch.optim.Optimizer, device: torch.device, masks: Sequence[bool]
) -> tuple[Archive, list[torch.Tensor]]:
    """The archive, not yet verified, and the tensors of its entries.

    `masks`: for each check of a mask in the step whether it is causal.
    """
    try:
        with transformer_mask.repeated(masks):
            return _archive(step, optimizer, device, is_dynamic=True)
    except ExportError:
        # Some models fix their batch size; the sizes of this batch then become part of the archive.
        with transformer_mask.repeated(masks):
            return _archive(step, optimizer, device, is_dynamic=False)


def _refuse_hooks(step: "_Step") -> None:
    """Raises ExportError for hooks on gradients: they are not in the graph, and the verification cannot detect them."""
    what = [f"parameter {name}" for name, parameter in step.named_parameters() if is_hooked(parameter)]
    what += [
        f"module {name}"
        for name, module in step.named_modules()
        if module._backward_hooks or module._backward_pre_hooks
    ]
    if what:
        first = what[0].replace(" model.", " ")
        others = f" (and those of {len(what) - 1} more)" if len(what) > 1 else ""
        raise ExportError(f"{first}: a hook on its gradient would be lost{others}; remove it, or {WAY_OUT}")


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _each_once(leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    """Copies repeated tensors (x and y of a language model), since export would merge them into one input."""
    first = {id(leaf): index for index, leaf in reversed(list(enumerate(leaves)))}
    return [
        leaf if first[id(leaf)] == index else leaf.detach().clone().requires_grad_(leaf.requires_grad)
        for index, leaf in enumerate(leaves)
    ]


@dataclass(frozen=True, slots=True)
class _Slot:
    """Placeholder for a tensor in the structure of a batch."""

    index: int


class _Step(nn.Module):
    """A module from the leaves of x and y to the loss, so that export sees tensors only and no user-defined types."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        compiled = workload.model
        self.model: nn.Module = getattr(compiled, "_orig_mod", compiled)  # what torch.compile wrapped
        self.training = self.model.training
        self.loss_fn = workload.loss_fn
        leaves: list[torch.Tensor] = []
        try:
            self.x_structure = describe(workload.batch[0], _is_tensor, leaves, "x")
            self.x_count = len(leaves)
            self.y_structure = describe(workload.batch[1], _is_tensor, leaves, "y")
        except ValueError as error:
            raise ExportError(f"the batch cannot be exported: {error}; {WAY_OUT}") from error
        leaves = _each_once(leaves)
        slots = iter([_Slot(index) for index in range(len(leaves))])
        self.skeleton = [substitute(part, _is_tensor, slots) for part in workload.batch]
        # In a dict, since export would treat a tensor attribute as a constant of the model.
        self.held = {"leaves": leaves}

    @property
    def leaves(self) -> list[torch.Tensor]:
        return self.held["leaves"]

    def forward(self, *leaves: torch.Tensor) -> torch.Tensor:
        values = iter(leaves)
        x, y = (substitute(part, lambda value: isinstance(value, _Slot), values) for part in self.skeleton)
        output = call_model(self.model, x)
        loss = own_loss(output) if self.loss_fn is None else self.loss_fn(output, y)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise WorkloadError("the loss is not a tensor of one element; pass a loss_fn that returns a scalar")
        return loss


def _device_of(step: _Step) -> torch.device:
    """The device of parameters, buffers and batch. Raises ExportError when there are several."""
    tensors = [*step.parameters(), *step.buffers(), *step.leaves]
    devices = sorted({str(tensor.device) for tensor in tensors})
    if len(devices) > 1:
        raise ExportError(f"model and batch are spread over {', '.join(devices)}; put them on one device")
    if torch.device(devices[0]).type not in ("cpu", "cuda"):
        raise ExportError(f"model and batch are on {devices[0]}; only cpu and cuda can be exported")
    return torch.device(devices[0])


def _masks(step: _Step, device: torch.device) -> list[bool]:
    """For each check of a mask in the step whether it is causal. Runs the step only if it has such checks."""
    with transformer_mask.noted() as masks:
        if transformer_mask.asks(step):
            _eager(step, device, lambda: step(*step.leaves))
    return masks


def _eager(step: _Step, device: torch.device, run: Callable[[], _Result]) -> _Result:
    with quiet(), preserved(step, device), torch.enable_grad():
        try:
            return run()
        except _FAILURES as error:
            raise ExportError(f"the step itself fails{line_of_error(error)}: {_first_line(error)}") from error


def _archive(
    step: _Step, optimizer: torch.optim.Optimizer, device: torch.device, is_dynamic: bool
) -> tuple[Archive, list[torch.Tensor]]:
    program = _program(step, device, is_dynamic)
    table = Table(step, program)
    forward, loss = cut(program, table.origins(step.x_count), step.loss_fn is not None, device)
    try:
        tensors, buffers = table.entries()
        inputs, sizes = table.inputs(step.leaves)
        parts = {
            "format": "kitsune-archive", "version": 1, "training": step.model.training, "tensors": tensors,
            "inputs": inputs, "sizes": sizes, "x": step.x_structure, "y": step.y_structure, "forward": forward,
            "loss": loss, "optimizer": describe_optimizer(optimizer, table.number),
        }  # fmt: skip
        archive = Archive(checked_document(parts), buffers)
        return Archive.from_bytes(archive.to_bytes()), table.tensors
    except (ValidationError, ArchiveError) as error:
        raise ExportError(f"the step does not fit into an archive: {error}; {WAY_OUT}") from error


def _program(step: _Step, device: torch.device, is_dynamic: bool) -> ExportedProgram:
    """The exported program in the step's current mode. With `is_dynamic` first dimensions of the batch may vary."""
    shapes = [{0: Dim.AUTO} if is_dynamic and leaf.dim() else None for leaf in step.leaves]
    with quiet(), preserved(step, device), torch.enable_grad(), mended_lstm_shapes():
        try:
            return torch.export.export(step, tuple(step.leaves), dynamic_shapes={"leaves": tuple(shapes)}, strict=False)
        except WorkloadError:
            raise
        except _FAILURES as error:
            what = f"the model cannot be exported{line_of_error(error)}: {_first_line(error)}"
            raise ExportError(f"{what}; {WAY_OUT}") from error


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__
