"""AdamW (Loshchilov, Hutter 2019) for many parameters in few launches, in place, with the same arithmetic as torch.

A launch takes tuples of tensors directly, and no table of pointers, which a CUDA graph could not update. Each program
finds its tensor by counting blocks.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from kitsune.kernels.dtypes import DTYPES, wide_of
from kitsune.kernels.launch import on_device_of, runs_in_triton
from kitsune.kernels.layouts import has_layout_of, in_layout_of, is_dense
from kitsune.kernels.rows import warps_of_tile

#: Tensors of a launch. The last launch is padded to as many, so that no second kernel is compiled for it.
MOST = 32
#: Elements that a program updates: enough to make finding its tensor cheap in comparison.
BLOCK = 4096


@torch.no_grad()
def adamw_(
    parameters: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    exp_avgs: Sequence[torch.Tensor],
    exp_avg_sqs: Sequence[torch.Tensor],
    step: Sequence[torch.Tensor] | torch.Tensor | float,
    lr: torch.Tensor | float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    found_inf: torch.Tensor | None = None,
    grad_scale: torch.Tensor | None = None,
    clip_factor: torch.Tensor | None = None,
) -> None:
    """One update of fp32 `parameters` and their averages, in place, with fp32, bf16 or fp16 `gradients`.

    `step` is the number of this update, from 1, or one for each parameter. It and `lr` may be tensors of one element on
    the device of the parameters: a CUDA graph then follows their changes. If `found_inf` (one element) is not zero,
    nothing changes. Gradients are divided by `grad_scale` (one element), in place, as in torch's fused update, and
    multiplied by `clip_factor` (one element), in place too; the update takes them before they are rounded to their
    dtype. Falls back to `reference` where Triton cannot run, for tensors with gaps in memory, and for averages with
    another layout than their parameter.
    """
    lists = (parameters, gradients, exp_avgs, exp_avg_sqs)
    numbers = (*(step if isinstance(step, Sequence) else (step,)), lr, found_inf, grad_scale, clip_factor)
    if not is_served(gradients, parameters, (exp_avgs, exp_avg_sqs), numbers):
        reference(*lists, step, lr, beta1, beta2, eps, weight_decay, found_inf, grad_scale, clip_factor)
    elif parameters:
        serve(*lists, step, lr, beta1, beta2, eps, weight_decay, found_inf, grad_scale, clip_factor)


def serve(
    parameters: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    exp_avgs: Sequence[torch.Tensor],
    exp_avg_sqs: Sequence[torch.Tensor],
    step: Sequence[torch.Tensor] | torch.Tensor | float,
    lr: torch.Tensor | float,
    *factors: Any,
) -> None:
    """`adamw_` without the check of `is_served`, which for 200 parameters takes as long as everything else here.

    Steps and learning rate are cast to one dtype: for another one Triton would compile another kernel, which fails
    during a graph capture.
    """
    lists = (parameters, gradients, exp_avgs, exp_avg_sqs)
    steps, rate = steps_of(step, parameters, torch.float32), scalar_of(lr, parameters[0], torch.float32)
    update(*map(list, lists), steps, rate, *factors)


@torch.no_grad()
def reference(
    parameters: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    exp_avgs: Sequence[torch.Tensor],
    exp_avg_sqs: Sequence[torch.Tensor],
    step: Sequence[torch.Tensor] | torch.Tensor | float,
    lr: torch.Tensor | float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    found_inf: torch.Tensor | None = None,
    grad_scale: torch.Tensor | None = None,
    clip_factor: torch.Tensor | None = None,
) -> None:
    """`adamw_` in eager torch, computed in fp32 (fp64 for fp64 parameters)."""
    steps = steps_of(step, parameters, torch.float64)
    for *own, at_step in zip(parameters, gradients, exp_avgs, exp_avg_sqs, steps, strict=True):
        parameter, gradient, mean, square = (one.to(wide_of(own[0])) for one in own)
        rate = scalar_of(lr, parameter)
        if grad_scale is not None or clip_factor is not None:
            gradient = gradient if grad_scale is None else gradient / grad_scale
            gradient = gradient if clip_factor is None else gradient * clip_factor
            put(gradient, own[1], found_inf)
        mean = mean.lerp(gradient, 1 - beta1)
        square = square * beta2 + gradient * gradient * (1 - beta2)
        root = (square / (1 - beta2**at_step)).sqrt()
        moved = parameter * (1 - rate * weight_decay) - rate / (1 - beta1**at_step) * mean / (root + eps)
        for old, new in zip((own[0], *own[2:]), (moved, mean, square), strict=True):
            put(new, old, found_inf)


@torch.library.custom_op("kitsune::adamw", mutates_args=("parameters", "gradients", "exp_avgs", "exp_avg_sqs"))
def update(
    parameters: list[torch.Tensor],
    gradients: list[torch.Tensor],
    exp_avgs: list[torch.Tensor],
    exp_avg_sqs: list[torch.Tensor],
    steps: list[torch.Tensor],
    lr: torch.Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    found_inf: torch.Tensor | None,
    grad_scale: torch.Tensor | None,
    clip_factor: torch.Tensor | None = None,
) -> None:
    """The operator behind `adamw_`, with a step for each parameter; steps and `lr` in fp32."""
    # In fp64: in fp32, 1 - 0.999 has a relative error of 1e-5.
    flags = (lr, found_inf, grad_scale, clip_factor)
    factors = (1 - beta1, beta2, 1 - beta2, logarithm(beta1), logarithm(beta2), eps, weight_decay)
    laid = all_in_layout_of(parameters, gradients)
    with on_device_of(parameters[0]):
        for grid, tensors, sizes in launches(parameters, laid, exp_avgs, exp_avg_sqs, steps):
            update_kernel[grid](*tensors, sizes, *flags, *factors, BLOCK, num_warps=warps_of_tile(BLOCK))
    if grad_scale is not None or clip_factor is not None:
        for gradient, divided in zip(gradients, laid, strict=True):
            if divided is not gradient:
                gradient.copy_(divided)


@update.register_fake
def _(
    parameters: list[torch.Tensor],
    gradients: list[torch.Tensor],
    exp_avgs: list[torch.Tensor],
    exp_avg_sqs: list[torch.Tensor],
    *_: object,
) -> None:
    return None


def is_served(
    gradients: Sequence[torch.Tensor],
    parameters: Sequence[torch.Tensor],
    states: Sequence[Sequence[torch.Tensor]],
    single: Sequence[torch.Tensor | float | None],
) -> bool:
    """Whether the kernel supports these: on one device; parameters and states in fp32, dense, of equal layout."""
    ours = [*parameters, *(tensor for state in states for tensor in state)]
    others = [one for one in single if isinstance(one, torch.Tensor)]
    pairs = [pair for state in states for pair in zip(parameters, state, strict=True)]
    return (
        runs_in_triton(*ours, *gradients)
        and len({tensor.device for tensor in (*ours, *gradients, *others)}) < 2
        and all(tensor.dtype == torch.float32 for tensor in ours)
        and all(map(is_dense, parameters))
        and all(has_layout_of(parameter, state) for parameter, state in pairs)
    )


def steps_of(
    step: Sequence[torch.Tensor] | torch.Tensor | float, parameters: Sequence[torch.Tensor], dtype: torch.dtype
) -> list[torch.Tensor]:
    """A step for each parameter."""
    if isinstance(step, Sequence):
        return [scalar_of(own, parameter, dtype) for own, parameter in zip(step, parameters, strict=True)]
    return [scalar_of(step, parameters[0], dtype)] * len(parameters) if parameters else []


def scalar_of(value: torch.Tensor | float, like: torch.Tensor, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """A 0-d tensor of the value; a number is put on the device of `like`."""
    if isinstance(value, torch.Tensor):
        return value if value.dtype == dtype and not value.dim() else value.reshape(()).to(dtype)
    return torch.full((), value, dtype=dtype, device=like.device)


def put(new: torch.Tensor, old: torch.Tensor, found_inf: torch.Tensor | None) -> None:
    """Writes `new` to `old`, unless `found_inf` is set."""
    old.copy_(new if found_inf is None else torch.where(found_inf.reshape(()) == 0, new, old.to(new.dtype)))


def logarithm(beta: float) -> float:
    return math.log(beta) if beta else -math.inf


def all_in_layout_of(parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The gradients with the memory layouts of their parameters."""
    return [in_layout_of(parameter, gradient) for parameter, gradient in zip(parameters, gradients, strict=True)]


