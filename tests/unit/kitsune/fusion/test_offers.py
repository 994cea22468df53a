"""In which dtypes a pattern is offered: as was measured, and by the dtype in which its kernel would run."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.kernel_table import LEAST_WIN, rows_of
from benchmarks.results_file import RESULTS
from benchmarks.table import newest_cases
from kitsune.fusion import FusionEngine, Match, Pattern, operation_of
from kitsune.fusion.patterns import NAMES, PATTERNS
from tests.unit.kitsune.fusion.fused import ROWS, TARGETS, WIDTH, Activated, Gated, Head, always_faster, new_gelu

#: Kernels of the table that one pattern stands for, where their names are not its own.
KERNELS = {
    "mlp": ("mlp_gelu",),
    "linear_activation": ("bias_gelu", "bias_gelu_tanh", "bias_relu", "bias_silu"),
    "batch_norm_relu": ("batch_norm_relu_train", "batch_norm_relu_eval"),
    "max_pool": ("max_pool", "max_pool_last"),
    "softmax": ("softmax_causal", "softmax_masked"),
    "multi_head_attention": ("attention",),
}


def stats_of(function, *inputs):
    """What is found as it is offered."""
    torch._dynamo.reset()
    engine = FusionEngine(clock=always_faster)
    engine.fuse(function)(*inputs)
    return engine.get_fusion_stats()


def refusal(dtype):
    return f"not offered in {dtype}: measured never faster than Inductor, see docs/benchmarks.md"


def reasons(stats, pattern):
    return [one.reason for one in stats.refused if one.pattern == pattern]


@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda pattern: pattern.name)
def test_a_pattern_is_offered_where_its_kernel_was_measured_to_win(pattern):
    kernels = KERNELS.get(pattern.name, (pattern.name,))
    rows = [row for row in rows_of(newest_cases(RESULTS / "kernels")) if row.kernel in kernels]
    assert {row.kernel for row in rows} == ({*kernels} if pattern.dtypes else set())
    won = {row.dtype for row in rows if any(ratio >= LEAST_WIN for ratio in row.ratios("inductor"))}
    assert {NAMES[dtype] for dtype in pattern.dtypes} == won


def test_in_fp32_a_head_keeps_its_product_and_the_loss_alone_is_replaced():
    stats = stats_of(Head(), ROWS, TARGETS)
    assert stats.matches == {"cross_entropy": 1}
    assert reasons(stats, "linear_cross_entropy") == [refusal("fp32")]


@pytest.mark.parametrize(("dtype", "name"), [(torch.float32, "fp32"), (torch.float16, "fp16")])
def test_swiglu_is_left_to_the_compiler_but_in_bf16(dtype, name):
    stats = stats_of(Gated().to(dtype), ROWS.detach().to(dtype))
    assert stats.matches == {}
    assert reasons(stats, "swiglu") == [refusal(name)]


@pytest.mark.parametrize(
    ("make", "inputs", "pattern"), [(Head, (ROWS, TARGETS), "linear_cross_entropy"), (Gated, (ROWS,), "swiglu")]
)
def test_in_bf16_and_under_its_autocast_both_are_offered(make, inputs, pattern):
    torch.manual_seed(0)
    plain = make()
    with torch.autocast("cpu", torch.bfloat16):
        stats = stats_of(plain, *inputs)
    assert stats.matches == {pattern: 1}
    x, *others = inputs
    assert stats_of(copy.deepcopy(plain).bfloat16(), x.detach().bfloat16(), *others).matches == {pattern: 1}


def test_autocast_within_the_model_counts():
    head = Head()

    def function(x, target):
        with torch.autocast("cpu", torch.bfloat16):
            return head(x, target)

    assert stats_of(function, ROWS, TARGETS).matches == {"linear_cross_entropy": 1}


def test_logits_that_are_cast_for_the_loss_were_computed_in_half_precision():
    head = nn.Linear(WIDTH, 13)

    def function(x, target):
        return F.cross_entropy(head(x).float().view(-1, 13), target.view(-1))

    with torch.autocast("cpu", torch.bfloat16):
        assert stats_of(function, ROWS, TARGETS).matches == {"linear_cross_entropy": 1}


def test_under_autocast_what_no_layer_cast_is_still_in_fp32():
    with torch.autocast("cpu", torch.bfloat16):
        stats = stats_of(lambda gate, up: F.silu(gate) * up, ROWS.detach(), ROWS.detach())
    assert stats.matches == {}
    assert reasons(stats, "swiglu") == [refusal("fp32")]


def norm_in(dtypes):
    """A pattern that replaces a norm by itself."""

    def find(node):
        norm = operation_of(node)
        if norm.name != "layer_norm":
            return None
        return Match(call=F.layer_norm, arguments=(norm.get("x"), norm.get("shape")), results=(node,))

    return Pattern("layer_norm", "reduction", find, dtypes)


@pytest.mark.parametrize(("dtypes", "matches"), [((torch.float32,), {"layer_norm": 1}), ((torch.float16,), {})])
def test_a_pattern_of_the_users_own_may_name_its_dtypes(dtypes, matches):
    torch._dynamo.reset()
    engine = FusionEngine(clock=always_faster)
    engine.register_pattern(norm_in(dtypes))
    engine.fuse(lambda x: F.layer_norm(x, (WIDTH,)))(ROWS)
    assert engine.get_fusion_stats().matches == matches


def test_a_kernel_that_is_not_offered_measures_nothing():
    def clock(original, fused):
        raise AssertionError("it was measured")

    torch._dynamo.reset()
    FusionEngine(clock=clock).fuse(Gated())(ROWS)


def test_a_pattern_without_numbers_is_offered():
    def find(node):
        call = operation_of(node)
        if call.name != "mul":
            return None
        return Match(call=torch.logical_and, arguments=(call.get("x"), call.get("y")), results=(node,))

    torch._dynamo.reset()
    engine = FusionEngine(clock=always_faster)
    engine.register_pattern(Pattern("both", "elementwise", find))
    given = torch.tensor([True, False])
    engine.fuse(lambda x, y: x * y)(given, given)
    assert engine.get_fusion_stats().matches == {"both": 1}


def test_a_pattern_whose_kernel_was_not_measured_is_not_offered_and_says_so():
    torch._dynamo.reset()
    engine = FusionEngine(clock=always_faster)
    engine.register_pattern(norm_in(()))
    engine.fuse(lambda x: F.layer_norm(x, (WIDTH,)))(ROWS)
    stats = engine.get_fusion_stats()
    assert stats.matches == {}
    assert reasons(stats, "layer_norm") == ["not offered: its kernel was not measured yet"]


def test_an_activation_runs_in_the_dtype_of_its_layer():
    stats = stats_of(Activated(new_gelu).half(), ROWS.detach().half())
    assert stats.matches == {"linear_activation": 1}
