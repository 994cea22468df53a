"""Attention against its eager reference in fp64: shapes, the diagonal, layouts, dropout."""

import math

import pytest
import torch
import torch.nn.functional as F

from kitsune.kernels import attention as kernel
from kitsune.kernels.attention import Tiles, attention, backward_tiles, fits, forward_tiles, is_offered, reference
from kitsune.kernels.dropout_add import SEEDS

CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor")
#: Powers and gradients of scores are rounded to fp16 between the products.
TOLERANCE = 2e-3
#: Small tiles: a short sequence is then several blocks, and the last may be a smaller one.
BLOCKS = {
    "keys and queries apart": (Tiles(32, 32, 4, 1), Tiles(32, 32, 4, 1, rows=32, columns=32)),
    "blocks of two sizes": (Tiles(16, 32, 4, 1), Tiles(32, 16, 4, 1, rows=16, columns=32)),
    "all keys at once": (Tiles(32, 16, 4, 1), Tiles(16, 64, 4, 1)),
}


def packed_heads(batch, heads, tokens, head, device, dtype=torch.float16):
    """(a projection (batch, tokens, 3 * heads * head), its q, k and v)."""
    packed = torch.randn(batch, tokens, 3 * heads * head, device=device).to(dtype)
    return packed, parts_of(packed, heads)


def parts_of(packed, heads):
    return [part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in packed.chunk(3, -1)]


def seed_of(number, device):
    return torch.tensor([number], device=device)


def kept_of(seed, q, p):
    """Which elements a seed keeps: queries of 0 weigh all keys alike, and values tell one key from another."""
    zeros, tokens, found = torch.zeros_like(q), q.shape[2], []
    for first in range(0, tokens, q.shape[3]):
        values = torch.zeros_like(q)
        values[..., first:, :] = torch.eye(tokens - first, q.shape[3], device=q.device)
        found.append(kernel.forward(zeros, zeros, values, seed, 1.0, False, p)[0] != 0)
    return torch.cat(found, -1)[..., :tokens]


def assert_same(q, k, v, scale=None, causal=False, p=0.0):
    """Result and gradients are those of the reference in fp64, on the same inputs and with the same mask."""
    assert is_offered(q, k, v, 1.0, p)
    seed = seed_of(7, q.device) if p else None
    kept = kept_of(seed, q, p) if p else None
    dy = torch.randn(q.shape, device=q.device).to(q.dtype)
    ours = [one.detach().requires_grad_() for one in (q, k, v)]
    y, _ = kernel.forward(*ours, seed, q.shape[-1] ** -0.5 if scale is None else scale, causal, p)
    exact = [one.detach().double().requires_grad_() for one in (q, k, v)]
    wanted = reference(*exact, scale, causal, p, kept)
    largest = max(one.abs().max().item() for one in (q, k, v)) + 1  # what rounded gradients of scores are multiplied by
    pairs = [(y, wanted)]
    pairs += zip(torch.autograd.grad(y, ours, dy), torch.autograd.grad(wanted, exact, dy.double()), strict=True)
    for one, other in pairs:
        assert one.dtype == q.dtype
        slack = TOLERANCE * (other.abs().max().item() + largest)
        torch.testing.assert_close(one.double(), other, rtol=TOLERANCE, atol=slack)


@pytest.fixture(params=BLOCKS)
def blocks(request, monkeypatch):
    forward, backward = BLOCKS[request.param]
    monkeypatch.setattr(kernel, "forward_tiles", lambda tokens, head: forward)
    monkeypatch.setattr(kernel, "backward_tiles", lambda tokens, head: backward)


@pytest.mark.parametrize(("causal", "p"), [(False, 0.3), (True, 0.0)])
@pytest.mark.parametrize("shape", [(1, 1, 1, 16), (1, 2, 37, 16), (1, 1, 64, 32)])
def test_it_computes_what_the_reference_does(device, blocks, shape, causal, p):
    torch.manual_seed(0)
    assert_same(*packed_heads(*shape, device)[1], causal=causal, p=p)


@pytest.mark.parametrize("shape", [(1, 1, 70, 16), (1, 1, 150, 16), (1, 1, 20, 128)])
def test_its_own_tiles_compute_it_as_well(device, shape):
    torch.manual_seed(0)
    assert_same(*packed_heads(*shape, device)[1], causal=True, p=0.1)
    assert_same(*packed_heads(*shape, device)[1])