Launch = tuple[tuple[int], tuple[tuple[torch.Tensor, ...], ...], tuple[int, ...]]


def launches(
    parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], *states: Sequence[torch.Tensor]
) -> Iterator[Launch]:
    """(grid, a tuple of tensors for each list, their sizes) of every launch. Each has gradients of one dtype."""
    rows = [row for row in zip(parameters, gradients, *states, strict=True) if row[0].numel()]
    for dtype in DTYPES:
        alike = [row for row in rows if row[1].dtype == dtype]
        for start in range(0, len(alike), MOST):
            some = alike[start : start + MOST]
            none = MOST - len(some)
            sizes = (*(row[0].numel() for row in some), *[0] * none)
            grid = (sum(-(-size // BLOCK) for size in sizes),)  # not triton.cdiv, which takes the host 3 us a call
            yield grid, tuple(zip(*some, *[some[0]] * none, strict=True)), sizes


@triton.jit
def locate(sizes, BLOCK: tl.constexpr):
    """(index of the tensor, index of the block in it) of this program."""
    program = tl.program_id(0)
    index, first, begin = 0, 0, 0
    for at in tl.static_range(len(sizes)):
        here = program >= begin
        index = tl.where(here, at, index)
        first = tl.where(here, begin, first)
        begin += tl.cdiv(sizes[at], BLOCK)
    return index, program - first


@triton.jit
def pick(items, index):
    item = items[0]
    for at in tl.static_range(1, len(items)):
        item = tl.where(index == at, items[at], item)
    return item


@triton.jit
def update_kernel(
    parameters, gradients, exp_avgs, exp_avg_sqs, steps, sizes, lr, found_inf, grad_scale, clip_factor,
    part1, beta2, part2, log_beta1, log_beta2, eps, weight_decay, BLOCK: tl.constexpr,
):  # fmt: skip
    index, block = locate(sizes, BLOCK)
    parameter, gradient = pick(parameters, index), pick(gradients, index)
    average, square, size = pick(exp_avgs, index), pick(exp_avg_sqs, index), pick(sizes, index)
    if found_inf is not None:
        size = tl.where(tl.load(found_inf) == 0, size, 0)
    factor = None
    if grad_scale is not None:
        factor = 1.0 / tl.load(grad_scale).to(tl.float32)
    if clip_factor is not None:
        clip = tl.load(clip_factor).to(tl.float32)
        factor = clip if factor is None else factor * clip
    # In fp64: with fp32 powers of beta2, the first steps would have a relative error of 1e-5.
    now, rate = tl.load(pick(steps, index)).to(tl.float64), tl.load(lr).to(tl.float64)
    keep = (1.0 - rate * weight_decay).to(tl.float32)
    length = (rate / (1.0 - tl.exp(now * log_beta1))).to(tl.float32)
    root = (1.0 / tl.sqrt(1.0 - tl.exp(now * log_beta2))).to(tl.float32)
    start = block.to(tl.int64) * BLOCK
    left = size - start
    parameter, gradient, average, square = parameter + start, gradient + start, average + start, square + start
    if left >= BLOCK:  # without a mask, loads take 16 bytes for any size
        move(parameter, gradient, average, square, None, factor, part1, beta2, part2, keep, length, root, eps, BLOCK)
    else:
        move(parameter, gradient, average, square, left, factor, part1, beta2, part2, keep, length, root, eps, BLOCK)


@triton.jit
def move(
    parameter, gradient, average, square, left, factor, part1, beta2, part2, keep, length, root, eps,
    BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.arange(0, BLOCK)
    inside = None if left is None else at < left.to(tl.int32)
    slope = tl.load(gradient + at, mask=inside).to(tl.float32)
    if factor is not None:
        slope *= factor
        tl.store(gradient + at, slope, mask=inside)
    mean, spread = tl.load(average + at, mask=inside), tl.load(square + at, mask=inside)
    mean += (slope - mean) * part1
    spread = spread * beta2 + slope * slope * part2
    value = tl.load(parameter + at, mask=inside) * keep - length * mean / (tl.sqrt(spread) * root + eps)
    tl.store(parameter + at, value, mask=inside)
    tl.store(average + at, mean, mask=inside)
    tl.store(square + at, spread, mask=inside)
