"""The first convolution of a network against torch's: windows, layouts, odd sizes, gradients."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kitsune.kernels import stem_convolution as kernel
from kitsune.kernels.launch import IS_INTERPRETED
from kitsune.kernels.stem_convolution import is_offered, stem_convolution

pytestmark = pytest.mark.skipif(not IS_INTERPRETED, reason="tiles of the GPU are tested in tests/gpu")
#: (images, channels, height, width), (out, height, width of the kernel), stride, padding
LAYERS = {
    "7 x 7": ((2, 3, 20, 18), (24, 7, 7), (2, 2), (3, 3)),
    "3 x 3": ((2, 3, 9, 8), (16, 3, 3), (1, 1), (1, 1)),
    "of no even sizes": ((3, 2, 11, 13), (19, 5, 3), (3, 1), (2, 0)),
    "one channel, without padding": ((2, 1, 12, 12), (6, 5, 5), (1, 1), (0, 0)),
    "more padding than kernel": ((1, 4, 4, 5), (3, 2, 1), (2, 3), (3, 2)),
    "more channels than a tile": ((1, 3, 8, 8), (40, 3, 3), (2, 2), (1, 1)),
}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Several tiles and programs in tiny shapes."""
    for name, size in {"HIGH": 32, "WIDE": 32, "DEEP": 16, "PROGRAMS": 3}.items():
        monkeypatch.setattr(kernel, name, size)


def draw(device, name, dtype=torch.float32):
    torch.manual_seed(0)
    shape, (out, *sizes), *window = LAYERS[name]
    x = torch.randn(shape, device=device).to(dtype).contiguous(memory_format=torch.channels_last)
    return x, torch.randn(out, shape[1], *sizes, device=device).to(dtype), *window


def results_of(function, x, weight, stride, padding):
    """(result, gradient of the weight)."""
    weight = weight.detach().requires_grad_()
    y = function(x, weight, stride, padding)
    slopes = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y)
    return y.detach(), *torch.autograd.grad(y, weight, slopes)


def torchs(x, weight, stride, padding):
    return F.conv2d(x.double(), weight.double(), None, stride, padding)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("name", LAYERS)
def test_it_is_torchs_convolution(monkeypatch, device, name, dtype):
    given = draw(device, name, dtype)
    assert is_offered(*given)
    exact = results_of(torchs, *given)
    monkeypatch.setattr(F, "conv2d", None)
    found = results_of(stem_convolution, *given)
    for one, other in zip(found, exact, strict=True):
        assert one.dtype == dtype
        tolerance = 1e-5 if dtype == torch.float32 else 4e-3
        error = (one.double() - other.double()).norm() / other.norm()
        assert error < tolerance
    assert found[0].is_contiguous(memory_format=torch.channels_last)


def test_a_gradient_in_another_layout_and_a_weight_that_is_channels_last(device):
    x, weight, *window = draw(device, "7 x 7")
    weight = weight.contiguous(memory_format=torch.channels_last).requires_grad_()
    y = stem_convolution(x, weight, *window)
    y.sum().backward()
    exact = torch.autograd.grad(F.conv2d(x, weight, None, *window).sum(), weight)[0]
    torch.testing.assert_close(weight.grad, exact, rtol=1e-4, atol=1e-4)
    assert weight.grad.stride() == weight.stride()


def test_an_image_may_need_a_gradient_and_a_weight_none(device):
    x, weight, *window = draw(device, "3 x 3")
    x.requires_grad_()
    stem_convolution(x, weight, *window).sum().backward()
    exact = torch.autograd.grad(F.conv2d(x, weight, None, *window).sum(), x)[0]
    torch.testing.assert_close(x.grad, exact)


@pytest.mark.parametrize(("name", "around"), [("3 x 3", 0), ("7 x 7", 1)])
def test_what_is_not_a_number_shows_where_a_window_has_it_and_less_than_a_stride_around(device, name, around):
    x, weight, *window = draw(device, name)
    x[0, 1, 5, 4] = torch.nan
    found = stem_convolution(x, weight, *window).isnan()
    exact = F.conv2d(x, weight, None, *window).isnan()
    wider = F.max_pool2d(exact.float(), 2 * around + 1, 1, around).bool()
    assert (exact <= found).all() and (found <= wider).all()


@pytest.mark.parametrize(
    "change",
    [
        lambda x, weight: (x.contiguous(), weight),
        lambda x, weight: (x.double(), weight.double()),
        lambda *given: [torch.cat((each, each), 1).contiguous(memory_format=torch.channels_last) for each in given],
        lambda x, weight: (x[:0], weight),
        lambda x, weight: (x, F.pad(weight, (2, 2, 2, 2))),
    ],
    ids=["channels first", "fp64", "six channels", "no images", "11 x 11"],
)
def test_what_the_kernels_do_not_support_is_torchs(device, change):
    x, weight, *window = draw(device, "7 x 7")
    x, weight = change(x, weight)
    assert not is_offered(x, weight, *window)
    torch.testing.assert_close(stem_convolution(x, weight, *window), F.conv2d(x, weight, None, *window))


def test_a_window_larger_than_the_image_raises_what_torch_raises(device):
    x, weight, *_ = draw(device, "7 x 7")
    with pytest.raises(RuntimeError, match=r"Kernel size can't be greater"):
        stem_convolution(x[:, :, :2], weight, (1, 1), (0, 0))


def test_the_same_input_gives_the_same_bits(device):
    given = draw(device, "7 x 7")
    assert all(map(torch.equal, results_of(stem_convolution, *given), results_of(stem_convolution, *given)))


def test_the_operators_are_what_torch_asks_of_them(device):
    x, weight = kernel.in_blocks(*draw(device, "3 x 3"))
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(kernel.forward, (x, weight.detach().requires_grad_()), test_utils=checks)
    dy = torch.randn_like(kernel.results_of(x, weight))
    torch.library.opcheck(kernel.backward, (dy, x, weight.detach()), test_utils=checks)


sizes = st.tuples(st.integers(1, 30), st.integers(1, 11), st.integers(1, 4), st.integers(0, 6))


@given(rows=sizes, columns=sizes, channels=st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_in_blocks_it_is_the_same_convolution(rows, columns, channels):
    assume(all(size + 2 * padding >= kernel for size, kernel, _, padding in (rows, columns)))
    torch.manual_seed(0)
    (high, tall, *_), (wide, broad, *_) = rows, columns
    x, weight = torch.randn(2, channels, high, wide), torch.randn(3, channels, tall, broad)
    stride, padding = (rows[2], columns[2]), (rows[3], columns[3])
    images, kernels = kernel.in_blocks(x, weight, stride, padding)
    assert images.shape[1] % kernel.LOADED == 0 and images.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(
        F.conv2d(images, kernels), F.conv2d(x, weight, None, stride, padding), rtol=1e-4, atol=1e-4
    )
