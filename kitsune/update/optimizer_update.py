"""The optimizer's update in a form that can be captured: unscale, clip, step, rescale.

A captured update reads its learning rate from a static tensor that `refresh` fills, so schedulers work. All other
hyperparameters are constants in the captured launches; `refresh` returns False when one has changed.
"""

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from kitsune.update.adamw import has_kernel
from kitsune.update.loss_scaler import LossScaler

ADAMS = (Adam, AdamW)
NOT_BAKED = frozenset({"params", "lr", "initial_lr"})
HYPERPARAMETER_CHANGED = "a hyperparameter other than the learning rate changes between steps"
HOOKED = "a hook on optimizer.step would not run in a replayed graph"


@dataclass(frozen=True, slots=True)
class Baked:
    """Guard on the hyperparameters of a group that its captured launches contain as constants.

    It is checked before every replay, so it compares with few calls, which run in C.
    """

    names: tuple[str, ...]
    values: list[Any]

    @classmethod
    def of(cls, group: Mapping[str, Any]) -> "Baked":
        names = tuple(name for name in group if name not in NOT_BAKED)
        return cls(names, [_value(group[name]) for name in names])

    def holds(self, group: Mapping[str, Any]) -> bool:
        others = sum(map(group.__contains__, NOT_BAKED))
        return len(group) - others == len(self.names) and list(map(group.get, self.names)) == self.values


def _value(value: Any) -> Any:
    """A copy if it is a list, which may be changed in place."""
    return list(value) if isinstance(value, list) else value


class Update:
    """unscale -> clip -> optimizer.step -> rescale.

    Kitsune's kernel multiplies gradients by the factor of a clipping as it reads them, unless `clips_apart`, which a
    step outside of the graph of its gradients needs.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        scaler: LossScaler | None = None,
        clip_grad_norm: float | None = None,
        clips_apart: bool = False,
    ) -> None:
        self.optimizer = optimizer
        self.scaler = scaler
        self.clip_grad_norm = clip_grad_norm
        self.clips_apart = clips_apart
        self._clip_factor: torch.Tensor | None = None  # of the last gradients
        self._given: list[Any] = []
        self._rates: list[torch.Tensor] = []
        self._baked: list[Baked] = []
        self._shown: list[float] = []

    @property
    def reads_half(self) -> bool:
        """Whether gradients of fp32 parameters may be in half precision, with nothing rounded on the way."""
        clips_before = self.clip_grad_norm is not None and self.clips_apart
        return is_updated_by_kernel(self.optimizer) and not clips_before

    def prepare_gradients(self) -> None:
        """Unscales and clips the gradients, or leaves the clipping to `step`. Does not wait for the device."""
        self._clip_factor = None
        if self.scaler is None and self.clip_grad_norm is None:
            return
        gradients = [parameter.grad for parameter in parameters_of(self.optimizer) if parameter.grad is not None]
        if self.scaler is not None:
            self.scaler.unscale(gradients)
        if self.clip_grad_norm is None or not gradients:
            return
        if self.clips_apart or not is_updated_by_kernel(self.optimizer):
            torch.nn.utils.clip_grad_norm_(parameters_of(self.optimizer), self.clip_grad_norm, foreach=True)
        else:
            self._clip_factor = clip_factor(gradients, self.clip_grad_norm)

    def step(self) -> None:
        """Runs the optimizer's step, unless the scaler found an overflow, and the scaler's update.

        If the optimizer cannot skip on the device, the check for an overflow waits for the device.
        """
        factor, self._clip_factor = self._clip_factor, None  # a recorded step must not keep it
        with clipped_by_kernel(self.optimizer, factor):
            if self.scaler is None:
                self.optimizer.step()
                return
            skip_overflows(self.optimizer, self.scaler)
            self.scaler.update()

    def why_not_capturable(self) -> str | None:
        """Why the update must stay outside a graph, or None."""
        kind = type(self.optimizer)
        if kind not in (*ADAMS, SGD):
            return f"{kind.__name__} cannot take its learning rate from a tensor"
        if has_step_hooks(self.optimizer):
            return HOOKED
        fused = all(group.get("fused") for group in self.optimizer.param_groups)
        if kind is SGD and not fused:
            return "SGD takes its learning rate from a tensor only when it is fused"
        if self.scaler is not None and not fused:
            return "skipping an overflowed step on the device needs a fused optimizer"
        return None

    def begin_capture(self) -> None:
        """Puts static learning-rate tensors into the groups; `end_capture` restores the user's values.

        Call it before the capture starts: tensors made during a capture would be in the pool of the graph.
        """
        groups = self.optimizer.param_groups
        device = parameters_of(self.optimizer)[0].device
        self._given = [group["lr"] for group in groups]
        self._shown = [float(rate) for rate in self._given]
        self._baked = [Baked.of(group) for group in groups]
        # The fused CUDA kernels read fp32; the CPU computes in fp64, as it does with a Python number.
        dtype = torch.float32 if device.type == "cuda" else torch.float64
        self._rates = [torch.full((), rate, dtype=dtype, device=device) for rate in self._shown]
        for group, tensor in zip(groups, self._rates, strict=True):
            group["lr"] = tensor

    def end_capture(self) -> None:
        for group, given in zip(self.optimizer.param_groups, self._given, strict=True):
            group["lr"] = given

    @property
    def rates(self) -> list[torch.Tensor]:
        """The static learning-rate tensors of the last capture."""
        return self._rates

    def refresh(self) -> bool:
        """Copies changed learning rates to the device. False if the capture is not valid any more."""
        groups = self.optimizer.param_groups
        if len(groups) != len(self._baked) or has_step_hooks(self.optimizer):
            return False
        for index, group in enumerate(groups):
            if not self._baked[index].holds(group):
                return False
            rate = group["lr"]
            if isinstance(rate, torch.Tensor):
                self._rates[index].copy_(rate, non_blocking=True)
                self._shown[index] = math.nan  # differs from any number, so the next number is copied
            elif rate != self._shown[index]:
                self._rates[index].fill_(rate)
                self._shown[index] = rate
        # A scheduler's wrapper around optimizer.step sets this, and a replay does not call it.
        self.optimizer._opt_called = True  # type: ignore[attr-defined]
        return True


def is_updated_by_kernel(optimizer: Optimizer) -> bool:
    """Whether Kitsune's kernel does the update, and no hook sees the gradients before."""
    return has_kernel(optimizer) and not has_step_hooks(optimizer)


