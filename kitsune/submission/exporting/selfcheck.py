"""Verifies that an exported graph gives the loss and gradients of its module under the same seed."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from kitsune.device.tf32 import full_precision
from kitsune.errors import ExportError
from kitsune.submission.format.archive import Archive
from kitsune.submission.format.source import WAY_OUT, line_of_class
from kitsune.submission.format.structure import assemble
from kitsune.submission.rebuilding.rebuild import assemble_modules
from kitsune.workload import call_model

_SEED: Final = 20_240_229
# Tolerated relative error. Graph and module agree bitwise on a CPU when they run the same operators, but some libraries
# behave differently while traced: transformers then builds a causal mask instead of passing is_causal.
_TOLERANCE: Final = {"cpu": 1e-5, "cuda": 1e-3}
_HALF_TOLERANCE: Final = 3e-2


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """Loss and gradients of one step (None without one), and the Python autograd.Functions of torch in its graph."""

    loss: torch.Tensor
    gradients: tuple[torch.Tensor | None, ...]
    functions: tuple[str, ...]


def outcome_of(run: Callable[[], torch.Tensor], parameters: Sequence[torch.Tensor]) -> StepOutcome:
    """Runs a step under a fixed seed. Does not change `.grad`. Raises ExportError when the step cannot be exported."""
    torch.manual_seed(_SEED)
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    with _deterministic_kernels(parameters[0].device if parameters else torch.device("cpu")):
        loss = run()
        functions = set(_functions(loss))
        _refuse_own(functions)
        if not trained or not loss.requires_grad:
            raise ExportError(
                "the loss does not depend on any parameter that requires gradients: there is no training step"
            )
        found = iter(torch.autograd.grad(loss.sum(), trained, allow_unused=True))
    gradients = tuple(next(found) if parameter.requires_grad else None for parameter in parameters)
    if any(gradient is not None and gradient.layout is not torch.strided for gradient in gradients):
        raise ExportError("a gradient is sparse, which cannot be exported: build its embedding with sparse=False")
    return StepOutcome(loss.detach(), gradients, tuple(sorted(map(_name, functions))))


@contextlib.contextmanager
def _deterministic_kernels(device: torch.device) -> Iterator[None]:
    """Makes a GPU use the same kernels for the graph as for the module.

    Attention selects its backend by whether it has a mask, and each backend draws dropout differently: the loss of a
    BERT on an H200 differed by 0.0127 as a graph. TF32 convolutions of a GoogLeNet differed by 3.5e-4.
    """
    if device.type != "cuda":
        yield
        return
    before = torch.backends.cudnn.deterministic
    torch.backends.cudnn.deterministic = True
    try:
        with full_precision(), sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.cudnn.deterministic = before


def _refuse_own(functions: Iterable[type]) -> None:
    """Raises ExportError for a custom autograd.Function. Comparing gradients of one batch may not reveal its loss."""
    for kind in sorted(functions, key=_name):
        if kind.__module__.partition(".")[0] != "torch":
            raise ExportError(
                f"custom autograd.Function {_name(kind)}{line_of_class(kind)}: an exported graph keeps its forward, "
                f"but its backward is lost; {WAY_OUT}"
            )


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _functions(loss: torch.Tensor) -> Iterator[type]:
    """The autograd.Functions written in Python in the autograd graph of a loss."""
    waiting, seen = [loss.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            yield getattr(node, "_forward_cls", type(node))
        waiting.extend(following for following, _ in node.next_functions)


def verify(
    archive: Archive, originals: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor], expected: StepOutcome
) -> None:
    """Raises ExportError unless the archive with the module's weights gives the module's loss and gradients.

    `originals`: the module's tensors in the order of the archive. Buffers are copied, parameters are not.
    """
    document = archive.document
    tensors = [t if isinstance(t, torch.nn.Parameter) else t.detach().clone() for t in originals]
    model, loss_fn = assemble_modules(document, tensors, leaves[0].device)
    x, y = assemble(document.x, leaves), assemble(document.y, leaves)
    parameters = [tensor for tensor, entry in zip(tensors, document.tensors, strict=True) if entry.kind == "parameter"]

    def run() -> torch.Tensor:
        output = call_model(model, x)
        return output if loss_fn is None else loss_fn(output, y)

    try:
        found = outcome_of(run, parameters)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        raise ExportError(f"the exported graph does not run: {error}; {WAY_OUT}") from error
    difference = _difference(expected, found, archive, _tolerance(archive, leaves[0].device))
    if difference and expected.functions:
        raise ExportError(
            f"autograd.Function {', '.join(expected.functions)}: an exported graph keeps its forward, but its "
            f"backward is lost ({difference}); {WAY_OUT}"
        )
    if difference:
        raise ExportError(f"the exported graph does not compute what the model does: {difference}; {WAY_OUT}")


def _tolerance(archive: Archive, device: torch.device) -> float:
    if "float16" in archive.document.model_dump_json():  # bfloat16 too: in a tensor, an autocast region or a cast
        return _HALF_TOLERANCE
    return _TOLERANCE[device.type]


def _difference(expected: StepOutcome, found: StepOutcome, archive: Archive, tolerance: float) -> str:
    """A description of the first difference above the tolerance, or ""."""
    names = [entry.names[0] for entry in archive.document.tensors if entry.kind == "parameter"]
    norms = [float(gradient.norm()) for gradient in expected.gradients if gradient is not None]
    floor = 1e-3 * max(norms, default=0.0)
    pairs: list[tuple[str, torch.Tensor | None, torch.Tensor | None]] = [("the loss", expected.loss, found.loss)]
    pairs += [
        (f"the gradient of {name}", one, other)
        for name, one, other in zip(names, expected.gradients, found.gradients, strict=True)
    ]
    for what, one, other in pairs:
        if (one is None) != (other is None):
            return f"{what} is missing on one side"
        if one is not None and other is not None and not _is_close(one, other, tolerance, floor):
            return f"{what} differs by {float((one - other).abs().max()):.3g}"
    return ""


def _is_close(one: torch.Tensor, other: torch.Tensor, tolerance: float, floor: float) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if torch.allclose(one, other, rtol=0, atol=0, equal_nan=True):
        return True
    return bool((one - other).norm() <= tolerance * max(float(one.norm()), floor))