def test_a_head_is_covered_by_the_programs_for_all_keys():
    for tokens in range(1, 257):
        for head in kernel.HEADS:
            assert fits(tokens, head)
            tiles = backward_tiles(tokens, head)
            assert tiles.rows or tiles.keys >= tokens
            assert min(*forward_tiles(tokens, head)[:2], *tiles[:2]) >= 16
    assert not fits(257, 64) and not fits(128, 48)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 4.0])
def test_scores_may_be_scaled_otherwise(device, scale):
    torch.manual_seed(0)
    assert_same(*packed_heads(1, 2, 20, 16, device)[1], scale=scale)


def test_large_scores_do_not_overflow(device, blocks):
    torch.manual_seed(0)
    q, k, v = packed_heads(1, 1, 20, 16, device)[1]
    assert_same(q, k * 60, v)
    assert_same(q * 0 - 30, k * 0 + 30, v)  # all scores are low: beyond the last key they are 0


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (2, 0, 1), (1, 0, 2)])
def test_heads_and_positions_may_lie_in_any_order_and_so_do_those_of_the_results(device, order):
    torch.manual_seed(0)
    q, k, v = (torch.empty_permuted((2, 3, 20, 16), (*order, 3), device=device).normal_().half() for _ in range(3))
    assert_same(q, k, v)
    leaves = [one.detach().requires_grad_() for one in (q, k, v)]
    y = attention(*leaves)
    gradients = torch.autograd.grad(y, leaves, torch.ones_like(y))
    assert {one.stride() for one in (y, *gradients)} == {q.stride()}


def test_views_of_a_projection_give_its_gradient_and_a_dense_result(device):
    torch.manual_seed(0)
    packed, _ = packed_heads(2, 3, 20, 16, device)
    ours, exact = packed.clone().requires_grad_(), packed.double().requires_grad_()
    y, wanted = attention(*parts_of(ours, 3)), reference(*parts_of(exact, 3))
    assert y.transpose(1, 2).is_contiguous()
    dy = torch.randn_like(wanted)
    y.backward(dy.half())
    wanted.backward(dy)
    torch.testing.assert_close(ours.grad.double(), exact.grad, rtol=1e-2, atol=5e-3)


def test_rows_with_gaps_that_do_not_fit_are_copied(device):
    torch.manual_seed(0)
    q = torch.randn(1, 2, 9, 33, device=device).half()[..., 1::2]
    k = torch.randn(1, 2, 9, 19, device=device).half()[..., :16]
    assert_same(q, k, torch.randn(1, 2, 9, 16, device=device).half())
    y = attention(q.requires_grad_(), k, k)
    y.sum().backward()  # its gradient is one number with strides of 0


def test_the_share_of_zeros_is_p_and_no_two_rows_share_a_mask(device):
    q = torch.zeros(2, 2, 100, 128, device=device).half()
    for p in (0.1, 0.5):
        kept = kept_of(seed_of(3, device), q, p)
        deviation = math.sqrt(p * (1 - p) / kept.numel())
        assert abs(kept.double().mean().item() - (1 - p)) < 5 * deviation
        assert kept.flatten(0, 2).unique(dim=0).shape[0] == 400
        assert kept.flatten(0, 1).transpose(1, 2).flatten(0, 1).unique(dim=0).shape[0] == 400


def test_a_mask_is_the_same_in_any_tiling_and_of_one_seed(device, monkeypatch):
    q = torch.zeros(1, 2, 37, 64, device=device).half()
    first, other = kept_of(seed_of(1, device), q, 0.4), kept_of(seed_of(2, device), q, 0.4)
    monkeypatch.setattr(kernel, "forward_tiles", lambda *_: Tiles(32, 16, 4, 1))
    assert torch.equal(kept_of(seed_of(1, device), q, 0.4), first) and not torch.equal(first, other)


def test_what_is_kept_is_scaled(device):
    torch.manual_seed(0)
    q = torch.zeros(1, 1, 64, 16, device=device).half()
    v = torch.ones_like(q).requires_grad_()
    y = attention(q, q, v, dropout_p=0.5)
    y.sum().backward()
    torch.testing.assert_close(v.grad.sum().float(), y.detach().sum().float(), rtol=1e-3, atol=0)
    assert 0.8 < y.float().mean().item() < 1.2 and y.unique().numel() > 4


