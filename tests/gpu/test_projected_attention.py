"""Attention with the layers before it, as Inductor compiles it: three of one input, and torch's own encoder layer."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kitsune.fusion import FusionEngine, calls

TOLERANCE = 2**-6
#: (batch, heads, tokens, elements of a head)
BERT = (4, 12, 128, 64)


def drawn(device, *sizes):
    return torch.randn(sizes, device=device).to(torch.bfloat16)


def step(function, leaves, slope):
    """[the result, gradients of all leaves]."""
    leaves = [one.detach().requires_grad_() for one in leaves]
    y = function(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, slope.to(y.dtype))]


def assert_close(found, theirs, exact):
    """As near to fp64 as torch is, or nearly so."""
    for one, other, right in zip(found, theirs, exact, strict=True):
        ours, torchs = (((each.double() - right).norm() / right.norm()).item() for each in (one, other))
        assert ours < max(1.2 * torchs, TOLERANCE)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("causal", [False, True])
def test_attention_with_its_projections(device, causal):
    torch.manual_seed(0)
    batch, heads, tokens, head = BERT
    width = heads * head
    layers = [*(drawn(device, width, width) / width**0.5 for _ in range(3)), *(drawn(device, width) for _ in range(3))]
    leaves, slope = [drawn(device, batch, tokens, width), *layers], drawn(device, *BERT)

    def ours(x, *layers):
        return calls.projected_attention(x, *layers, BERT, None, causal, 0.0, x.dtype)

    def torchs(x, *layers):
        parts = (F.linear(x, weight, bias) for weight, bias in zip(layers[:3], layers[3:], strict=True))
        q, k, v = (part.view(batch, tokens, heads, head).transpose(1, 2) for part in parts)
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    found = step(torch.compile(ours, fullgraph=True), leaves, slope)
    theirs, exact = step(torchs, leaves, slope), step(torchs, [one.double() for one in leaves], slope)
    keys_bias = len(found) - 2  # its gradient is zero but for rounding
    assert_close(*([one for at, one in enumerate(each) if at != keys_bias] for each in (found, theirs, exact)))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("batch_first", [True, False])
def test_torchs_own_encoder_layer(device, batch_first):
    torch.manual_seed(0)
    plain = nn.TransformerEncoderLayer(256, 4, 512, 0.0, batch_first=batch_first).to(device)
    engine = FusionEngine(clock=lambda *_: (2.0, 1.0))  # every kernel is found to be faster
    ours = copy.deepcopy(plain)
    x = torch.randn(8, 128, 256, device=device)
    found = []
    for model, run in ((ours, engine.fuse(ours)), (plain, plain)):
        with torch.autocast("cuda", torch.bfloat16):
            y = run(x)
        y.float().square().mean().backward()
        found.append([y.detach(), *(each.grad for each in model.parameters())])
    assert engine.get_fusion_stats().matches["multi_head_attention"] == 1
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=5e-2, atol=5e-2 * other.abs().max().item() + 1e-6)
