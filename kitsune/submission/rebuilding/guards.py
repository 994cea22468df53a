"""Run-time checks of operators that do not validate their arguments, so that a hostile archive cannot make torch
access memory out of bounds.

Each guard takes the name and the arguments of an operator and returns one of the arguments: it raises ArchiveError when
the argument does not fit the others, or clamps it to the valid range. With torch 2.13 on a CPU each of these operators
crashed or read out of bounds without its guard. Operators that no guard makes safe are not in `ops.py`.
"""

from collections.abc import Callable
from typing import Any, Final

import torch

from kitsune.errors import ArchiveError
from kitsune.submission.format import recurrent

_FAR: Final = 1e4
"""The bound of grid coordinates, where -1 and 1 are the edges of the image. 3.4e38 crashed with reflection."""


def fitting_input(op: str, *args: Any) -> torch.Tensor:
    """The input of a recurrent operator, checked against weights and states."""
    x, hx, params = args[:3]
    weights = [weight.shape for weight in params]
    states = [state.shape for state in ([hx] if isinstance(hx, torch.Tensor) else hx)]
    problem = recurrent.weights_problem(op, args, weights)
    problem = problem or recurrent.state_problem(op, args, weights, x.shape, states)
    if problem:
        raise ArchiveError(f"{op}: {problem}")
    return x


def fitting_value(op: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> Any:
    """The value of an attention, checked to be as long as the key."""
    if min(query.dim(), key.dim(), value.dim()) < 2 or key.shape[-2] != value.shape[-2]:
        raise ArchiveError(f"{op}: value of shape {list(value.shape)} does not fit key of {list(key.shape)}")
    return value


def fitting_norm(op: str, v: torch.Tensor, g: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """The magnitudes of a weight_norm, checked to be one for each row or column; torch checks other dimensions."""
    if dim in (0, v.dim() - 1) and (v.dim() == 0 or g.numel() != v.shape[dim] or g.dtype != v.dtype):
        raise ArchiveError(f"{op}: g of shape {list(g.shape)} does not fit v of shape {list(v.shape)}")
    return g


def known_labels(_: str, scores: torch.Tensor, labels: torch.Tensor, *__: Any, **___: Any) -> torch.Tensor:
    """The labels of a ctc_loss, clamped to the classes."""
    return labels.clamp(0, max(scores.shape[-1] - 1, 0)) if labels.device.type == "cpu" else labels


def known_offsets(_: str, weight: torch.Tensor, __: torch.Tensor, offsets: torch.Tensor, *___: Any) -> torch.Tensor:
    """The offsets of an embedding_bag, clamped to at least 0; torch checks the upper bound."""
    return offsets.clamp(min=0) if weight.device.type == "cpu" else offsets


def samples_in_range(_: str, *args: Any) -> torch.Tensor:
    """The random samples of a fractional_max_pool, clamped to [0, 1]."""
    samples: torch.Tensor = args[3]
    return samples.clamp(0, 1) if samples.device.type == "cpu" else samples


def bounded_grid(_: str, *args: Any) -> torch.Tensor:
    """The grid of a grid_sampler, finite and bounded: with border or reflection padding a NaN becomes an address."""
    grid, padding = args[1], args[3]
    return grid.nan_to_num().clamp(-_FAR, _FAR) if grid.device.type == "cpu" and padding else grid


GUARDS: Final[dict[str, tuple[int, Callable[..., torch.Tensor]]]] = {
    **dict.fromkeys(sorted(recurrent.OPERATORS), (0, fitting_input)),
    "aten.scaled_dot_product_attention.default": (2, fitting_value),
    "aten._weight_norm.default": (1, fitting_norm),
    "aten.ctc_loss.IntList": (1, known_labels),
    "aten.ctc_loss.Tensor": (1, known_labels),
    "aten.embedding_bag.default": (2, known_offsets),
    "aten.embedding_bag.padding_idx": (2, known_offsets),
    "aten.fractional_max_pool2d.default": (3, samples_in_range),
    "aten.fractional_max_pool3d.default": (3, samples_in_range),
    "aten.grid_sampler.default": (1, bounded_grid),
    "aten.grid_sampler_2d.default": (1, bounded_grid),
    "aten.grid_sampler_3d.default": (1, bounded_grid),
}
"""Operator -> the position of the argument that its guard returns, and the guard."""