def test_another_call_draws_another_mask_and_a_seed_set_anew_the_same(device):
    q = torch.randn(1, 2, 20, 16, device=device).half()
    torch.manual_seed(0)
    first, second = (attention(q, q, q, dropout_p=0.5) for _ in range(2))
    torch.manual_seed(0)
    assert not torch.equal(first, second) and torch.equal(attention(q, q, q, dropout_p=0.5), first)


def test_no_random_numbers_are_drawn_where_nothing_is_dropped(device):
    q = torch.randn(1, 2, 5, 16, device=device).half()
    torch.manual_seed(0)
    wanted = torch.randint(SEEDS, (1,), device=device)
    torch.manual_seed(0)
    attention(q, q, q)
    assert torch.equal(torch.randint(SEEDS, (1,), device=device), wanted)


def test_the_same_seed_gives_the_same_bits(device):
    q, k, v = packed_heads(1, 2, 37, 16, device)[1]
    given = (seed_of(1, device), 0.25, True, 0.3)
    (y, sums), again = (kernel.forward(q, k, v, *given) for _ in range(2))
    assert torch.equal(y, again[0])
    gradients = (kernel.backward(y, q, k, v, y, sums, *given) for _ in range(2))
    assert all(map(torch.equal, *gradients))


def test_nothing_is_written_beyond_the_end(device, blocks, monkeypatch):
    found = []

    def room(shape, order, **options):
        memory = torch.full((math.prod(shape) + 5000,), 7.0, **options)
        found.append(memory[math.prod(shape) :])
        return memory[: math.prod(shape)].view([shape[one] for one in order]).permute(*map(order.index, range(4)))

    monkeypatch.setattr(torch, "empty_permuted", room)
    q, k, v = packed_heads(1, 2, 37, 16, device)[1]
    y, sums = kernel.forward(q, k, v, None, 0.25, False, 0.0)
    kernel.backward(y, q, k, v, y, sums, None, 0.25, False, 0.0)
    assert len(found) == 4 and all((memory == 7).all() for memory in found)


def test_what_triton_does_not_reach_is_computed_all_the_same(device):
    q = torch.randn(1, 2, 5, 16, device=device).half()
    long, odd = torch.randn(1, 1, 1025, 16, device=device).half(), torch.randn(1, 1, 5, 24, device=device).half()
    few = torch.randn(1, 2, 3, 16, device=device).half()
    empty = torch.randn(0, 2, 5, 16, device=device).half()
    for given in ((q.float(),) * 3, (long,) * 3, (odd,) * 3, (q, few, few), (empty,) * 3, (q[0],) * 3):
        assert not is_offered(*given, 1.0, 0.0)
        assert torch.equal(attention(*given, 0.5), F.scaled_dot_product_attention(*given, scale=0.5))
    assert torch.equal(attention(q, q, q, -0.5), F.scaled_dot_product_attention(q, q, q, scale=-0.5))


def test_the_reference_is_torchs_attention(device):
    q, k, v = (torch.randn(2, 3, 7, 8, device=device) for _ in range(3))
    for causal in (False, True):
        wanted = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=0.3)
        torch.testing.assert_close(reference(q, k, v, 0.3, causal), wanted)
    torch.manual_seed(0)
    assert abs(reference(q, k, torch.ones_like(v), dropout_p=0.5).mean().item() - 1) < 0.2


def test_the_operators_are_what_torch_asks_of_them(device):
    q, k, v = (one.detach().requires_grad_() for one in packed_heads(1, 2, 5, 16, device)[1])
    for seed, p in ((None, 0.0), (seed_of(1, device), 0.5)):
        torch.library.opcheck(kernel.forward, (q, k, v, seed, 0.25, True, p), test_utils=CHECKS)
        y, sums = kernel.forward(q.detach(), k.detach(), v.detach(), seed, 0.25, True, p)
        given = (y, q.detach(), k.detach(), v.detach(), y, sums, seed, 0.25, True, p)
        torch.library.opcheck(kernel.backward, given, test_utils=CHECKS)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_model_keeps_it_whole_and_draws_anew_each_time(device):
    packed = torch.randn(1, 20, 3 * 2 * 16, device=device).half().requires_grad_()
    compiled = torch.compile(
        lambda x: attention(*parts_of(x, 2), dropout_p=0.5), fullgraph=True, backend="aot_eager", dynamic=False
    )
    first, second = compiled(packed), compiled(packed)
    assert not torch.equal(first, second)
    (gradient,) = torch.autograd.grad(second.sum(), packed)
    assert gradient.isfinite().all() and gradient.any()
