"""GELU written out: found in any order of its operands, and not where a constant is another or others look inside."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.fx import symbolic_trace

from kitsune.fusion.calls import linear_activation
from kitsune.fusion.elementwise import linear_activation as find_linear_activation
from kitsune.fusion.gelus import Activation, written_gelu
from kitsune.fusion.match import Match, place_of
from kitsune.fusion.operations import operation_of
from tests.unit.kitsune.fusion.fused import ROWS, WIDTH, Activated, engine, new_gelu, stats_of

KINDS = {"tanh": ("gelu_tanh", "tanh"), "erf": ("gelu", "none")}
CONSTANTS = {"tanh": (0.5, 1.0, math.sqrt(2 / math.pi), 0.044715), "erf": (0.5, 1.0, math.sqrt(0.5))}
CUBES = (
    lambda x: torch.pow(x, 3.0),
    lambda x: x.pow(3),
    lambda x: x**3,
    lambda x: x * x * x,
    lambda x: x * (x * x),
    lambda x: torch.square(x) * x,
)


class Writer:
    """Writes a GELU of `x`, with every choice that there is left to `random`."""

    def __init__(self, random, form, constants):
        self.random, self.form, self.constants = random, form, constants

    def plus(self, one, other):
        return one + other if self.random.random() < 0.5 else other + one

    def times(self, *factors):
        one, other, *rest = self.random.sample(factors, len(factors))
        return self.times(one * other, *rest) if rest else one * other

    def scaled(self, x, factor):
        return x / (1 / factor) if self.random.random() < 0.3 else self.times(x, factor)

    def within(self, x):
        if self.form == "erf":
            return torch.erf(self.scaled(x, self.constants[2]))
        _, _, slope, cube = self.constants
        if self.random.random() < 0.3:
            return torch.tanh(self.times(x, slope, self.plus(1.0, self.times(x, cube, x))))
        cubed = self.random.choice(CUBES)(x)
        return torch.tanh(self.times(slope, self.plus(x, self.times(cube, cubed))))

    def __call__(self, x):
        half, one = self.constants[:2]
        bend = self.within(x)
        if self.random.random() < 0.2:
            halved = self.times(half, x)
            return self.plus(self.times(halved, one), self.times(halved, bend))
        return self.times(half, x, self.plus(one, bend))


def last_of(function):
    """The node that gives the result of a function of a linear layer."""
    traced = symbolic_trace(lambda x, weight, bias: function(F.linear(x, weight, bias)))
    (output,) = traced.graph.find_nodes(op="output")
    return output.args[0]


@given(st.sampled_from(list(KINDS)), st.randoms(use_true_random=False))
def test_it_is_found_in_any_order(form, random):
    kind, approximate = KINDS[form]
    state = random.getstate()
    x = torch.linspace(-4, 4, 33, dtype=torch.float64)
    wanted = F.gelu(x, approximate=approximate)
    torch.testing.assert_close(Writer(random, form, CONSTANTS[form])(x), wanted, rtol=1e-9, atol=1e-9)
    random.setstate(state)
    node = last_of(Writer(random, form, CONSTANTS[form]))
    found = written_gelu(node)
    assert isinstance(found, Activation) and found.kind == kind
    assert operation_of(found.x).name == "linear"
    inside = [each for each in node.graph.nodes if each.op in ("call_function", "call_method")]
    assert {*found.inner, node, found.x} == {*inside}


@settings(max_examples=15)
@given(st.sampled_from(list(KINDS)), st.randoms(use_true_random=False))
def test_as_dynamo_captures_it_the_replaced_layer_computes_the_same(form, random):
    torch.manual_seed(0)
    module, fusing = symbolic_trace(Activated(Writer(random, form, CONSTANTS[form]))), engine()
    torch.testing.assert_close(fusing.fuse(module)(ROWS), module(ROWS), rtol=1e-4, atol=1e-5)
    assert fusing.get_fusion_stats().matches == {"linear_activation": 1}


@given(st.sampled_from(list(KINDS)), st.randoms(use_true_random=False))
def test_constants_may_be_rounded_to_float32(form, random):
    rounded = tuple(float(np.float32(one)) for one in CONSTANTS[form])
    assert isinstance(written_gelu(last_of(Writer(random, form, rounded))), Activation)


@given(
    st.sampled_from(list(KINDS)),
    st.randoms(use_true_random=False),
    st.integers(0, 3),
    st.floats(1e-6, 1.0),
    st.booleans(),
)
def test_another_constant_is_another_function(form, random, which, error, is_less):
    constants = list(CONSTANTS[form])
    constants[which % len(constants)] *= 1 - error / 2 if is_less else 1 + error
    assert written_gelu(last_of(Writer(random, form, constants))) == "it is written as GELU is, with other constants"


@given(st.sampled_from(list(KINDS)), st.randoms(use_true_random=False), st.data())
def test_what_others_use_within_it_stays(form, random, data):
    node = last_of(Writer(random, form, CONSTANTS[form]))
    found = written_gelu(node)
    inner = (*found.inner, found.x)
    used = data.draw(st.sampled_from(sorted(inner, key=lambda each: each.name)))
    match = Match(call=linear_activation, arguments=tuple(found.x.args), results=(node,), inner=inner)
    assert not isinstance(place_of(match), str)
    with node.graph.inserting_after(node):
        node.graph.call_function(torch.sin, (used,))
    assert place_of(match).startswith("others use the result of ")


@pytest.mark.parametrize(
    "function",
    [
        lambda x: 0.5 * x * (1 + torch.tanh(x)),
        lambda x: 0.5 * x * torch.erf(x / 2**0.5),
        lambda x: 0.5 * x * (1 + torch.sin(x / 2**0.5)),
        lambda x: 0.5 * x * x * (1 + torch.erf(x / 2**0.5)),
        lambda x: 0.5 * x * (1 - torch.erf(x / 2**0.5)),
        lambda x: -0.5 * x * (1 + torch.erf(x / 2**0.5)),
        lambda x: 0.5 * x * torch.add(1, torch.erf(x / 2**0.5), alpha=2),
        lambda x: 0.5 * x * (1 + torch.erf(torch.div(x, 2**0.5, rounding_mode="floor"))),
        lambda x: 0.5 * x * (1 + torch.erf(2**0.5 / x)),
        lambda x: 0.5 * x * (1 + torch.erf(x / 2**0.5)) ** 2,
        lambda x: 0.5 * x * (1 + torch.tanh(CONSTANTS["tanh"][2] * (x + 0.044715 * x**2))),
        lambda x: 0.5 * x * (1 + torch.tanh(CONSTANTS["tanh"][2] * (x + 0.044715 * x**4))),
        lambda x: 0.5 * x * (1 + torch.erf(torch.erf(x / 2**0.5))),
        lambda x: 0.5 * x.sin() * (1 + torch.erf(x / 2**0.5)),
        lambda x: (0.5 * x * (1 + torch.erf(x / 2**0.5))) + x * 3 - x * 3,
        lambda x: x * 0.5,
        lambda x: torch.erf(x / 2**0.5),
    ],
)
def test_what_is_something_else_is_none(function):
    assert written_gelu(last_of(function)) is None


def test_what_is_written_in_place_is_none():
    assert written_gelu(last_of(lambda x: 0.5 * x * torch.erf(x / 2**0.5).add_(1))) is None


def test_a_long_product_is_not_multiplied_out():
    def function(x):
        y = 1 + torch.tanh(x)
        for _ in range(40):
            y = y * y
        return y

    assert written_gelu(last_of(function)) is None


def test_it_is_of_a_linear_layer():
    def function(x):
        return x.sin() * 0.5 * (1.0 + torch.erf(x.sin() / 2**0.5))

    assert written_gelu(last_of(function)) is None
    assert stats_of(lambda x: new_gelu(x.sin()), ROWS).matches == {}


def test_the_root_of_two_to_five_digits_is_told_of():
    stats = stats_of(Activated(lambda x: x * 0.5 * (1.0 + torch.erf(x / 1.41421))), ROWS)
    assert stats.matches == {}
    assert [(one.pattern, one.reason) for one in stats.refused] == [
        ("linear_activation", "it is written as GELU is, with other constants")
    ]


def test_a_tanh_that_others_use_keeps_the_layer_as_it_is():
    def function(x):
        bend = torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))
        return 0.5 * x * (1 + bend) + bend.mean()

    stats = stats_of(Activated(function), ROWS)
    assert stats.matches == {}
    assert [one.reason for one in stats.refused] == ["others use the result of tanh"]


def test_under_autocast_it_is_found():
    fusing, module = engine(), Activated(new_gelu)
    with torch.autocast("cpu", torch.bfloat16):
        ours, wanted = fusing.fuse(module)(ROWS), module(ROWS)
    assert fusing.get_fusion_stats().matches == {"linear_activation": 1}
    torch.testing.assert_close(ours, wanted, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("after", "dtype"),
    [
        (F.linear, torch.float32),
        (lambda y, weight: F.linear(y, weight) + F.linear(y, weight), torch.float32),
        (lambda y, weight: F.linear(weight, y), torch.bfloat16),
        (lambda y, weight: F.linear(y, weight) + y, torch.bfloat16),
        (lambda y, weight: y.tanh(), torch.bfloat16),
        (lambda y, weight: y, torch.bfloat16),
    ],
)
def test_a_result_is_widened_where_every_user_rounds_it_again(after, dtype):
    """A GPU's autocast computes powers in fp32, and with them all that follows up to the next layer."""
    traced = symbolic_trace(lambda x, weight, bias: after(new_gelu(F.linear(x, weight, bias)), weight))
    operations = [node for node in traced.graph.nodes if node.op.startswith("call_")]
    for node in operations:
        is_half = operation_of(node).name == "linear"
        node.meta["example_value"] = torch.empty(3, 4, dtype=torch.bfloat16 if is_half else torch.float32)
    (match,) = [match for match in map(find_linear_activation, operations) if match is not None]
    assert match.arguments[-1] == dtype


def test_a_widened_result_is_that_of_the_kernel():
    layer = nn.Linear(WIDTH, WIDTH).bfloat16()
    given = ROWS.detach().bfloat16(), layer.weight, layer.bias, "gelu_tanh"
    wide, narrow = (linear_activation(*given, dtype) for dtype in (torch.float32, torch.bfloat16))
    assert (wide.dtype, narrow.dtype) == (torch.float32, torch.bfloat16)
    assert torch.equal(wide.bfloat16(), narrow)
