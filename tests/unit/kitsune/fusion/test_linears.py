"""Layers of one input as one product: what may read their slices, what is declined, and numbers."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from kitsune.fusion import benefit, calls
from tests.unit.kitsune.fusion.fused import WIDTH, engine, normal

X = normal(2, 3, WIDTH)


def weights(*widths):
    return [normal(width, WIDTH, seed=number) for number, width in enumerate(widths)]


def fused(function, *given, x=X):
    """(what is found, the reasons of what is refused, what it gives with gradients, what torch gives)."""
    fusing = engine()
    leaves = [one.detach().requires_grad_() for one in (x, *given)]
    found = []
    for run in (fusing.fuse(function), function):
        y = run(*leaves)
        slopes = torch.linspace(-1, 2, y.numel()).view_as(y)
        found.append([y.detach(), *torch.autograd.grad(y, leaves, slopes, allow_unused=True)])
    stats = fusing.get_fusion_stats()
    return stats.matches, [one.reason for one in stats.refused if one.pattern == "joined_linear"], *found


def rotated(x, q, k, v):
    """As queries and keys are turned before attention over more positions than a kernel of ours supports."""
    q, k, v = (F.linear(x, each).view(2, 3, -1, 4).transpose(1, 2) for each in (q, k, v))
    q, k = (torch.cat((-one[..., 2:], one[..., :2]), -1) + one.cos() for one in (q, k))
    return F.scaled_dot_product_attention(q.contiguous(), k, v, torch.ones(3, 3).tril().bool())


def flattened(x, a, b):
    return F.linear(x, a).reshape(6, -1).sin() + F.linear(x, b).flatten(0, 1)


def summed(x, a, b):
    y, z = (F.linear(x, each).transpose(0, 1) for each in (a, b))
    return (y + z).transpose(0, 1).view(-1).view(2, 3, 8)


def several(x, a, b):
    y, z = (F.linear(x, each).chunk(2, -1) for each in (a, b))
    return y[0].sin() * z[1] + y[1] * z[0].cos()


@pytest.mark.parametrize(
    ("function", "widths"),
    [(rotated, (8, 8, 8)), (flattened, (8, 8)), (several, (4, 4)), (summed, (8, 8))],
)
def test_what_reads_the_slices_gives_the_same(function, widths):
    matches, _, ours, torchs = fused(function, *weights(*widths))
    assert matches["joined_linear"] == 1
    for one, other in zip(ours, torchs, strict=True):
        assert one.stride() == other.stride()
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def through_a_copy(x, a, b):
    y, z = F.linear(x, a), F.linear(x, b)
    y.reshape(-1).mul_(2)
    return y + z


def in_place(x, a, b):
    y, z = F.linear(x, a), F.linear(x, b)
    y *= z.sin()
    return y


def with_baked_strides(x, a, b):
    y, z = F.linear(x, a), F.linear(x, b)
    return torch.as_strided(y, (2, 3, 8), (y.stride(0), 8, 1)).sin() + z


def passed_on(x, a, b):
    return F.dropout(F.linear(x, a), 0.1, False).view(-1) * F.linear(x, b).reshape(-1)


def recomputed(x, a, b):
    y, z = F.linear(x, a), F.linear(x, b)
    return checkpoint(lambda one: one.view(-1).sin(), y, use_reentrant=False).view(2, 3, 8) + z


NO_GRADIENT = "no result gives gradients to all"
MAY_DEPEND = "may depend on the strides of a result"


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x, a, b: F.linear(x, a).sin() + F.linear(x, b).view(-1).view(2, 3, 8), "a view needs the strides"),
        (lambda x, a, b: F.linear(x, a).sin() * F.linear(x, b).argmax(-1, keepdim=True), NO_GRADIENT),
        (lambda x, a, b: F.linear(x, a).sin() + F.linear(x, b).detach(), NO_GRADIENT),
        (through_a_copy, MAY_DEPEND),
        (in_place, MAY_DEPEND),
        (with_baked_strides, MAY_DEPEND),
        (passed_on, "a view needs the strides"),
        (recomputed, MAY_DEPEND),
    ],
    ids=[
        *("a view of all numbers", "read by its largest", "detached", "written through a copy", "in place"),
        *("strides in the graph", "dropout of nothing", "recomputed"),
    ],
)
def test_what_is_declined_says_why(function, reason):
    matches, reasons, ours, torchs = fused(function, *weights(8, 8))
    assert "joined_linear" not in matches
    assert len(reasons) == 1 and reason in reasons[0]
    for one, other in zip(ours, torchs, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other)


def test_a_weight_of_odd_size_stays_apart():
    _, (reason,), *_ = fused(
        lambda x, a, b: F.linear(x, a).sum(-1) + F.linear(x, b).sin().sum(-1), normal(8, 7), normal(3, 7), x=X[..., :7]
    )
    assert reason == "a weight is no multiple of 16 bytes"


def test_later_matches_know_that_it_needs_gradients(monkeypatch):
    known = []
    monkeypatch.setattr(benefit, "sample_of", lambda value, of=benefit.sample_of: known.append(value) or of(value))
    matches, *_ = fused(lambda x, a, b: F.silu(F.linear(x, a)) * F.linear(x, b), *weights(8, 8))
    assert matches == {"joined_linear": 1, "swiglu": 1}
    assert all(value.requires_grad for value in known)


def test_a_result_that_leaves_the_graph_keeps_its_strides():
    fusing = engine()

    def run(x, a, b):
        y, z = F.linear(x, a), F.linear(x, b)
        return y * z, z.view(6, -1)

    results = fusing.fuse(run)(X, *weights(8, 8))
    assert all(one.is_contiguous() for one in results)
    (refused,) = fusing.get_fusion_stats().refused
    assert refused.pattern == "joined_linear" and "a result leaves the graph" in refused.reason


@pytest.mark.parametrize(
    "function",
    [
        lambda x, a, b: F.linear(x, a) + F.linear(x.sin(), b),
        lambda x, a, b: F.linear(x, a) + F.linear(x, a) * b[0],
        lambda x, a, b: F.linear(x, a, a[:, 0]) + F.linear(x, b),
    ],
    ids=["of two inputs", "one weight twice", "one bias"],
)
def test_others_are_not_looked_at(function):
    matches, reasons, *_ = fused(function, *weights(8, 8))
    assert "joined_linear" not in matches and not reasons


def test_frozen_layers_are_joined_without_the_adapter_beside_them():
    fusing = engine()
    frozen, (down, up) = weights(8, 8, 8), weights(4, 8)
    frozen = [one.detach() for one in frozen]

    def run(x, a, b, c, down, up):
        q, k, v = (F.linear(x, one) for one in (a, b, c))
        return q.sin() + F.linear(F.linear(x, down), up[:, :4]) + k.cos() * v

    given = (X, *frozen, down, up)
    torch.testing.assert_close(fusing.fuse(run)(*given), run(*given))
    assert fusing.get_fusion_stats().matches == {"joined_linear": 1}
    assert [one.operations for one in fusing.get_fusion_stats().kept] == [3]


@pytest.mark.parametrize("biases", [False, True])
def test_the_call_gives_each_layer_in_its_order(biases):
    layers = weights(3, 5, 2)
    given = [normal(len(weight), seed=9) for weight in layers] if biases else []
    found = calls.joined_linear(X, torch.float32, 3, *layers, *given)
    for one, weight, bias in zip(found, layers, given or [None] * 3, strict=True):
        torch.testing.assert_close(one, F.linear(X, weight, bias))


def test_layers_whose_results_go_apart_stay_apart():
    fusing = engine()
    x, a, b = X.detach(), *weights(8, 8)
    y, _ = fusing.fuse(lambda x, a, b: (F.linear(x, a).cos(), F.linear(x, b).type_as(x).sin()))(x, a, b)
    assert torch.autograd.grad(y.sum(), b, allow_unused=True)[0] is None
    assert NO_GRADIENT in fusing.get_fusion_stats().refused[0].reason
