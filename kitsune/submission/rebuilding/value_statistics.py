"""Value statistics of tensors, which an archive holds instead of values, and sampling from them.

No value of a tensor can be read from its statistics: the bounds of a range are rounded outwards to powers of two, and
for tensors with few elements mean and standard deviation are rounded to powers of two as well.
"""

import math
import sys
from collections.abc import Callable
from typing import Final, Literal

import torch

from kitsune.submission.format.document import Integers, Normal
from kitsune.submission.format.limits import MAX_SAMPLE
from kitsune.submission.rebuilding.decode import DTYPES, MEMORY_FORMATS

FEW: Final = 64  # elements; the mean of fewer would reveal their values
DIGITS: Final = 3  # significant digits of mean and deviation of larger tensors


def spread_of(tensor: torch.Tensor) -> Normal | Integers:
    """Mean, deviation and range of floats (without non-finite values); range, marker and order of integers."""
    values = tensor.detach()
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    if values.is_floating_point():
        return _normal(values if values.dtype == torch.float64 else values.float())
    return _integers(values.long())


def _normal(values: torch.Tensor) -> Normal:
    if values.numel() == 0:
        return Normal(kind="normal", mean=0.0, std=0.0, low=0.0, high=0.0)
    low, high = (float(value) for value in torch.aminmax(values))
    if not (abs(low) < float("inf") and abs(high) < float("inf")):
        return _normal(values[values.isfinite()])
    size = 1.0
    if values.dtype == torch.float64:  # the sum of large values may overflow
        size = max(abs(low), abs(high)) or 1.0
        values = values / size
    std, mean = (float(value) * size for value in torch.std_mean(values, correction=0))
    coarse = nearest_power if values.numel() < FEW else significant
    low, high = outwards(low, math.floor, math.ceil), outwards(high, math.ceil, math.floor)
    return Normal(kind="normal", mean=coarse(mean), std=coarse(std), low=low, high=high)


def significant(value: float) -> float:
    """Rounds to DIGITS significant digits. Values that overflow become the largest double."""
    rounded = float(f"{value:.{DIGITS - 1}e}")
    return rounded if math.isfinite(rounded) else math.copysign(sys.float_info.max, value)


def nearest_power(value: float) -> float:
    """The power of two whose exponent is nearest, with the sign of the value; 0 for 0."""
    return outwards(value, round, round)


def outwards(value: float, if_positive: Callable[[float], int], if_negative: Callable[[float], int]) -> float:
    """A power of two with the sign of the value, whose exponent is rounded by the function for that sign."""
    if not value:
        return 0.0
    size = min(abs(value), sys.float_info.max)
    exponent = (if_positive if value > 0 else if_negative)(math.log2(size))
    return math.copysign(2.0 ** min(exponent, sys.float_info.max_exp - 1), value)


def _integers(values: torch.Tensor) -> Integers:
    if values.numel() == 0:
        return Integers(kind="integers", low=0, high=0)
    low, high = (max(-MAX_SAMPLE, min(MAX_SAMPLE, int(value))) for value in torch.aminmax(values))
    order: Literal["any", "sorted", "prefix"]
    if (low, high) == (0, 1):
        order = "prefix" if _is_prefix_mask(values) else "any"
        return Integers(kind="integers", low=0, high=0, marker=1, share=float(values.double().mean()), order=order)
    if low < 0 <= high:
        kept = values[values >= 0]
        if bool((values[values < 0] == low).all()):
            share = 1 - kept.numel() / values.numel()
            return Integers(kind="integers", low=int(kept.min()), high=high, marker=low, share=share)
    order = "sorted" if _is_sorted(values) and low < high else "any"
    return Integers(kind="integers", low=low, high=high, order=order)


def _is_prefix_mask(values: torch.Tensor) -> bool:
    """Whether every row is ones followed by zeros, as in the mask of padded sequences."""
    if values.dim() < 2 or values.shape[-1] < 2:
        return False
    return bool((values[..., 0] == 1).all() and (values[..., 1:] <= values[..., :-1]).all())


def _is_sorted(values: torch.Tensor) -> bool:
    """Whether the last dimension never decreases, as for positions, offsets or batch indices of graph nodes."""
    return values.dim() > 0 and values.shape[-1] > 2 and bool((values[..., 1:] >= values[..., :-1]).all())


def sample(
    spread: Normal | Integers, shape: tuple[int, ...], dtype: str, layout: str, generator: torch.Generator
) -> torch.Tensor:
    """A CPU tensor drawn from the statistics; equal generator states give equal tensors."""
    kind = DTYPES[dtype]
    if isinstance(spread, Integers):
        values = _sampled_integers(spread, shape, generator)
    elif kind.is_complex:
        values = torch.view_as_complex(_sampled_floats(spread, (*shape, 2), kind.to_real(), generator))
    else:
        values = _sampled_floats(spread, shape, kind, generator)
    return values.to(kind).contiguous(memory_format=MEMORY_FORMATS[layout])


def _sampled_floats(
    spread: Normal, shape: tuple[int, ...], kind: torch.dtype, generator: torch.Generator
) -> torch.Tensor:
    wide, most = torch.float64 if kind == torch.float64 else torch.float32, torch.finfo(kind).max
    values = torch.randn(shape, generator=generator, dtype=wide)
    # Rounded outwards, the -3.4e38 of attention masks no longer fits in float32.
    low, high = (max(-most, min(most, end)) for end in (spread.low, spread.high))
    return values.mul_(spread.std).add_(spread.mean).clamp_(low, high)


def _sampled_integers(spread: Integers, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    if spread.order == "prefix" and len(shape) > 1:
        return _sampled_prefixes(spread.share, shape, generator)
    values = torch.randint(spread.low, spread.high + 1, shape, generator=generator)
    if spread.marker is not None:
        values[torch.rand(shape, generator=generator) < spread.share] = spread.marker
    if spread.order == "sorted" and shape and shape[-1] > 0:
        values = values.sort(dim=-1).values
        values[..., 0], values[..., -1] = spread.low, spread.high
    return values


def _sampled_prefixes(share: float, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Rows of ones followed by zeros, with lengths uniformly distributed around the share."""
    width = shape[-1]
    reach = min(share, 1 - share)
    lengths = (share - reach + 2 * reach * torch.rand((*shape[:-1], 1), generator=generator)) * width
    return (torch.arange(width) < lengths.round().clamp(1, width)).long()
