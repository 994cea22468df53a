"""Each pattern in a real small module, as Dynamo captures it and as an exported graph; and what is none."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kitsune.errors import SettingsError
from kitsune.fusion import Pattern
from kitsune.fusion.patterns import PATTERNS
from tests.unit.kitsune.fusion.fused import (
    AS_EXPORTED,
    CASES,
    ROWS,
    TARGETS,
    WIDTH,
    Activated,
    Attention,
    BatchNormed,
    Conv1DMlp,
    Dropped,
    Gated,
    GatedMlp,
    Head,
    JoinedGatedMlp,
    Mlp,
    Norm,
    Pointwise,
    engine,
    images,
    new_gelu,
    normal,
    stats_of,
    step,
)


def exported(module, inputs):
    return torch.export.export(module, inputs).module()


def forms() -> list[object]:
    """Every case as it is written; exported one of each pattern, and the others with -m minutes."""
    first = {pattern: name for name, (pattern, _, _) in reversed(CASES.items())}
    exported = [
        pytest.param(name, "exported", marks=[pytest.mark.minutes] * (first[pattern] != name))
        for name, (pattern, _, _) in CASES.items()
    ]
    return [*((name, "as written") for name in CASES), *exported]


@pytest.mark.parametrize(("name", "form"), forms())
def test_a_pattern_is_found_and_computes_the_same(name, form):
    pattern, make, inputs = CASES[name]
    torch.manual_seed(0)
    plain = make()
    module = copy.deepcopy(plain)
    if form == "exported":
        module = torch.export.export(module, inputs).module()
        pattern = AS_EXPORTED.get(pattern, pattern)
    fusing = engine()
    ours = step(fusing.fuse(module), list(module.parameters()), *inputs)
    wanted = step(plain, list(plain.parameters()), *inputs)
    assert fusing.get_fusion_stats().matches == {pattern: 1}
    for one, other in zip(ours, wanted, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    for one, other in zip(module.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "name",
    [
        "LayerNorm",
        "a residual and LayerNorm",
        "GELU",
        "a block",
        "a block with the GELU of GPT-2",
        "the block of GPT-2",
        "SwiGLU",
        "the block of Llama",
        "a gated block with the GELU of GPT-2",
        "the heads of Llama",
        "attention",
        "a head",
        "a loss",
    ],
)
def test_a_pattern_is_found_under_autocast(name):
    pattern, make, inputs = CASES[name]
    plain = make()
    fusing = engine()
    with torch.autocast("cpu", torch.bfloat16):
        ours = step(fusing.fuse(copy.deepcopy(plain)), [], *inputs)[0]
        wanted = step(plain, [], *inputs)[0]
    assert fusing.get_fusion_stats().matches == {pattern: 1}
    torch.testing.assert_close(ours, wanted, rtol=2e-2, atol=2e-2)


def test_dropout_and_a_residual_keep_the_sum_in_the_mean():
    torch.manual_seed(0)
    fusing = engine()
    x, residual = torch.ones(64, 64, requires_grad=True), torch.full((64, 64), 5.0)
    y = fusing.fuse(Dropped())(x, residual)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert fusing.get_fusion_stats().matches == {"dropout_add": 1}
    assert set(y.unique().tolist()) == {5.0, 7.0}
    assert torch.equal(gradient, y.detach() - 5)
    assert abs(y.mean().item() - 6) < 0.1


def test_of_two_dropouts_the_one_that_nobody_else_uses_is_replaced():
    def function(x):
        x = F.dropout(x, 0.5, True)
        return x + F.dropout(x * 2, 0.5, True)

    assert stats_of(function, ROWS).matches == {"dropout_add": 1}


def test_of_two_gates_the_one_that_nobody_else_uses_is_replaced():
    def function(x, y):
        gate = F.silu(x)
        return gate * F.silu(y) + gate

    x, y = ROWS, normal(2, 3, WIDTH, seed=1)
    fusing = engine()
    ours, wanted = step(fusing.fuse(function), [], x, y), step(function, [], x, y)
    assert fusing.get_fusion_stats().matches == {"swiglu": 1}
    for one, other in zip(ours, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


# What is none ---------------------------------------------------------------------------------------------------------


def softmax_of_columns(x):
    return F.softmax(x * 2, dim=-2)


def norm_of_two_dimensions(x):
    return F.layer_norm(x, x.shape[-2:])


def norm_in_double(x):
    return F.layer_norm(x.double(), x.shape[-1:])


def mean_of_columns(x):
    return torch.ones(WIDTH) * (x * torch.rsqrt(x.pow(2).mean(-2, keepdim=True) + 1e-6))


def cube(x):
    return torch.ones(WIDTH) * (x * torch.rsqrt(x.pow(3).mean(-1, keepdim=True) + 1e-6))


def written_norm(x, weight, added):
    return weight * (x * torch.rsqrt(added(x.pow(2).mean(-1, keepdim=True))))


def norm_with_one_gain(x):
    return written_norm(x, torch.full((1,), 3.0), lambda mean: mean + 1e-6)


def norm_with_a_multiple_of_eps(x):
    return written_norm(x, torch.ones(WIDTH), lambda mean: torch.add(mean, 0.1, alpha=10))


def norm_times_eps(x):
    return written_norm(x, torch.ones(WIDTH), lambda mean: mean * 1e-3)


def norm_through(dtype, x):
    normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    return torch.ones(WIDTH) * normed.to(dtype).to(torch.float32)


def norm_in_eight_bits(x):
    return norm_through(torch.float8_e4m3fn, x)


def norm_in_integers(x):
    return norm_through(torch.int8, x)


def norm_without_weight(x):
    return F.rms_norm(x, x.shape[-1:])


def sum_with_a_broadcast_residual(x):
    return F.layer_norm(x + x[:1].detach(), x.shape[-1:])


def loss_with_weights(x):
    return F.cross_entropy(x.view(-1, WIDTH), torch.zeros(6, dtype=torch.int64), weight=torch.ones(WIDTH))


def loss_by_size_average(x):
    return F.cross_entropy(x.view(-1, WIDTH), torch.zeros(6, dtype=torch.int64), size_average=False)


def loss_by_reduce(x):
    return F.cross_entropy(x.view(-1, WIDTH), torch.zeros(6, dtype=torch.int64), reduce=False)


def loss_by_position(x):
    return F.cross_entropy(x.view(-1, WIDTH), torch.zeros(6, dtype=torch.int64), None, False)


def loss_of_shares(x):
    return F.cross_entropy(x.view(-1, WIDTH), torch.ones(6, WIDTH))


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (softmax_of_columns, "another dimension"),
        (norm_of_two_dimensions, "more than the last dimension"),
        (norm_in_double, "float64"),
        (mean_of_columns, None),
        (cube, None),
        (norm_with_one_gain, "no weight for each element"),
        (norm_with_a_multiple_of_eps, None),
        (norm_times_eps, None),
        (norm_in_eight_bits, "rounded to another dtype"),
        (norm_in_integers, "rounded to another dtype"),
        (norm_without_weight, "no weight"),
        (loss_with_weights, "have weights"),
        (loss_by_size_average, "size_average"),
        (loss_by_reduce, "size_average"),
        (loss_by_position, "size_average"),
        (loss_of_shares, "no class numbers"),
    ],
)
@pytest.mark.filterwarnings("ignore:size_average and reduce")
def test_near_misses_stay_as_they_are(function, reason):
    fusing = engine()
    torch.testing.assert_close(fusing.fuse(function)(ROWS), function(ROWS), equal_nan=True)
    stats = fusing.get_fusion_stats()
    assert stats.matches == {}
    assert stats.operations_before == stats.operations_after
    reasons = [one.reason for one in stats.refused]
    assert reasons == [] if reason is None else any(reason in one for one in reasons)


def rounded_norm(x):
    return written_norm(x.bfloat16().float(), torch.ones(WIDTH), lambda mean: mean + 1e-6)


def norm_of_integers(x):
    return written_norm((x * 4).int().float(), torch.ones(WIDTH), lambda mean: mean + 1e-6)


def scaled_integers(x):
    return torch.softmax((x * 3).to(torch.int8) * 50, -1, dtype=torch.float32)


def rounded_logits(x):
    logits = F.linear(x.view(-1, WIDTH), torch.linspace(-1, 1, 13 * WIDTH).view(13, WIDTH))
    return F.cross_entropy(logits.to(torch.float8_e4m3fn).float(), torch.arange(6))


@pytest.mark.parametrize(
    ("function", "pattern"),
    [
        (rounded_norm, "rms_norm"),
        (norm_of_integers, "rms_norm"),
        (scaled_integers, "softmax"),
        (rounded_logits, "cross_entropy"),
    ],
)
def test_casts_that_round_stay(function, pattern):
    fusing = engine()
    torch.testing.assert_close(fusing.fuse(function)(ROWS), function(ROWS))
    assert fusing.get_fusion_stats().matches == {pattern: 1}


@pytest.mark.parametrize("training", [True, False])
def test_statistics_are_written_before_they_are_read(training):
    """By a hook of the batch norm that was there before, as one that watches its statistics."""
    seen = []
    module = BatchNormed().train(training)
    module.norm.register_forward_hook(lambda norm, _, __: seen.append(norm.running_mean.clone()))
    plain, fusing = copy.deepcopy(module), engine()
    x = normal(2, 6, 6, 6)
    fusing.fuse(module)(x)
    assert fusing.get_fusion_stats().matches == ({} if training else {"batch_norm_relu": 1})
    plain(x)
    ours, wanted = seen
    torch.testing.assert_close(ours, wanted)
    refused = {one.reason for one in fusing.get_fusion_stats().refused}
    assert ("what it writes is read while it runs" in refused) == training


def test_a_sum_of_two_shapes_is_left_to_torch():
    assert stats_of(sum_with_a_broadcast_residual, ROWS).matches == {"layer_norm": 1}


def test_another_eps_is_another_norm():
    stats = [stats_of(lambda x, eps=eps: F.layer_norm(x, (WIDTH,), eps=eps), ROWS) for eps in (1e-5, 1e-1)]
    assert [one.matches for one in stats] == [{"layer_norm": 1}] * 2
    fused = engine().fuse(lambda x: F.layer_norm(x, (WIDTH,), eps=0.5))
    torch.testing.assert_close(fused(ROWS), F.layer_norm(ROWS, (WIDTH,), eps=0.5))


def dropout_twice(x):
    dropped = F.dropout(x, 0.5, True)
    return dropped + dropped


def gate_of_itself(x):
    gate = F.silu(x)
    return gate * gate


def norm_weighed_by_itself(x):
    x = x[0, 0]
    normed = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5)
    return normed * normed


@pytest.mark.parametrize("function", [dropout_twice, gate_of_itself, norm_weighed_by_itself])
def test_what_a_match_would_replace_cannot_be_its_argument(function):
    fusing = engine()
    ours, wanted = step(fusing.fuse(function), [], ROWS), step(function, [], ROWS)
    for one, other in zip(ours, wanted, strict=True):
        torch.testing.assert_close(one, other)
    stats = fusing.get_fusion_stats()
    assert stats.matches == {}
    assert {one.reason for one in stats.refused} == {"it needs a tensor that it would replace"}


def test_an_activation_in_place_of_an_argument_by_name():
    layer = nn.Linear(WIDTH, WIDTH)

    def function(x):
        return F.silu(input=layer(x), inplace=True)

    torch.testing.assert_close(engine().fuse(function)(ROWS), function(ROWS), rtol=1e-4, atol=1e-5)
    assert stats_of(function, ROWS).matches == {"linear_activation": 1}


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.max_pool2d(x, 2, padding=1),
        lambda x: F.max_pool2d(input=x, kernel_size=[2], stride=[2, 1]),
        lambda x: F.max_pool2d(x, 2, None, 0, 1, False, False),
        lambda x: torch.ops.aten.max_pool2d.default(x, [3, 3], [], [1, 1]),
    ],
)
def test_a_max_pool_is_found_however_it_is_written(function):
    x, fusing = normal(2, 3, 6, 5), engine()
    ours, wanted = step(fusing.fuse(function), [], x), step(function, [], x)
    assert fusing.get_fusion_stats().matches == {"max_pool": 1}
    for one, other in zip(ours, wanted, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: F.max_pool2d(x, 2, dilation=2), "it is dilated or its size is rounded up"),
        (lambda x: F.max_pool2d(x, 2, ceil_mode=True), "it is dilated or its size is rounded up"),
        (lambda x: F.max_pool2d(x, 2, return_indices=True)[0], "its indices are returned"),
        (lambda x: F.max_pool2d(x, 6), "the kernel is not for its sizes and dtype on this device"),
        (lambda x: F.max_pool2d(x[0], 2), "the kernel is not for its sizes and dtype on this device"),
        (lambda x: F.max_pool2d(x.double(), 2), "the kernel is not for its sizes and dtype on this device"),
    ],
)
def test_a_max_pool_that_the_kernel_does_not_take_stays(function, reason):
    x = normal(2, 3, 7, 7)
    fusing = engine()
    torch.testing.assert_close(fusing.fuse(function)(x), function(x))
    stats = fusing.get_fusion_stats()
    assert stats.matches == {}
    assert [one.reason for one in stats.refused] == [reason]


@pytest.mark.parametrize(
    ("layer", "reasons"),
    [
        (lambda: nn.Conv2d(3, 6, 3, dilation=2), ["it is dilated, or padded by a name"]),
        (lambda: nn.Conv2d(3, 6, 3, padding="same"), ["it is dilated, or padded by a name"]),
        (lambda: nn.Conv2d(3, 6, 12, padding=6), ["the kernel is not for its sizes and dtype on this device"]),
        (lambda: nn.Sequential(nn.ZeroPad2d(1), nn.Conv2d(3, 6, 3, groups=3)), []),
    ],
)
def test_a_first_convolution_that_the_kernel_does_not_support_stays(layer, reasons):
    x = normal(2, 3, 9, 9).detach().contiguous(memory_format=torch.channels_last)
    model, fusing = layer(), engine()
    torch.testing.assert_close(fusing.fuse(model)(x), model(x))
    assert fusing.get_fusion_stats().matches == {}
    assert [one.reason for one in fusing.get_fusion_stats().refused if one.pattern == "stem_convolution"] == reasons


def test_of_images_that_are_channels_first_the_first_convolution_stays():
    stats = stats_of(nn.Conv2d(3, 6, 3), normal(2, 3, 9, 9))
    assert stats.matches == {}
    assert "its images are channels first" in [one.reason for one in stats.refused]


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (lambda: Pointwise(bias=True), "it has a bias, strides, padding, dilation or groups"),
        (lambda: Pointwise(stride=2), "it has a bias, strides, padding, dilation or groups"),
        (lambda: Pointwise(padding=1), "it has a bias, strides, padding, dilation or groups"),
        (lambda: Pointwise(padding="same"), "it has a bias, strides, padding, dilation or groups"),
        (lambda: Pointwise(dilation=2), "it has a bias, strides, padding, dilation or groups"),
        (lambda: Pointwise(groups=4), "it has a bias, strides, padding, dilation or groups"),
        (lambda: Pointwise().eval(), "the batch norm is not in training"),
        (
            lambda: nn.Sequential(Pointwise()[0], nn.BatchNorm2d(16, affine=False)),
            "has no weight, or no running",
        ),
        (
            lambda: nn.Sequential(Pointwise()[0], nn.BatchNorm2d(16, track_running_stats=False)),
            "has no weight, or no running",
        ),
        (lambda: Pointwise().double(), "the batch norm is not in fp32"),
        (lambda: Pointwise().bfloat16(), "the batch norm is not in fp32"),
        (lambda: nn.Sequential(nn.Conv2d(WIDTH, 6, 1, bias=False), nn.BatchNorm2d(6)), "not for its sizes and dtype"),
    ],
)
def test_a_pointwise_convolution_that_the_kernel_does_not_support_stays(layer, reason):
    model = layer()
    stats = stats_of(model, images(WIDTH).detach().to(model[0].weight.dtype))
    assert "pointwise_convolution" not in stats.matches
    (found,) = [one.reason for one in stats.refused if one.pattern == "pointwise_convolution"]
    assert reason in found


def test_a_pointwise_convolution_of_images_that_are_channels_first_stays():
    stats = stats_of(Pointwise(), normal(2, WIDTH, 5, 4))
    assert [one.reason for one in stats.refused] == ["its images are channels first"]


def test_a_pointwise_convolution_that_a_hook_reads_stays():
    layer, seen = Pointwise(), []
    layer[0].register_forward_hook(lambda _, __, y: seen.append(y.sum()))
    stats = stats_of(layer, images(WIDTH))
    assert stats.matches == {} and seen
    assert [one.reason for one in stats.refused] == ["others use the result of conv2d"]


@pytest.mark.parametrize("write", [lambda scale: scale.add_(1.0), lambda scale: scale.view(torch.int32).add_(1)])
def test_a_pointwise_convolution_stays_where_what_it_reads_is_written_before_its_norm(write):
    """The convolution would move behind the write; the counter of a batch norm is written there, and read by nobody."""
    convolution, norm = Pointwise()
    own = norm.running_mean, norm.running_var, norm.weight, norm.bias

    def function(x, scale):
        y = F.conv2d(x, convolution.weight.detach() * scale)
        write(scale)
        return F.batch_norm(y, *own, training=True)

    stats = stats_of(function, images(WIDTH), torch.tensor(2.0))
    assert stats.matches == {}
    assert [one.reason for one in stats.refused] == ["something is written in place while it runs"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch, of torch
@pytest.mark.parametrize("compiler", ["eager", pytest.param("inductor", marks=pytest.mark.minutes)])
def test_under_autocast_a_pointwise_convolution_trains_as_torchs_does(compiler):
    """Statistics over steps, gradients of fp32 weights, and counters, of two layers one after the other."""
    torch.manual_seed(0)
    plain = nn.Sequential(Pointwise(), nn.ReLU(inplace=True), nn.Conv2d(16, 8, 1, bias=False), nn.BatchNorm2d(8))
    model = copy.deepcopy(plain)
    fusing, x = engine(compiler=compiler), images(WIDTH)
    fused = fusing.fuse(model)
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(2):
            ours, wanted = (step(one, [*of.parameters()], x) for one, of in ((fused, model), (plain, plain)))
    assert fusing.get_fusion_stats().matches == {"pointwise_convolution": 2}
    for one, other in zip(ours, wanted, strict=True):
        assert one.dtype == other.dtype
        assert (one - other).float().norm() <= 3e-2 * other.float().norm()
    for one, other in zip(model.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-3)


def test_dropout_in_eval_is_no_dropout():
    assert stats_of(Dropped().eval(), ROWS, ROWS.detach()).matches == {}


def test_an_activation_without_a_bias_before_it_stays():
    assert stats_of(Activated(bias=False), ROWS).matches == {}


def test_a_block_with_dropout_has_its_activation_replaced_alone():
    assert stats_of(Mlp(dropout=0.5), ROWS).matches == {"linear_activation": 1}


def test_a_block_whose_hidden_layer_is_used_again_is_none():
    block = Mlp(nn.SiLU())

    def function(x):
        hidden = block.activation(block.up(x))
        return block.down(hidden), hidden

    stats = stats_of(function, ROWS)
    assert stats.matches == {"linear_activation": 1}
    assert [(one.pattern, one.reason) for one in stats.refused] == [("mlp", "others use the result of silu")]


def test_of_a_joined_layer_the_first_half_is_the_gate():
    block = JoinedGatedMlp()

    def turned(x):
        up, gate = block.gate_and_up(x).chunk(2, dim=-1)
        return block.down(up * F.silu(gate))

    assert stats_of(block, ROWS).matches == {"gated_mlp": 1}
    assert "gated_mlp" not in stats_of(turned, ROWS).matches


def test_a_joined_layer_whose_half_is_used_again_is_none():
    block = JoinedGatedMlp()

    def function(x):
        gate, up = block.gate_and_up(x).chunk(2, dim=-1)
        return block.down(up * F.silu(gate)), gate

    stats = stats_of(function, ROWS)
    assert "gated_mlp" not in stats.matches
    assert [one.reason for one in stats.refused if one.pattern == "gated_mlp"] == ["others use the result of item"]


def test_a_joined_layer_with_a_bias_is_none():
    stats = stats_of(JoinedGatedMlp(bias=True), ROWS)
    assert ("gated_mlp", "its layers have biases") in [(one.pattern, one.reason) for one in stats.refused]


@pytest.mark.parametrize("halve", [lambda y: y.chunk(2), lambda y: y.chunk(4, dim=-1)[:2]], ids=["rows", "quarters"])
def test_a_layer_that_is_not_halved_is_none(halve):
    block, rows = JoinedGatedMlp(), normal(2, WIDTH)

    def function(x):
        gate, up = halve(block.gate_and_up(x))
        return F.linear(up * F.silu(gate), torch.ones(3, up.shape[-1]))

    assert "gated_mlp" not in stats_of(function, rows).matches


@pytest.mark.parametrize(
    "change",
    [
        lambda up, x: torch.addmm(up.bias, x.view(-1, WIDTH), up.weight, beta=2).view(2, 3, -1),
        lambda up, x: torch.addmm(up.bias, x.view(-1, WIDTH), up.weight).view(3, 2, -1),
        lambda up, x: torch.addmm(up.bias.expand(6, -1), x.view(-1, WIDTH), up.weight).view(2, 3, -1),
    ],
    ids=["beta", "another shape", "a bias for each row"],
)
def test_what_is_nearly_conv1d_is_no_layer_of_a_block(change):
    block = Conv1DMlp()
    x = normal(2, 3, WIDTH)
    assert stats_of(block, x).matches == {"mlp": 1}
    assert stats_of(lambda x: block.down(new_gelu(change(block.up, x))), x).matches == {}


def test_gradients_of_conv1d_lie_as_its_weights_do():
    block = Conv1DMlp()
    parameters = list(block.parameters())
    gradients = torch.autograd.grad(engine().fuse(block)(ROWS).sum(), parameters)
    assert [one.stride() for one in gradients] == [one.stride() for one in parameters]


@pytest.mark.parametrize("function", [lambda x: x * torch.sigmoid(1.7 * x), lambda x: x * torch.sigmoid(1.702 + x)])
def test_another_function_than_that_of_clip_stays(function):
    assert stats_of(Mlp(function), ROWS).matches == {}


def test_a_block_of_two_dtypes_is_none():
    block = Mlp()

    def function(x):
        with torch.autocast("cpu", torch.bfloat16):
            hidden = block.activation(block.up(x))
        return F.linear(hidden.float(), block.down.weight)

    assert "mlp" not in stats_of(function, ROWS).matches


def test_a_block_whose_sizes_the_kernel_does_not_take_has_its_activation_replaced_alone():
    stats = stats_of(nn.Sequential(nn.Linear(WIDTH, 6), nn.ReLU(), nn.Linear(6, WIDTH)), ROWS)
    assert stats.matches == {"linear_activation": 1}
    assert [(one.pattern, one.reason) for one in stats.refused] == [
        ("mlp", "the kernel is not for its sizes and dtype on this device")
    ]


def test_a_gated_block_with_dropout_has_its_gate_replaced_alone():
    assert stats_of(GatedMlp(dropout=0.5), ROWS).matches == {"swiglu": 1}


@pytest.mark.parametrize("layer", ["gate", "up", "down"])
def test_a_gated_block_with_biases_has_its_gate_replaced_alone(layer):
    block = GatedMlp()
    setattr(block, layer, nn.Linear(*getattr(block, layer).weight.shape[::-1]))
    stats = stats_of(block, ROWS)
    assert "gated_mlp" not in stats.matches
    assert ("gated_mlp", "its layers have biases") in [(one.pattern, one.reason) for one in stats.refused]


@pytest.mark.parametrize(
    ("forward", "reason"),
    [
        (lambda block, x: block.down((h := block.up(x)) * F.silu(block.gate(x))) + h.mean(), "the result of linear"),
        (lambda block, x: block.down((h := F.silu(block.gate(x))) * block.up(x)) + h.mean(), "the result of silu"),
        (lambda block, x: block.down(h := F.silu(block.gate(x)) * block.up(x)) + h.mean(), "the result of mul"),
    ],
)
def test_a_gated_block_of_which_others_use_a_part_is_none(forward, reason):
    block = GatedMlp()
    stats = stats_of(lambda x: forward(block, x), ROWS)
    assert "gated_mlp" not in stats.matches
    assert [one.reason for one in stats.refused if one.pattern == "gated_mlp"] == [f"others use {reason}"]


@pytest.mark.parametrize(
    "forward",
    [
        lambda block, x: block.down(F.silu(block.gate(x)) * block.up(x * 2)),
        lambda block, x: block.down((h := block.gate(x)) * F.silu(h)),
        lambda block, x: block.down(F.silu(block.gate(x)) * block.up(x).relu()),
        lambda block, x: block.down(F.silu(block.gate(x)) + block.up(x)),
        lambda block, x: block.down(torch.tanh(block.gate(x)) * block.up(x)),
        lambda block, x: block.down(F.silu(torch.cat((x, x), -1)) * block.up(x)),
        lambda block, x: block.down(F.silu(block.gate(x)) * 2),
    ],
    ids=["of two tensors", "of itself", "of two activations", "a sum", "tanh", "of no layer", "of a number"],
)
def test_what_looks_like_a_gated_block_is_none(forward):
    block = GatedMlp()
    stats = stats_of(lambda x: forward(block, x), ROWS)
    assert "gated_mlp" not in stats.matches
    assert [one for one in stats.refused if one.pattern == "gated_mlp"] == []


def test_a_gated_block_of_two_dtypes_is_none():
    block = GatedMlp()

    def function(x):
        with torch.autocast("cpu", torch.bfloat16):
            hidden = F.silu(block.gate(x)) * block.up(x)
        return F.linear(hidden.float(), block.down.weight)

    assert "gated_mlp" not in stats_of(function, ROWS).matches


def test_a_gated_block_whose_sizes_the_kernel_does_not_take_has_its_gate_replaced_alone():
    block = GatedMlp()
    block.gate, block.up = (nn.Linear(WIDTH, 6, bias=False) for _ in range(2))
    block.down = nn.Linear(6, WIDTH, bias=False)
    stats = stats_of(block, ROWS)
    assert stats.matches == {"swiglu": 1}
    assert [(one.pattern, one.reason) for one in stats.refused] == [
        ("gated_mlp", "the kernel is not for its sizes and dtype on this device")
    ]


class Shared(Head):
    """Gives the logits to others, too."""

    def forward(self, x, target):
        logits = self.head(x).view(-1, 13)
        return F.cross_entropy(logits, target.view(-1)) + logits.mean()


def test_what_others_use_stays_and_the_loss_alone_is_replaced():
    stats = stats_of(Shared(), ROWS, TARGETS)
    assert stats.matches == {"cross_entropy": 1}
    assert [(one.pattern, one.reason) for one in stats.refused] == [
        ("linear_cross_entropy", "others use the result of view")
    ]


class Shifted(Head):
    """As models of Hugging Face had it: each position tells the next target."""

    def forward(self, x, target):
        logits = self.head(x)[..., :-1, :].contiguous()
        return F.cross_entropy(logits.view(-1, 13), target[..., 1:].contiguous().view(-1))


@pytest.mark.parametrize("form", ["as written", "exported"])
def test_logits_that_are_cut_behind_their_layer_leave_a_reason(form):
    module = Shifted() if form == "as written" else exported(Shifted(), (ROWS, TARGETS))
    stats = stats_of(module, ROWS, TARGETS)
    assert stats.matches == {"cross_entropy": 1}
    assert [(one.pattern, one.reason) for one in stats.refused] == [
        ("linear_cross_entropy", "its logits are cut behind the layer: cut what goes into it")
    ]


def test_a_loss_in_another_dtype_than_that_of_its_layer_is_refused():
    head = nn.Linear(WIDTH, 13).bfloat16()

    def function(x, target):
        return F.cross_entropy(head(x).float().view(-1, 13), target.view(-1))

    stats = stats_of(function, ROWS.detach().bfloat16(), TARGETS)
    assert stats.matches == {"cross_entropy": 1}
    assert [one.reason for one in stats.refused] == ["the kernel gives bfloat16[] for float32[]"]


def test_an_activation_whose_input_is_used_again_stays():
    module = Activated()
    stats = stats_of(lambda x: (y := module.linear(x)) + module.activation(y), ROWS)
    assert stats.matches == {}
    assert "others use the result of linear" in stats.refused[0].reason


def test_nothing_is_moved_over_a_write_in_place():
    def function(x, gate):
        activated = F.silu(gate)
        gate.mul_(2)
        return activated * x

    stats = stats_of(function, ROWS.detach(), ROWS.detach().clone())
    assert stats.matches == {}
    assert stats.refused[0].reason == "something is written in place while it runs"


def test_a_residual_that_is_added_in_place_stays_in_place():
    def function(x, branch):
        before = x.view(-1)
        x += branch
        return F.layer_norm(x, (WIDTH,)) + before.sum()

    x, branch = ROWS.detach().clone(), ROWS.detach()
    fused = engine().fuse(function)(x.clone(), branch)
    torch.testing.assert_close(fused, function(x.clone(), branch))
    stats = stats_of(function, x, branch)
    assert stats.matches == {"layer_norm": 1}
    assert "writes into what others may read" in stats.refused[0].reason


def test_the_sum_may_be_used_before_the_norm():
    def function(x, branch):
        total = x + branch
        half = total / 2
        return F.layer_norm(total, (WIDTH,)) * half

    x, branch = ROWS, normal(2, 3, WIDTH, seed=1)
    fusing = engine()
    ours, wanted = step(fusing.fuse(function), [], x, branch), step(function, [], x, branch)
    assert fusing.get_fusion_stats().matches == {"add_layer_norm": 1}
    for one, other in zip(ours, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_a_block_of_autocast_that_ends_within_a_pattern_refuses_it():
    module = Activated(nn.SiLU())

    def function(x):
        with torch.autocast("cpu", torch.bfloat16):
            y = module.linear(x)
        return module.activation(y)

    assert "autocast" in stats_of(function, ROWS).refused[0].reason


def test_autocast_of_the_model_itself_is_kept():
    module = Activated()

    def function(x):
        with torch.autocast("cpu", torch.bfloat16):
            return module(x)

    fusing = engine()
    fused = fusing.fuse(function)(ROWS)
    assert fusing.get_fusion_stats().matches == {"linear_activation": 1}
    assert fused.dtype == torch.bfloat16
    torch.testing.assert_close(fused, function(ROWS), rtol=2e-2, atol=2e-2)


def test_a_pattern_is_of_a_kind_that_a_configuration_can_turn_off():
    with pytest.raises(SettingsError, match=r"Pattern\.kind"):
        Pattern("mine", "gather", lambda node: None)  # type: ignore[arg-type]
    assert len({pattern.name for pattern in PATTERNS}) == len(PATTERNS)


@pytest.mark.parametrize(
    ("flag", "module", "inputs"),
    [
        ("enable_elementwise", Gated, (ROWS,)),
        ("enable_reduction", Norm, (ROWS,)),
        ("enable_reduction", Attention, (normal(2, 4, 4),)),
        ("enable_reduction", BatchNormed, (normal(2, 6, 5, 5),)),
        ("enable_pooling", partial(nn.MaxPool2d, 2), (normal(2, 3, 4, 4),)),
        ("enable_elementwise", Activated, (ROWS,)),
        ("enable_matmul", partial(nn.Conv2d, 3, 6, 2, stride=2), (normal(2, 3, 4, 6),)),
    ],
)
def test_each_flag_turns_off_its_kind_and_no_other(flag, module, inputs):
    flags = ("enable_elementwise", "enable_reduction", "enable_matmul", "enable_pooling")
    assert stats_of(module(), *inputs, **{flag: False}).matches == {}
    assert stats_of(module(), *inputs, **{other: other == flag for other in flags}).matches


def test_without_matmul_the_loss_of_a_head_is_still_replaced():
    assert stats_of(Head(), ROWS, TARGETS, enable_matmul=False).matches == {"cross_entropy": 1}


def test_under_vmap_a_block_is_left_to_torch():
    _, make, (x,) = CASES["a block"]
    module = make()
    many = torch.stack([x.detach(), x.detach() * 2])
    ours = engine().fuse(torch.vmap(module))(many)
    torch.testing.assert_close(ours, torch.vmap(module)(many))


def test_a_block_before_vmap_and_one_after_it_are_found():
    _, make, (x,) = CASES["a block"]
    first, last, fusing = make(), make(), engine()

    def run(x):
        between = torch.vmap(torch.sin)(first(x))
        return last(between[..., :WIDTH])

    torch.testing.assert_close(fusing.fuse(run)(x), run(x))
    assert sum(fusing.get_fusion_stats().matches.values()) == 2 * sum(stats_of(make(), x).matches.values())


def test_gradients_of_each_image_are_left_to_torch():
    images = torch.randn(2, 3, 9, 7).contiguous(memory_format=torch.channels_last)

    def loss(weight, image):
        return F.conv2d(image[None], weight, None, 2, 1).sin().sum()

    each = torch.func.vmap(torch.func.grad(loss), (None, 0))
    weight = torch.randn(6, 3, 3, 3)
    torch.testing.assert_close(engine().fuse(each)(weight, images), each(weight, images))


def test_under_torch_func_a_norm_is_left_to_torch():
    slope = torch.func.grad(lambda x: F.layer_norm(x, (WIDTH,)).sin().sum())
    x = ROWS.detach()
    torch.testing.assert_close(engine().fuse(slope)(x), slope(x))


def test_what_is_computed_in_inference_mode_stays_there():
    def run(x, scale):
        with torch.inference_mode():
            total = x + x.sin()
        return F.layer_norm(total, (WIDTH,)) * scale

    fusing = engine()
    fusing.fuse(run)(ROWS.detach(), normal(WIDTH)).sum().backward()
    assert fusing.get_fusion_stats().matches == {"layer_norm": 1}
