"""Attention over short sequences: how it is called, in which dtype it runs, and what is left to torch."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from kitsune.fusion import calls
from tests.unit.kitsune.fusion.fused import ROWS, Heads, engine, normal, stats_of, step

HEADS = tuple(normal(2, 3, 5, 16, seed=seed) for seed in range(3))


def short(q, k, v):
    return F.scaled_dot_product_attention(q, k, v)


def by_names(q, k, v):
    return F.scaled_dot_product_attention(query=q, key=k, value=v, attn_mask=None, dropout_p=0.0, enable_gqa=False)


def by_positions(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, None, 0.0, True)


def of_another_module(q, k, v):
    return torch._C._nn.scaled_dot_product_attention(q, k, v, scale=0.3)


@pytest.mark.parametrize("function", [short, by_names, by_positions, of_another_module])
def test_every_way_to_call_it_is_found(function):
    fusing = engine()
    ours, wanted = step(fusing.fuse(function), [], *HEADS), step(function, [], *HEADS)
    assert fusing.get_fusion_stats().matches == {"short_attention": 1}
    for one, other in zip(ours, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_what_dynamo_captures_as_a_whole_is_left_to_torch():
    layer = nn.MultiheadAttention(32, 2, batch_first=True)
    stats = stats_of(lambda x: layer(x, x, x, need_weights=False)[0], normal(2, 5, 32))
    assert stats.matches == {} and stats.refused == ()


def test_dropout_and_scale_reach_the_kernel(monkeypatch):
    seen = []

    def attention(q, k, v, scale, causal, dropout_p):
        seen.append((q.dtype, scale, causal, dropout_p))
        return F.scaled_dot_product_attention(q, k, v, None, dropout_p, causal, scale=scale)

    monkeypatch.setattr(calls.attentions, "attention", attention)
    with torch.autocast("cpu", torch.bfloat16):
        stats_of(Heads(is_causal=True, dropout_p=0.25, scale=0.5), ROWS)
        stats_of(Heads(), ROWS)
    assert set(seen) == {(torch.bfloat16, 0.5, True, 0.25), (torch.bfloat16, None, False, 0.0)}


def masked(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, torch.ones(5, 5, dtype=torch.bool))


def grouped(q, k, v):
    return F.scaled_dot_product_attention(q, k[:, :1], v[:, :1], enable_gqa=True)


def crossed(q, k, v):
    return F.scaled_dot_product_attention(q[:, :, :2], k, v)


def of_wide_values(q, k, v):
    return F.scaled_dot_product_attention(q, k, torch.cat((v, v), -1))


def in_three_dimensions(q, k, v):
    return F.scaled_dot_product_attention(q[0], k[0], v[0])


def of_odd_heads(q, k, v):
    return F.scaled_dot_product_attention(q[..., :12], k[..., :12], v[..., :12])


def of_small_heads(q, k, v):
    return F.scaled_dot_product_attention(q[..., :8], k[..., :8], v[..., :8])


def of_long_sequences(q, k, v):
    return F.scaled_dot_product_attention(*(one.repeat(1, 1, 52, 1) for one in (q, k, v)))


def chosen(q, k, v):
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (masked, "it has a mask"),
        (grouped, "its heads share keys and values"),
        (crossed, "of different shapes"),
        (of_wide_values, "of different shapes"),
        (in_three_dimensions, "not of batch, heads, positions and head"),
        (of_odd_heads, "no kernel supports 5 positions and heads of 12 elements"),
        (of_small_heads, "heads of 8 elements"),
        (of_long_sequences, "no kernel supports 260 positions"),
        (chosen, "by sdpa_kernel"),
    ],
)
def test_what_the_kernel_does_not_compute_is_left_to_torch(function, reason):
    fusing = engine()
    torch.testing.assert_close(fusing.fuse(function)(*HEADS), function(*HEADS))
    stats = fusing.get_fusion_stats()
    assert stats.matches == {}
    assert [one.pattern for one in stats.refused] == ["short_attention"]
    assert reason in stats.refused[0].reason
