"""Attention on a GPU: real shapes, dropout, streams, CUDA graphs, Inductor."""

import pytest
import torch

from kitsune.kernels import attention as kernel
from kitsune.kernels.attention import HALF, attention, is_offered, reference
from tests.kernel_checks import check_current_stream, check_graph

#: The result is rounded once. Gradients are sums of products that are rounded: of the size of the largest element.
TOLERANCES = {torch.bfloat16: 2**-6, torch.float16: 2**-9}
#: (batch, heads, positions, head, causal, dropout)
SHAPES = {
    "ViT-B/16": (8, 12, 197, 64, False, 0.0),
    "ViT-S/32": (8, 6, 50, 64, False, 0.0),
    "BERT": (4, 12, 128, 64, False, 0.1),
    "GPT-2": (4, 12, 256, 64, True, 0.1),
    "GPT-2 of odd length": (4, 12, 131, 64, True, 0.0),
    "one position": (4, 1, 1, 64, True, 0.5),
    "small heads": (2, 3, 100, 16, False, 0.3),
    "heads of 32": (2, 3, 255, 32, True, 0.3),
    "large heads": (2, 8, 200, 128, False, 0.1),
    "large causal heads": (2, 8, 256, 128, True, 0.0),
}


def inputs(device, name, dtype=torch.bfloat16):
    """(a projection (batch, positions, 3 * heads * head), the gradient of the result, heads, causal, dropout)."""
    batch, heads, tokens, head, causal, p = SHAPES[name]
    torch.manual_seed(0)
    packed = torch.randn(batch, tokens, 3 * heads * head, device=device).to(dtype)
    dy = torch.randn(batch, tokens, heads * head, device=device).to(dtype)
    return packed, dy, heads, causal, p


def parts_of(packed, heads):
    return [part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in packed.chunk(3, -1)]


def step(function, packed, dy):
    """(result, gradient of the projection) of function(projection) as (batch, heads, positions, head)."""
    leaf = packed.detach().requires_grad_()
    y = function(leaf).transpose(1, 2).flatten(2)
    return y.detach(), *torch.autograd.grad(y, leaf, dy)


def kept_of(seed, q, p):
    """Which elements a seed keeps: queries of 0 weigh all keys alike, and values tell one key from another."""
    zeros, tokens, found = torch.zeros_like(q), q.shape[2], []
    for first in range(0, tokens, q.shape[3]):
        values = torch.zeros_like(q)
        values[..., first:, :] = torch.eye(tokens - first, q.shape[3], device=q.device)
        found.append(kernel.forward(zeros, zeros, values, seed, 1.0, False, p)[0] != 0)
    return torch.cat(found, -1)[..., :tokens]


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("name", SHAPES)
def test_it_computes_what_the_reference_does(device, name, dtype):
    packed, dy, heads, causal, p = inputs(device, name, dtype)
    q, k, v = parts_of(packed, heads)
    assert is_offered(q, k, v, 1.0, p)
    seed = torch.tensor([5], device=device) if p else None
    kept = kept_of(seed, q, p) if p else None
    scale = q.shape[-1] ** -0.5
    ours = step(lambda x: kernel.forward(*parts_of(x, heads), seed, scale, causal, p)[0], packed, dy)
    exact = step(lambda x: reference(*parts_of(x, heads), None, causal, p, kept), packed.float(), dy.float())
    for one, other in zip(ours, exact, strict=True):
        assert one.dtype == dtype
        slack = TOLERANCES[dtype] * max(1.0, other.abs().max().item())
        torch.testing.assert_close(one.float(), other, rtol=TOLERANCES[dtype], atol=slack)


