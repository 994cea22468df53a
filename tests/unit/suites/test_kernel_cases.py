"""The cases of suite kernels: both arms compute the same thing, each by what it is named after."""

import pytest
import torch

from benchmarks.kernel_cases import KERNELS, parameter_sizes
from benchmarks.kernel_runs import DTYPES, Place
from benchmarks.kernel_shapes import DROPPED, MODELS
from kitsune.kernels import (
    adamw,
    add_norm,
    attention,
    batch_norm_relu,
    bias_activation,
    casts,
    cross_entropy,
    dropout_add,
    gated_linear,
    layer_norm,
    linear_activation,
    linear_cross_entropy,
    max_pool,
    pointwise_convolution,
    rms_norm,
    rope,
    softmax,
    stem_convolution,
    swiglu,
)

MODULES = (
    adamw,
    add_norm,
    attention,
    batch_norm_relu,
    bias_activation,
    casts,
    cross_entropy,
    dropout_add,
    gated_linear,
    layer_norm,
    linear_activation,
    linear_cross_entropy,
    max_pool,
    pointwise_convolution,
    rms_norm,
    rope,
    softmax,
    stem_convolution,
    swiglu,
)
TINY = {
    "softmax_causal": (2, 3, 17),
    "softmax_masked": (2, 3, 17),
    "rope": (2, 3, 5, 8),
    "mlp_gelu": (6, 16, 32),
    "gated_mlp": (6, 16, 32),
    "linear_cross_entropy": (6, 16, 33),
    **dict.fromkeys(("attention", "projected_attention"), (2, 3, 17, 16, 0.0, True)),
    **{name: (3, 5, 4, 6) for name in KERNELS if name.startswith("batch_norm")},
    **{name: (2, 5, 7, 6, 3, 2, 1) for name in KERNELS if name.startswith("max_pool")},
    "patch_convolution": (2, 3, 8, 5, 4),
    "stem_convolution": (2, 8, 5, 3, 2, 1),
    "pointwise_convolution": (2, 8, 16, 5),
    **dict.fromkeys(("adamw", "casts", "casts_back"), ((7, 3), (5,), (2, 3, 2, 2))),
}
#: Eager rounds every intermediate in half precision, our kernels round once.
TOLERANCES = {"fp32": 2e-5, "bf16": 0.05, "fp16": 0.01}


@pytest.fixture
def no_reference(monkeypatch):
    """Our kernels must not give the work back to eager torch, nor may an eager arm be our slow reference."""

    def refused(*_, **__):
        raise AssertionError("a reference was measured")

    for module in MODULES:
        for name in ("reference", "rms_reference"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, refused)


def made(name, dtype="fp32", sizes=None):
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return KERNELS[name].make(sizes or TINY.get(name, (6, 32)), Place(DTYPES[dtype], device))


def tensors_of(ran):
    """What a run gave, in one list."""
    return [ran.detach()] if isinstance(ran, torch.Tensor) else [each for part in ran for each in tensors_of(part)]


@pytest.mark.parametrize("name", [name for name in KERNELS if name != "dropout_add"])
def test_every_arm_computes_the_same(name, no_reference):
    dtype = KERNELS[name].dtypes[-1]
    builds = made(name, dtype).builds()
    assert list(builds) == ["eager", "inductor", "kitsune"]
    eager, ours = builds["eager"](), builds["kitsune"]()
    for _ in range(2):  # a second run is a first one again, or an optimizer's second update
        expected, found = tensors_of(eager()), tensors_of(ours())
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        scale = other.abs().max().item()
        torch.testing.assert_close(one, other, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype] * (scale + 1e-3))


@pytest.mark.parametrize("arm", ["eager", "kitsune"])
def test_dropout_keeps_what_it_says_and_scales_it(arm, no_reference):
    operation = made("dropout_add", sizes=(64, 128))
    x, residual = operation.inputs
    (y,), (dx, dresidual) = operation.builds()[arm]()()
    kept = (y - residual).abs() > 1e-6
    assert kept.float().mean().item() == pytest.approx(1 - DROPPED, abs=0.02)
    torch.testing.assert_close((y - residual)[kept], x[kept] / (1 - DROPPED), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(dx, kept * dresidual / (1 - DROPPED))


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_is_measured_in_six_shapes_or_more(name):
    shapes = KERNELS[name].shapes
    assert len(shapes) >= 6
    assert len(set(map(str, shapes.values()))) == len(shapes)


@pytest.mark.parametrize("model", MODELS.values())
def test_an_update_is_of_a_models_own_parameters(model):
    sizes = parameter_sizes(model)
    assert all(len(size) > 0 for size in sizes)
    if model == "bert_base":
        assert sum(size.numel() for size in sizes) > 100e6


def test_causal_scores_are_masked_above_the_diagonal_and_padded_ones_at_the_end():
    causal = tensors_of(made("softmax_causal", sizes=(1, 2, 8)).builds()["eager"]()())[0]
    assert causal.triu(1).eq(0).all() and causal.tril().gt(0).sum() == 2 * 36
    padded = tensors_of(made("softmax_masked", sizes=(2, 2, 8)).builds()["eager"]()())[0]
    assert padded[0].gt(0).all() and padded[1, ..., 4:].eq(0).all()
