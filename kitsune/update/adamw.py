"""AdamW's update by Kitsune's kernel, within the optimizer's own step.

`Adam.step` calls `_init_group`, which makes missing state and gathers the tensors of a group, and passes these to
torch's implementation. KernelUpdate replaces `_init_group`: it updates the tensors as soon as they are gathered, and
leaves none for torch. Everything else stays torch's: hooks, closures, schedulers, scalers, state and checkpoints.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch.optim import SGD, Adam, AdamW, Optimizer

from kitsune.base import optional_imports
from kitsune.kernels.layouts import is_dense

#: Flags of a group that change the arithmetic, which the kernel does not support.
UNSUPPORTED_FLAGS: Final = ("amsgrad", "maximize", "differentiable")
CLIP_FACTOR: Final = "clip_factor"
#: Attributes by which an optimizer is told of its gradients for one step: two of torch's, and one of ours.
FLAGS: Final = ("found_inf", "grad_scale", CLIP_FACTOR)


class KernelUpdate:
    """Puts the kernel into an Adam or AdamW whose groups are fused, until `undo`. Raises UnfitError without Triton.

    At each step, torch updates a group that the kernel does not support, or whose tensors it cannot handle. Copies and
    pickles of the optimizer do not have the kernel.
    """

    def __init__(self, optimizer: Adam) -> None:
        self._kernel = optional_imports.load("kitsune.kernels.adamw", extra="triton", packages=("triton",))
        self._optimizer = optimizer
        self._gather = partial(
            type(optimizer)._init_group, optimizer
        )  # the class's, not that of an earlier KernelUpdate
        optimizer._init_group = self._update_group  # type: ignore[method-assign]

    def undo(self) -> None:
        vars(self._optimizer).pop("_init_group", None)

    def _update_group(self, group: Mapping[str, Any], *lists: list[torch.Tensor]) -> bool:
        """Replaces `_init_group`. Leaves the lists filled only if torch has to do the update."""
        has_complex = bool(self._gather(group, *lists))
        if lists[0] and group["fused"] and why_not_group(group) is None and self._has_updated(group, *lists):
            for gathered in lists:
                gathered.clear()
        self._prepare_for_torch(*lists[:2])
        return has_complex

    def _prepare_for_torch(self, parameters: list[torch.Tensor], gradients: list[torch.Tensor]) -> None:
        """Does to the gradients of a group what the kernel would have done by itself."""
        given = list(gradients)
        gradients[:] = [gradient.to(own.dtype) for gradient, own in zip(gradients, parameters, strict=True)]
        factor = getattr(self._optimizer, CLIP_FACTOR, None)
        if factor is None or not gradients:
            return
        torch._foreach_mul_(gradients, factor)
        for own, clipped in zip(given, gradients, strict=True):
            if own is not clipped:
                own.copy_(clipped)

    def _has_updated(
        self,
        group: Mapping[str, Any],
        parameters: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
        exp_avgs: Sequence[torch.Tensor],
        exp_avg_sqs: Sequence[torch.Tensor],
        _: Sequence[torch.Tensor],
        steps: list[torch.Tensor],
    ) -> bool:
        """Updates the gathered tensors if the kernel can handle all of them. Returns whether it did."""
        flags = (getattr(self._optimizer, name, None) for name in FLAGS)
        lr, *told = (there(value, parameters[0].device) for value in (group["lr"], *flags))
        averages, numbers = (exp_avgs, exp_avg_sqs), (*steps, lr, *told)
        if not self._kernel.is_served(gradients, parameters, averages, numbers):
            return False
        factors = (lr, *group["betas"], group["eps"], group["weight_decay"], *told)
        torch._foreach_add_(steps, 1)
        self._kernel.serve(parameters, gradients, *averages, steps, *factors)
        if told[0] is not None:
            torch._foreach_sub_(steps, [told[0]] * len(steps))
        return True


def has_kernel(optimizer: Optimizer) -> bool:
    """Whether Kitsune's kernel does the update of this optimizer now."""
    return "_init_group" in vars(optimizer)


def there(value: Any, device: torch.device) -> Any:
    """A tensor moved to the device, as torch's fused update does it; any other value unchanged."""
    return value.to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value


def why_no_kernel(optimizer: Optimizer) -> str | None:
    """Why Kitsune's kernel cannot do the update of this optimizer, or None."""
    kind = type(optimizer)
    if kind is SGD:
        return "Kitsune's kernel for SGD was slower than Inductor's in every shape that was measured"
    if kind not in (Adam, AdamW):
        return f"Kitsune's kernel is for torch.optim.AdamW, and not for {kind.__name__}"
    reasons = (why_not_group(group) or why_not_parameters(group["params"]) for group in optimizer.param_groups)
    return next(filter(None, reasons), None)


def why_not_group(group: Mapping[str, Any]) -> str | None:
    """Why the kernel does not support the hyperparameters of a group, or None."""
    for flag in UNSUPPORTED_FLAGS:
        if group.get(flag):
            return f"Kitsune's kernel does not support {flag}"
    if group["weight_decay"] and not group.get("decoupled_weight_decay"):
        return "Kitsune's kernel decays weights as AdamW does, and not as Adam"
    if any(isinstance(beta, torch.Tensor) for beta in group["betas"]):
        return "Kitsune's kernel does not take betas in tensors"
    return None


def why_not_parameters(parameters: Sequence[torch.Tensor]) -> str | None:
    """Why the kernel cannot update some of the trained parameters, or None."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if any(parameter.dtype != torch.float32 for parameter in trained):
        return "Kitsune's kernel needs parameters in fp32"
    if any(parameter.layout != torch.strided or not is_dense(parameter) for parameter in trained):
        return "Kitsune's kernel needs parameters without gaps in memory"
    return None
