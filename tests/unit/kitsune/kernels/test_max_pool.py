"""Max pooling against torch: windows of all kinds, memory formats, ties, NaN, infinities, dtypes, torch.compile."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from kitsune.kernels import max_pool as kernel
from kitsune.kernels.launch import DTYPES
from kitsune.kernels.max_pool import is_offered, max_pool, pair_of, reference

#: One unit in the last place, twice over: the interpreter cuts off where torch rounds.
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 2**-6, torch.float16: 2**-9}
CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor")
FORMATS = (torch.contiguous_format, torch.channels_last)
KERNELS = ((1, 1), (2, 2), (3, 3), (2, 3), (5, 4))
STRIDES = ((1, 1), (2, 2), (3, 2), (4, 5))
#: Each kernel with two strides, each stride with at least two kernels.
PAIRS = [pair for number, pair in enumerate(itertools.product(KERNELS, STRIDES)) if number % 2 == number // 4 % 2]


def drawn(device, *shape, dtype=torch.float32, memory_format=torch.contiguous_format):
    """Normal numbers, no two of them equal in fp32."""
    torch.manual_seed(0)
    return torch.randn(shape, device=device).to(dtype).contiguous(memory_format=memory_format)


def results(function, x, dy, *window):
    """(output, gradient)."""
    leaf = x.detach().requires_grad_()
    y = function(leaf, *window)
    return y.detach(), *torch.autograd.grad(y, leaf, dy.to(y.dtype))


def check(x, *window):
    """Output and gradient are those of torch in fp64, laid out as torch lays them out."""
    assert is_offered(x, *map(pair_of, window))
    torch.manual_seed(1)
    like = F.max_pool2d(x, *window)
    dy = torch.randn(like.shape, device=x.device).to(x.dtype)
    (y, dx), (exact, dexact) = results(max_pool, x, dy, *window), results(F.max_pool2d, x.double(), dy, *window)
    assert y.dtype == dx.dtype == x.dtype
    assert y.stride() == like.stride() and dx.stride() == x.stride()
    torch.testing.assert_close(y.double(), exact, rtol=0, atol=0, equal_nan=True)
    tolerance = TOLERANCES[x.dtype]
    torch.testing.assert_close(dx.double(), dexact, rtol=tolerance, atol=tolerance * (dexact.abs().max().item() + 1))


@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize(("size", "stride"), PAIRS)
def test_windows_of_every_size_and_stride(device, size, stride, memory_format):
    check(drawn(device, 1, 2, 6, 7, memory_format=memory_format), size, stride, (size[0] // 2, size[1] // 2))


@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize("size", KERNELS)
def test_windows_without_padding_or_with_it_on_two_sides(device, size, memory_format):
    for padding in {(0, 0), (size[0] // 2, 0)}:
        check(drawn(device, 1, 2, 6, 7, memory_format=memory_format), size, 2, padding)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("memory_format", FORMATS)
def test_every_dtype(device, memory_format, dtype):
    check(drawn(device, 1, 5, 5, 7, dtype=dtype, memory_format=memory_format), 3, 2, 1)


@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize(
    ("shape", "window"),
    [
        ((2, 3, 5, 7), (3, 2, 1)),
        ((2, 5, 1, 1), (1, 1, 0)),
        ((3, 4, 5, 1), (3, 2, 1)),
    ],
)
def test_images_of_every_size(device, shape, window, memory_format):
    check(drawn(device, *shape, memory_format=memory_format), *window)


@pytest.mark.parametrize("memory_format", FORMATS)
def test_an_image_may_have_many_tiles(device, monkeypatch, memory_format):
    for name, most in {"TILE": 16, "WIDEST_LAST": 4, "WIDEST_FIRST": 8}.items():
        monkeypatch.setattr(kernel, name, most)
    check(drawn(device, 2, 5, 5, 9, memory_format=memory_format), 3, 2, 1)
    check(drawn(device, 1, 3, 3, 7, memory_format=memory_format), (2, 3), (1, 2), (1, 0))


def test_tiles_are_not_small(device):
    for shape in ((1, 70, 5, 5), (1, 64, 57, 57), (1, 192, 19, 19), (1, 16, 37, 37)):
        for last in (False, True):
            _, high, wide = kernel.plan_of(torch.empty(shape, device=device), shape[2:], last).blocks
            assert high >= 8 and wide >= (16 if last or shape[3] > 8 else 8) and high * wide <= kernel.TILE


@pytest.mark.parametrize("memory_format", FORMATS)
def test_the_first_of_equal_elements_gets_the_gradient(device, memory_format):
    torch.manual_seed(0)
    x = torch.randint(-1, 2, (2, 3, 9, 8), device=device).float().contiguous(memory_format=memory_format)
    check(x, 3, 2, 1)
    check(torch.zeros_like(x), (3, 4), (2, 1), (1, 2))


@pytest.mark.parametrize("memory_format", FORMATS)
def test_padding_is_never_chosen_not_even_for_minus_infinity(device, memory_format):
    x = torch.full((1, 2, 6, 5), -torch.inf, device=device).contiguous(memory_format=memory_format)
    check(x, 3, 2, 1)
    x[:, :, 3] = 1.0
    check(x, (5, 3), 1, (2, 1))
    check(-x, 3, 2, 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("memory_format", FORMATS)
def test_what_is_not_a_number_shows_and_gets_the_gradient(device, memory_format, dtype):
    x = drawn(device, 1, 2, 9, 8, dtype=dtype, memory_format=memory_format)
    x[torch.rand(x.shape, device=device) < 0.2] = torch.nan
    x[0, 0, :5] = torch.inf
    x[0, 0, 2, 3] = torch.nan
    check(x, 3, 2, 1)
    check(x, 2, 1, 1)


def test_elements_may_have_gaps_between_them(device):
    x = drawn(device, 4, 3, 9, 8).transpose(0, 1)[:, ::2, 1:, ::2]
    dy = drawn(device, 3, 2, 4, 2)
    for ours, exact in zip(*(results(f, x, dy, 3, 2, 1) for f in (max_pool, F.max_pool2d)), strict=True):
        torch.testing.assert_close(ours, exact)


@pytest.mark.parametrize("memory_format", FORMATS)
def test_a_gradient_may_be_one_number_for_all_or_laid_out_in_another_way(device, memory_format):
    x = drawn(device, 2, 3, 6, 6, memory_format=memory_format)
    other = FORMATS[memory_format == FORMATS[0]]
    for dy in (torch.ones((), device=device).expand(2, 3, 3, 3), drawn(device, 2, 3, 3, 3, memory_format=other)):
        for ours, exact in zip(*(results(f, x, dy, 3, 2, 1) for f in (max_pool, F.max_pool2d)), strict=True):
            torch.testing.assert_close(ours, exact)


def test_sums_are_rounded_once(device):
    """Nine windows choose the same element, and in half precision each addition would be rounded."""
    x = torch.zeros(1, 1, 5, 5, device=device, dtype=torch.bfloat16)
    x[0, 0, 2, 2] = 1
    dy = torch.full((1, 1, 5, 5), 2**-8, device=device, dtype=torch.bfloat16)
    dy[0, 0, 1, 1] = 1
    _, dx = results(max_pool, x, dy, 3, 1, 1)
    assert dx[0, 0, 2, 2].item() == 1 + 8 * 2**-8


@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize("window", [(3, 2, 1), (2, 3, 0), (5, 1, 2)])
def test_nothing_is_written_beyond_the_end_and_every_element_is(device, monkeypatch, memory_format, window):
    beyond, plain = [], kernel.buffer_of

    def room(x, shape, last, dtype):
        like = plain(x, shape, last, dtype)
        memory = torch.full((like.numel() + 5000,), 77, device=x.device, dtype=dtype)
        beyond.append(memory[like.numel() :])
        return memory.as_strided(like.shape, like.stride())

    monkeypatch.setattr(kernel, "buffer_of", room)
    x = drawn(device, 1, 5, 7, 6, memory_format=memory_format)
    y, dx = results(max_pool, x, torch.ones_like(F.max_pool2d(x, *window)), *window)
    assert len(beyond) == 3 and all((memory == 77).all() for memory in beyond)
    assert not (y == 77).any() and not (dx == 77).any()


def test_the_same_input_gives_the_same_bits(device):
    x, dy = drawn(device, 2, 3, 9, 8), drawn(device, 2, 3, 9, 8)
    assert all(map(torch.equal, *(results(max_pool, x, dy, 3, 1, 1) for _ in range(2))))


@pytest.mark.parametrize(
    ("shape", "dtype", "window"),
    [
        ((1, 2, 9, 9), torch.float32, (6, 1, 0)),
        ((1, 2, 9, 9), torch.float32, (2, 6, 0)),
        ((1, 2, 9, 9), torch.float64, (3, 2, 1)),
        ((2, 9, 9), torch.float32, (3, 2, 1)),
        ((0, 2, 9, 9), torch.float32, (3, 2, 1)),
    ],
)
def test_what_the_kernel_does_not_take_is_computed_all_the_same(device, shape, dtype, window):
    x = drawn(device, *shape, dtype=dtype)
    assert not is_offered(x, *map(pair_of, window))
    dy = torch.ones_like(F.max_pool2d(x, *window))
    assert all(map(torch.equal, results(max_pool, x, dy, *window), results(F.max_pool2d, x, dy, *window)))


@pytest.mark.parametrize("window", [(3, 2, 2), (0, 1, 0), (3, 0, 1), (5, 1, 0)])
def test_what_torch_refuses_is_refused(device, window):
    with pytest.raises(RuntimeError):
        max_pool(drawn(device, 1, 2, 4, 4), *window)


def test_an_image_too_large_for_int32_goes_through_the_reference(device, monkeypatch):
    monkeypatch.setattr(kernel, "LARGEST_IMAGE", 31)
    assert is_offered(drawn(device, 9, 1, 4, 4), (2, 2), (2, 2), (0, 0))
    assert not is_offered(drawn(device, 1, 2, 4, 4), (2, 2), (2, 2), (0, 0))


@pytest.mark.parametrize("memory_format", FORMATS)
def test_the_operators_are_what_torch_asks_of_them(device, memory_format):
    x = drawn(device, 2, 3, 7, 6, memory_format=memory_format).requires_grad_()
    window = [3, 3], [2, 2], [1, 1]
    torch.library.opcheck(kernel.forward, (x, *window), test_utils=CHECKS)
    y, chosen = kernel.forward(x.detach(), *window)
    last = memory_format == torch.channels_last
    torch.library.opcheck(kernel.backward, (y, chosen, list(x.shape), last, *window), test_utils=CHECKS)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(("memory_format", "dynamic"), [(FORMATS[0], False), (FORMATS[1], True)])
def test_a_compiled_model_keeps_it_whole(device, memory_format, dynamic):
    x, dy = drawn(device, 2, 3, 8, 6, memory_format=memory_format), drawn(device, 2, 3, 4, 3)
    compiled = torch.compile(max_pool, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    ours, theirs = (results(f, x, dy, 3, 2, 1) for f in (compiled, reference))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)
    assert [one.stride() for one in ours] == [one.stride() for one in theirs]


class Nothing(torch.autograd.Function):
    @staticmethod
    def forward(_, x):
        return x * 2

    @staticmethod
    def backward(*_):
        return None


def test_where_nothing_behind_it_gives_a_gradient_it_gives_none(device):
    x = drawn(device, 1, 2, 4, 4).requires_grad_()
    assert torch.autograd.grad(Nothing.apply(max_pool(x, 2, 2)).sum(), x, allow_unused=True) == (None,)
