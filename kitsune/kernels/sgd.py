"""SGD with momentum (Sutskever et al. 2013) of many parameters in few launches, in place, with the arithmetic of torch.

Launches are those of kitsune/kernels/adamw.py: tuples of tensors, in which each program finds its own.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from kitsune.kernels.adamw import BLOCK, all_laid_as, is_served, launches, locate, pick, put, scalar_of
from kitsune.kernels.dtypes import wide_of
from kitsune.kernels.launch import on_device_of
from kitsune.kernels.rows import warps_of_tile


@torch.no_grad()
def sgd_(
    parameters: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    momentum_buffers: Sequence[torch.Tensor],
    step: torch.Tensor | float,
    lr: torch.Tensor | float,
    momentum: float,
    dampening: float,
    nesterov: bool,
    weight_decay: float,
    found_inf: torch.Tensor | None = None,
    grad_scale: torch.Tensor | None = None,
) -> None:
    """One update of fp32 `parameters` and of their buffers, in place, by fp32, bf16 or fp16 `gradients`.

    `step` is the number of this update, from 1: at 1 a buffer takes the gradient undampened, whatever was in it. With a
    `momentum` of 0 there need be no buffers. `step` and `lr` may be tensors of one element where the parameters are: a
    CUDA graph then follows them. Nothing changes where `found_inf` (one element) is not zero. Gradients count divided
    by `grad_scale` (one element), and stay as they are. What Triton does not reach, or has gaps in memory, or buffers
    laid out in another way than their parameter, goes through `reference`.
    """
    lists = (parameters, gradients, momentum_buffers)
    if not is_served(gradients, parameters, lists[2:] if momentum else (), (step, lr, found_inf, grad_scale)):
        reference(*lists, step, lr, momentum, dampening, nesterov, weight_decay, found_inf, grad_scale)
    elif parameters:
        now, rate = scalar_of(step, parameters[0]), scalar_of(lr, parameters[0])
        update(*map(list, lists), now, rate, momentum, dampening, nesterov, weight_decay, found_inf, grad_scale)


@torch.no_grad()
def reference(
    parameters: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    momentum_buffers: Sequence[torch.Tensor],
    step: torch.Tensor | float,
    lr: torch.Tensor | float,
    momentum: float,
    dampening: float,
    nesterov: bool,
    weight_decay: float,
    found_inf: torch.Tensor | None = None,
    grad_scale: torch.Tensor | None = None,
) -> None:
    """The same in eager torch, computed in fp32 (fp64 for fp64 parameters)."""
    buffers: Sequence[torch.Tensor | None] = momentum_buffers if momentum else [None] * len(parameters)
    for parameter, gradient, buffer in zip(parameters, gradients, buffers, strict=True):
        wide = wide_of(parameter)
        value, slope = parameter.to(wide), gradient.to(wide)
        if grad_scale is not None:
            slope = slope / grad_scale
        slope = slope + value * weight_decay
        if buffer is not None:
            later = buffer.to(wide) * momentum + slope * (1 - dampening)
            pace = torch.where(scalar_of(step, parameter) == 1, slope, later)
            put(pace, buffer, found_inf)
            slope = slope + pace * momentum if nesterov else pace
        put(value - scalar_of(lr, parameter) * slope, parameter, found_inf)


@torch.library.custom_op("kitsune::sgd", mutates_args=("parameters", "momentum_buffers"))
def update(
    parameters: list[torch.Tensor],
    gradients: list[torch.Tensor],
    momentum_buffers: list[torch.Tensor],
    step: torch.Tensor,
    lr: torch.Tensor,
    momentum: float,
    dampening: float,
    nesterov: bool,
    weight_decay: float,
    found_inf: torch.Tensor | None,
    grad_scale: torch.Tensor | None,
) -> None:
    """The same, `step` and `lr` in fp64."""
    laid = all_laid_as(parameters, gradients)
    lists = (parameters, laid, momentum_buffers) if momentum else (parameters, laid)
    factors = (step, lr, found_inf, grad_scale, momentum, 1 - dampening, weight_decay)
    with on_device_of(parameters[0]):
        for grid, (own, given, *state), sizes in launches(*lists):
            buffers = state[0] if state else None
            update_kernel[grid](own, given, buffers, sizes, *factors, nesterov, BLOCK, num_warps=warps_of_tile(BLOCK))


@update.register_fake
def _(
    parameters: list[torch.Tensor], gradients: list[torch.Tensor], momentum_buffers: list[torch.Tensor], *_: object
) -> None:
    return None


@triton.jit
def update_kernel(
    parameters, gradients, buffers, sizes, step, lr, found_inf, grad_scale, momentum, part, weight_decay,
    NESTEROV: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    index, block = locate(sizes, BLOCK)
    start = block.to(tl.int64) * BLOCK
    parameter, gradient, size = pick(parameters, index) + start, pick(gradients, index) + start, pick(sizes, index)
    buffer = None
    if buffers is not None:
        buffer = pick(buffers, index) + start
    if found_inf is not None:
        size = tl.where(tl.load(found_inf) == 0, size, 0)
    inverse = 1.0
    if grad_scale is not None:
        inverse = 1.0 / tl.load(grad_scale).to(tl.float32)
    first, rate, left = tl.load(step) == 1, tl.load(lr).to(tl.float32), size - start
    if left >= BLOCK:  # without a mask, loads are of 16 bytes whatever the size
        move(parameter, gradient, buffer, None, first, rate, inverse, momentum, part, weight_decay, NESTEROV, BLOCK)
    else:
        move(parameter, gradient, buffer, left, first, rate, inverse, momentum, part, weight_decay, NESTEROV, BLOCK)


@triton.jit
def move(
    parameter, gradient, buffer, left, first, rate, inverse, momentum, part, weight_decay,
    NESTEROV: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.arange(0, BLOCK)
    inside = None if left is None else at < left.to(tl.int32)
    value = tl.load(parameter + at, mask=inside)
    slope = tl.load(gradient + at, mask=inside).to(tl.float32) * inverse + value * weight_decay
    if buffer is not None:
        later = tl.load(buffer + at, mask=inside) * momentum + slope * part
        pace = tl.where(first, slope, later)
        tl.store(buffer + at, pace, mask=inside)
        slope = slope + pace * momentum if NESTEROV else pace
    tl.store(parameter + at, value - rate * slope, mask=inside)