def clip_factor(gradients: list[torch.Tensor], most: float) -> torch.Tensor:
    """What torch.nn.utils.clip_grad_norm_ multiplies gradients by, on the device. Norms are in fp32."""
    dtype = None if all(gradient.dtype == torch.float32 for gradient in gradients) else torch.float32
    norms = torch._foreach_norm(gradients, 2.0, dtype=dtype)
    whole = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))
    return (most / (whole + 1e-6)).clamp(max=1.0)


@contextlib.contextmanager
def clipped_by_kernel(optimizer: Any, factor: torch.Tensor | None) -> Iterator[None]:
    """KernelUpdate multiplies gradients by the factor in the block, as it reads them."""
    if factor is None:
        yield
        return
    optimizer.clip_factor = factor
    try:
        yield
    finally:
        del optimizer.clip_factor


def parameters_of(optimizer: Optimizer) -> list[torch.nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def has_step_hooks(optimizer: Optimizer) -> bool:
    """Whether there are step hooks on this optimizer, or on all optimizers."""
    own = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    return bool(own or _global_optimizer_pre_hooks or _global_optimizer_post_hooks)


def skip_overflows(optimizer: Optimizer, scaler: LossScaler) -> None:
    """Runs optimizer.step unless the scaler found an overflow. Syncs if the optimizer cannot skip on the device."""
    if getattr(optimizer, "_step_supports_amp_scaling", False) and not is_starting(optimizer):
        scaled: Any = optimizer
        scaled.grad_scale, scaled.found_inf = None, scaler.found_inf
        try:
            optimizer.step()
        finally:
            del scaled.grad_scale, scaled.found_inf
    elif not scaler.found_inf.item():
        optimizer.step()


def is_starting(optimizer: Optimizer) -> bool:
    """Whether an SGD lacks a momentum buffer: torch's fused SGD leaves it uninitialised if the step is skipped."""
    if not isinstance(optimizer, SGD):
        return False
    return any(
        parameter.grad is not None and optimizer.state.get(parameter, {}).get("momentum_buffer") is None
        for group in optimizer.param_groups
        if group["momentum"]
        for parameter in group["params"]
    )
