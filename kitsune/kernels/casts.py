"""Copies of many tensors in another dtype by few launches, as torch rounds them.

A launch takes tuples of tensors, as that of adamw.py. For 32 MiB of fp32 torch's own kernel has 128 blocks of threads,
which load one element at a time: fewer blocks than an H200 has multiprocessors.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

import torch
import triton
import triton.language as tl

from kitsune.kernels.launch import on_device_of, runs_in_triton
from kitsune.kernels.layouts import is_dense

#: Pairs of a launch. The last launch is padded to as many, so that no second kernel is compiled for it.
MOST = 32
#: Elements that a program copies: 8 MiB of fp32 are 512 programs.
BLOCK = 4096
WARPS = 4
#: Elements that a program takes at once: four for each thread, so that a warp moves neighbouring bytes in either dtype.
#: With the 16 bytes of a narrow dtype, threads would exchange elements before they store wide ones.
PART = 4 * 32 * WARPS
#: Bytes that the widest loads and stores are aligned to.
ALIGNED = 16

Pair = tuple[torch.Tensor, torch.Tensor]
Launch = tuple[tuple[int], tuple[torch.Tensor, ...], tuple[torch.Tensor, ...], tuple[int, ...], tuple[int, ...]]


@torch.no_grad()
def cast_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copies each source into the target of the same shape, in place and without gradients.

    Dtypes are fp32, bf16 or fp16, in any mix; values are rounded to nearest even. Targets must not overlap with each
    other or with sources. Falls back to `reference` where Triton cannot run on all of them, and for a pair that has
    gaps in memory, different strides or two devices. Raises ValueError when the lists differ in length.
    """
    pairs = list(zip(targets, sources, strict=True))
    can_run = runs_in_triton(*targets, *sources)
    served = [can_run and is_served(target, source) for target, source in pairs]
    ours = [pair for pair, is_ours in zip(pairs, served, strict=True) if is_ours]
    others = [pair for pair, is_ours in zip(pairs, served, strict=True) if not is_ours]
    if ours:
        cast(*map(list, zip(*ours, strict=True)))
    if others:
        reference(*map(list, zip(*others, strict=True)))


@torch.no_grad()
def reference(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """`cast_all` in eager torch, for any dtypes and layouts."""
    if targets:
        torch._foreach_copy_(list(targets), list(sources))


@torch.library.custom_op("kitsune::cast_all", mutates_args=("targets",))
def cast(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """The operator behind `cast_all`, for pairs of which `is_served` holds."""
    for grid, ours, theirs, sizes, begins in launches(zip(targets, sources, strict=True)):
        with on_device_of(ours[0]):
            cast_kernel[grid](ours, theirs, sizes, begins, BLOCK, PART, num_warps=WARPS)


@cast.register_fake
def _(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    return None


def is_served(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether the kernel supports the pair: on one device, of the same shape and strides, dense."""
    return (
        target.device == source.device
        and target.shape == source.shape
        and target.stride() == source.stride()
        and is_dense(target)
    )


def launches(pairs: Iterable[Pair]) -> Iterator[Launch]:
    """(grid, targets, sources, their sizes, first programs of all but the first pair) of every launch.

    Numbers are odd, by `odd`. A launch has one device and one dtype on either side, and all of its tensors are aligned
    or not: one that is not would take the wide loads from the others.
    """
    alike: dict[tuple[object, ...], list[Pair]] = {}
    for target, source in pairs:
        if target.numel():
            is_aligned = (target.data_ptr() | source.data_ptr()) % ALIGNED == 0
            alike.setdefault((target.device, target.dtype, source.dtype, is_aligned), []).append((target, source))
    for group in alike.values():
        for start in range(0, len(group), MOST):
            yield launch_of(group[start : start + MOST])


def launch_of(pairs: Sequence[Pair]) -> Launch:
    """The launch for up to MOST pairs. No program gets to those that it is filled up with."""
    sizes = [target.numel() for target, _ in pairs]
    ends = list(accumulate(-(-size // BLOCK) for size in sizes))
    none = MOST - len(pairs)
    targets, sources = zip(*pairs, *[pairs[0]] * none, strict=True)
    begins = [*ends, *ends[-1:] * none][: MOST - 1]
    return (ends[-1],), targets, sources, tuple(map(odd, [*sizes, *sizes[:1] * none])), tuple(map(odd, begins))


def odd(number: int) -> int:
    """What the kernel gets for a number from 1 on: for 1, and for multiples of 16, Triton would compile another one."""
    return 2 * number + 1


@triton.jit
def cast_kernel(targets, sources, sizes, begins, BLOCK: tl.constexpr, PART: tl.constexpr):
    here = 2 * tl.program_id(0) + 1
    target, source, size, begin = targets[0], sources[0], sizes[0], 1
    for at in tl.static_range(1, len(sizes)):
        is_behind = here >= begins[at - 1]
        target, source = tl.where(is_behind, targets[at], target), tl.where(is_behind, sources[at], source)
        size, begin = tl.where(is_behind, sizes[at], size), tl.where(is_behind, begins[at - 1], begin)
    start = ((here - begin) >> 1).to(tl.int64) * BLOCK
    left = (size >> 1) - start
    if left >= BLOCK:  # without a mask, loads take 16 bytes for any size
        move(target + start, source + start, None, BLOCK, PART)
    else:
        move(target + start, source + start, left.to(tl.int32), BLOCK, PART)


@triton.jit
def move(target, source, left, BLOCK: tl.constexpr, PART: tl.constexpr):
    values = tl.tuple(())
    for first in tl.static_range(0, BLOCK, PART):  # all loads come first: none may pass a store
        at = first + tl.arange(0, PART)
        values += (tl.load(source + at, mask=None if left is None else at < left),)
    for part in tl.static_range(BLOCK // PART):
        at = part * PART + tl.arange(0, PART)
        value = values[part].to(target.dtype.element_ty)
        tl.store(target + at, value, mask=None if left is None else at < left)