def test_it_is_as_exact_as_torchs_own(device):
    packed, dy, heads, causal, _ = inputs(device, "ViT-B/16")
    exact = step(lambda x: reference(*parts_of(x, heads), None, causal), packed.float(), dy.float())
    ours, theirs = (
        step(lambda x, function=function: function(*parts_of(x, heads)), packed, dy)
        for function in (attention, torch.nn.functional.scaled_dot_product_attention)
    )
    for one, other, wanted in zip(ours, theirs, exact, strict=True):
        error, own = ((found.float() - wanted).square().mean().sqrt() for found in (one, other))
        assert error < 1.5 * own


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_heads_and_positions_may_lie_in_any_order_and_so_do_those_of_the_results(device, order):
    q, k, v = (torch.empty_permuted((4, 12, 197, 64), (*order, 3), device=device).normal_().half() for _ in range(3))
    leaves = [one.requires_grad_() for one in (q, k, v)]
    y = attention(*leaves)
    gradients = torch.autograd.grad(y, leaves, torch.ones_like(y))
    assert {one.stride() for one in (y, *gradients)} == {q.stride()}
    torch.testing.assert_close(y, reference(q, k, v), rtol=2**-8, atol=2**-8)


def test_memory_may_be_larger_than_an_int32_counts(device):
    wide = torch.zeros(2, 200, 3, 2**21, device=device, dtype=torch.float16)
    wide[..., -64:].normal_()
    q, k, v = (wide[:, :, part, -64:].unsqueeze(1) for part in range(3))
    y = attention(q, k, v)
    torch.testing.assert_close(y, reference(q, k, v), rtol=2**-8, atol=2**-8)


def test_the_same_seed_gives_the_same_bits(device):
    packed, dy, heads, causal, p = inputs(device, "GPT-2")
    seed = torch.tensor([5], device=device)
    first, second = (
        step(lambda x: kernel.forward(*parts_of(x, heads), seed, 0.125, causal, p)[0], packed, dy) for _ in range(2)
    )
    assert all(map(torch.equal, first, second))


def test_it_runs_on_the_stream_that_is_current(device):
    packed, dy, heads, *_ = inputs(device, "ViT-B/16")
    check_current_stream(lambda x, dy: step(lambda x: attention(*parts_of(x, heads)), x, dy), (packed, dy))


def test_a_cuda_graph_replays_it_on_what_its_inputs_hold_then(device):
    packed, dy, heads, *_ = inputs(device, "ViT-B/16")
    new = [one.flip(0).contiguous() for one in (packed, dy)]
    check_graph(lambda x, dy: step(lambda x: attention(*parts_of(x, heads)), x, dy), (packed, dy), new)


def test_every_replay_of_a_captured_step_has_a_mask_of_its_own_and_one_for_both_passes(device):
    """With equal weights and values of 1 the sum of the results is that of what is kept, as the gradient's is."""
    q = torch.zeros(4, 12, 128, 64, device=device, dtype=torch.float16)
    v = torch.ones_like(q).requires_grad_()

    def captured():
        y = attention(q, q, v, dropout_p=0.5)
        return y.detach(), *torch.autograd.grad(y, v, torch.ones_like(y))

    captured()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, dv = captured()
    seen = []
    for _ in range(3):
        graph.replay()
        torch.cuda.synchronize()
        torch.testing.assert_close(y.float().sum((2, 3)), dv.float().sum((2, 3)), rtol=1e-3, atol=0)
        seen.append(y.clone())
    assert not any(torch.equal(seen[one], seen[other]) for one, other in ((0, 1), (0, 2), (1, 2)))


def test_nothing_waits_for_the_device(device):
    packed, dy, heads, causal, p = inputs(device, "BERT")
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(lambda x: attention(*parts_of(x, heads), None, causal, p), packed, dy)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", ["ViT-B/16", "GPT-2 of odd length"])
def test_inductor_keeps_it_whole(device, name):
    packed, dy, heads, causal, _ = inputs(device, name)

    def function(x):
        return 2 * attention(*parts_of(x * 0.5, heads), None, causal)

    compiled = torch.compile(function, fullgraph=True, dynamic=False)
    for ours, wanted in zip(step(compiled, packed, dy), step(function, packed, dy), strict=True):
        torch.testing.assert_close(ours, wanted, rtol=2**-7, atol=2**-7)


def test_a_compiled_model_draws_anew_each_time(device):
    packed, dy, heads, causal, p = inputs(device, "BERT")
    compiled = torch.compile(lambda x: attention(*parts_of(x, heads), None, causal, p), fullgraph=True, dynamic=False)
    first, second = (step(compiled, packed, dy) for _ in range(2))
    assert not torch.equal(first[0], second[0]) and second[1].isfinite().all()
