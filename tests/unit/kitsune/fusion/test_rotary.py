"""Rotary embedding as models write it out: what is found of it, and what only looks like it."""

import pytest
import torch
from torch import nn

from kitsune.fusion import FusionEngine
from tests.unit.kitsune.fusion.fused import WIDTH, Rotary, always_faster, engine, llama_heads, normal, stats_of, step
from tests.unit.kitsune.submission.layers import Llama

HEADS = normal(2, 2, 3, WIDTH)


def angles(*, width=WIDTH // 2, scale=1.0):
    """(cos, sin) of three positions, each half once."""
    angle = torch.arange(3.0)[:, None] * torch.linspace(1, scale, width)
    return angle.cos(), angle.sin()


def twice(angle):
    return torch.cat((angle, angle), -1)[None]


def reasons(function, *inputs):
    """Why it is refused; and it computes what it computed."""
    fusing = engine()
    torch.testing.assert_close(fusing.fuse(function)(*inputs), function(*inputs))
    stats = fusing.get_fusion_stats()
    assert stats.matches == {}
    return [one.reason for one in stats.refused]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_queries_and_keys_of_a_llama_are_turned_by_the_kernel(dtype):
    """By the engine as users have it: the pattern is offered in every dtype."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, ids = Llama().to(dtype), torch.randint(50, (2, 12))
    engine = FusionEngine(clock=always_faster)
    ours, wanted = engine.fuse(model)(ids), model(ids)
    assert engine.get_fusion_stats().matches["rope"] == 2
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(ours, wanted, rtol=tolerance, atol=tolerance)


def test_a_halved_projection_under_autocast_is_turned_in_fp32_as_torch_turns_it():
    plain = Rotary()
    with torch.autocast("cpu", torch.bfloat16):
        x = normal(2, 3, WIDTH)
        fusing = engine()
        ours, wanted = step(fusing.fuse(plain), [*plain.parameters()], x), step(plain, [*plain.parameters()], x)
    assert fusing.get_fusion_stats().matches == {"rope": 1}
    assert ours[0].dtype == wanted[0].dtype == torch.float32
    for one, other in zip(ours, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


def test_it_may_be_turned_off():
    assert stats_of(Rotary(), normal(2, 3, WIDTH), enable_elementwise=False).matches == {}


def test_angles_that_are_given_may_have_two_halves_unlike():
    given = torch.randn(2, 1, 3, WIDTH)

    def function(x, cos, sin):
        return llama_heads(x, cos, sin, heads=1)

    assert reasons(function, HEADS, *given) == ["the graph does not show that both halves of its angles are equal"]


def test_angles_side_by_side_for_each_pair_are_others():
    def function(x):
        cos, sin = (angle.repeat_interleave(2, -1)[None] for angle in angles())
        return llama_heads(x, cos, sin, heads=1)

    assert reasons(function, HEADS) == ["the graph does not show that both halves of its angles are equal"]


def test_two_halves_of_unlike_angles():
    def function(x):
        cos, sin = (torch.cat(pair, -1)[None] for pair in zip(angles(), angles(scale=3.0), strict=True))
        return llama_heads(x, cos, sin, heads=1)

    assert reasons(function, HEADS) == ["the graph does not show that both halves of its angles are equal"]


def test_angles_that_are_written_into_afterwards():
    def function(x):
        cos, sin = map(twice, angles())
        cos[..., 0] *= 2
        return llama_heads(x, cos, sin, heads=1)

    assert reasons(function, HEADS) == ["something is written into its angles"]


def test_what_is_written_into_other_memory_does_not_matter():
    def function(x):
        cos, sin = map(twice, angles())
        x = x * 2
        x += 1
        return llama_heads(x, cos, sin, heads=1)

    assert stats_of(function, HEADS).matches == {"rope": 1}


def test_angles_that_are_learned():
    class Learned(nn.Module):
        def __init__(self):
            super().__init__()
            self.angles = nn.Parameter(angles()[0])

        def forward(self, x):
            return llama_heads(x, twice(self.angles).cos(), twice(self.angles).sin(), heads=1)

    assert reasons(Learned(), HEADS) == ["its angles are learned"]


def test_a_sum_whose_heads_lie_around_its_positions_stays():
    """As torch lays out a sum by its first summand."""

    def function(x):
        cos, sin = map(twice, angles())
        return torch.cat((-x[..., WIDTH // 2 :], x[..., : WIDTH // 2]), -1) * sin[:, None] + x * cos[:, None]

    x = HEADS.detach().transpose(1, 2).contiguous().transpose(1, 2)
    assert reasons(function, x) == ["the kernel lays its result out in another way"]
    assert stats_of(function, HEADS).matches == {"rope": 1}


@pytest.mark.parametrize(
    ("heads", "positions"),
    [((2, 2, 3), (2, 2, 3)), ((2, 2, 3), (2, 3)), ((2, 2, 3), (2, 1, 1)), ((2, 3), (3,)), ((2, 2, 2, 3), (3,))],
)
def test_angles_of_each_head_and_heads_in_other_dimensions(heads, positions):
    def function(x):
        angle = torch.ones(*positions, WIDTH // 2)
        cos = torch.cat((angle, angle), -1)
        return x * cos + torch.cat((-x[..., WIDTH // 2 :], x[..., : WIDTH // 2]), -1) * cos

    assert reasons(function, normal(*heads, WIDTH)) == [
        "its shapes are not those of heads and the angles of their positions"
    ]


def back(x):
    return torch.cat((x[..., WIDTH // 2 :], -x[..., : WIDTH // 2]), -1)


def by_quarters(x):
    return torch.cat((-x[..., WIDTH // 4 :], x[..., : WIDTH // 4]), -1)


def of_positions(x):
    low, high = x.chunk(2, -2)
    return torch.cat((-high, low), -2)


def of_others(x):
    return torch.cat((-x[..., WIDTH // 2 :], (x + 1)[..., : WIDTH // 2]), -1)


def of_all(x):
    low, high = x[..., : WIDTH // 2], x[..., WIDTH // 2 :]
    return torch.cat((-high[()], low[()]), -1)


def of_one_head(x):
    return torch.cat((-x[:, :1, :, WIDTH // 2 :], x[:, :1, :, : WIDTH // 2]), -1)


@pytest.mark.parametrize("rotated", [back, by_quarters, of_positions, of_others, of_all, of_one_head])
def test_what_is_turned_otherwise_is_none(rotated):
    def function(x):
        angle = torch.ones(4, WIDTH // 2)
        cos = torch.cat((angle, angle), -1)
        return x * cos + rotated(x) * cos

    assert reasons(function, normal(2, 2, 4, WIDTH)) == []
