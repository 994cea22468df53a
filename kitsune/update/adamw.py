"""AdamW's update by the kernel of ours, within the optimizer's own step.

`Adam.step` has `_init_group` gather the tensors of a group, with what state is missing made, and gives them to torch's
implementation. Here they are updated as soon as they are gathered, and nothing is left for torch. So all else stays
torch's: hooks, closures, what schedulers and scalers do around a step, state and checkpoints.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch.optim import SGD, Adam, AdamW, Optimizer

from kitsune.base import optional_imports
from kitsune.kernels.layouts import is_dense

#: Flags of a group that ask for another arithmetic.
OTHERS: Final = ("amsgrad", "maximize", "differentiable")


class KernelUpdate:
    """The kernel within an Adam or AdamW whose groups are fused, until `undo`. Raises UnfitError without Triton.

    A group for which the kernel is not made, or whose tensors it does not reach, is torch's to update, step by step.
    Copies and pickles of the optimizer are without it.
    """

    def __init__(self, optimizer: Adam) -> None:
        self._kernel = optional_imports.load("kitsune.kernels.adamw", extra="triton", packages=("triton",))
        self._optimizer = optimizer
        self._gather = partial(type(optimizer)._init_group, optimizer)  # not that of an older step's kernel
        optimizer._init_group = self._update_group  # type: ignore[method-assign]

    def undo(self) -> None:
        vars(self._optimizer).pop("_init_group", None)

    def _update_group(self, group: Mapping[str, Any], *lists: list[torch.Tensor]) -> bool:
        """Takes the place of `_init_group`: fills the lists for torch only where torch is to do the update."""
        has_complex = bool(self._gather(group, *lists))
        if lists[0] and group["fused"] and why_not_group(group) is None and self._has_updated(group, *lists):
            for gathered in lists:
                gathered.clear()
        return has_complex

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
        """Updates what was gathered, if the kernel reaches all of it."""
        flags = (getattr(self._optimizer, name, None) for name in ("found_inf", "grad_scale"))
        lr, found_inf, grad_scale = (there(value, parameters[0].device) for value in (group["lr"], *flags))
        averages, numbers = (exp_avgs, exp_avg_sqs), (*steps, lr, found_inf, grad_scale)
        if not self._kernel.is_served(gradients, parameters, averages, numbers):
            return False
        factors = (lr, *group["betas"], group["eps"], group["weight_decay"], found_inf, grad_scale)
        torch._foreach_add_(steps, 1)
        self._kernel.serve(parameters, gradients, *averages, steps, *factors)
        if found_inf is not None:
            torch._foreach_sub_(steps, [found_inf] * len(steps))
        return True


def there(value: Any, device: torch.device) -> Any:
    """A tensor on the device, where torch's fused update takes it, too; all else as it is."""
    return value.to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value


def why_no_kernel(optimizer: Optimizer) -> str | None:
    """Why no kernel of ours does the update of this optimizer, or None."""
    kind = type(optimizer)
    if kind is SGD:
        return "SGD's kernel of ours was slower than Inductor's in every shape that was measured"
    if kind not in (Adam, AdamW):
        return f"the kernel of ours is for torch.optim.AdamW, and not for {kind.__name__}"
    reasons = (why_not_group(group) or why_not_parameters(group["params"]) for group in optimizer.param_groups)
    return next(filter(None, reasons), None)


def why_not_group(group: Mapping[str, Any]) -> str | None:
    """Why the kernel is not for the hyperparameters of a group, or None."""
    for flag in OTHERS:
        if group.get(flag):
            return f"the kernel of ours does not know {flag}"
    if group["weight_decay"] and not group.get("decoupled_weight_decay"):
        return "the kernel of ours decays weights as AdamW does, and not as Adam"
    if any(isinstance(beta, torch.Tensor) for beta in group["betas"]):
        return "the kernel of ours does not take betas in tensors"
    return None


def why_not_parameters(parameters: Sequence[torch.Tensor]) -> str | None:
    """Why the kernel does not reach some that train, or None."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if any(parameter.dtype != torch.float32 for parameter in trained):
        return "the kernel of ours needs parameters in fp32"
    if any(parameter.layout != torch.strided or not is_dense(parameter) for parameter in trained):
        return "the kernel of ours needs parameters without gaps in memory"
    return None
