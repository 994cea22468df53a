"""The exported graph against the module that it came from: same seed, same loss, same gradients."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from kitsune.errors import ExportError
from kitsune.submission.archive import Archive
from kitsune.submission.rebuild import assemble_modules
from kitsune.submission.source import WAY_OUT
from kitsune.submission.structure import assemble
from kitsune.workload import call_model

_SEED: Final = 20_240_229
# Relative error allowed where kernels add in no fixed order (a GPU) or round to half precision.
_TOLERANCE: Final = {torch.float64: 1e-9, torch.float32: 1e-3}
_HALF_TOLERANCE: Final = 3e-2


@dataclass(frozen=True, slots=True)
class Outcome:
    """Loss and gradients of one step (None where there is none), and the custom autograd.Functions it went through."""

    loss: torch.Tensor
    gradients: tuple[torch.Tensor | None, ...]
    functions: tuple[str, ...]


def outcome_of(run: Callable[[], torch.Tensor], parameters: Sequence[torch.Tensor]) -> Outcome:
    """Run under a fixed seed. Gradients are returned; `.grad` of the parameters is not touched."""
    torch.manual_seed(_SEED)
    loss = run()
    functions = tuple(sorted(set(_custom_functions(loss))))
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if not trained or not loss.requires_grad:
        raise ExportError("the loss does not depend on any parameter that requires gradients: there is no training step")
    found = iter(torch.autograd.grad(loss.sum(), trained, allow_unused=True))
    gradients = tuple(next(found) if parameter.requires_grad else None for parameter in parameters)
    return Outcome(loss.detach(), gradients, functions)


def _custom_functions(loss: torch.Tensor) -> Iterator[str]:
    """Names of the user's autograd.Functions in the graph behind a loss."""
    waiting, seen = [loss.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            kind = getattr(node, "_forward_cls", type(node))
            yield f"{kind.__module__}.{kind.__qualname__}"
        waiting.extend(following for following, _ in node.next_functions)
