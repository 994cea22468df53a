"""What kernels that multiply tiles share."""

import torch
import triton
import triton.language as tl

from kitsune.kernels.products import halves_of, joined


@triton.jit
def swap_halves(x, y, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    at = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    left, right = halves_of(tl.load(x + at))
    tl.store(y + at, joined(right, left))


def test_halves_are_joined_side_by_side(device):
    x = torch.arange(64.0, device=device).view(4, 16)
    y = torch.empty_like(x)
    swap_halves[(1,)](x, y, 4, 16)
    assert torch.equal(y, torch.cat((x[:, 8:], x[:, :8]), dim=1))
