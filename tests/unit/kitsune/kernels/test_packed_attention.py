"""Attention over one projection: the bits of attention over its parts, with one gradient for the whole of it."""

import pytest
import torch
import torch.nn.functional as F

from kitsune.kernels import packed_attention as kernel
from kitsune.kernels.attention import attention
from kitsune.kernels.packed_attention import packed_attention, parts_of

CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor")


def draw(device, *shape, dtype=torch.float16):
    torch.manual_seed(0)
    return torch.randn(*shape, device=device).to(dtype).requires_grad_()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("shape", [(1, 1, 3, 1, 16), (2, 5, 3, 3, 16), (1, 37, 3, 2, 16)])
def test_result_and_gradient_are_those_of_the_parts(device, shape, causal, p):
    qkv = draw(device, *shape)
    torch.manual_seed(1)
    whole = packed_attention(qkv, 0.3, causal, p)
    torch.manual_seed(1)
    parts = attention(*parts_of(qkv), 0.3, causal, p)
    dy = torch.randn_like(whole)
    assert torch.equal(whole, parts)
    assert whole.stride() == parts.stride()
    one, other = (torch.autograd.grad(y, qkv, dy)[0] for y in (whole, parts))
    assert torch.equal(one, other)
    assert one.is_contiguous()


def test_a_projection_with_gaps_is_copied(device):
    qkv = draw(device, 2, 8, 3, 2, 16)
    gaps = draw(device, 2, 8, 3, 2, 32)[..., :16]
    gaps.data.copy_(qkv)
    assert torch.equal(packed_attention(gaps), packed_attention(qkv))


def test_where_the_kernel_does_not_reach_torch_computes_it(device):
    qkv = draw(device, 1, 4, 3, 2, 12)
    wanted = F.scaled_dot_product_attention(*parts_of(qkv))
    torch.testing.assert_close(packed_attention(qkv), wanted)


def test_the_operators_are_registered_as_torch_expects(device):
    qkv = draw(device, 1, 5, 3, 2, 16)
    torch.library.opcheck(kernel.forward, (qkv, torch.tensor([3], device=device), 0.25, True, 0.2), test_utils=CHECKS)
    given = qkv.detach()
    out, sums = kernel.forward(given, None, 0.25, False, 0.0)
    torch.library.opcheck(
        kernel.backward, (out, given, out, sums, None, 0.25, False, 0.0), test_utils=("test_schema", "test_faketensor")
    )
