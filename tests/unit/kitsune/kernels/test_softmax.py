"""Softmax against its eager reference: masks of every kind and shape, the diagonal, dead rows, gradients, dtypes."""

import pytest
import torch
import torch.nn.functional as F

from kitsune.kernels import softmax as kernel
from kitsune.kernels.launch import DTYPES, MOST_IN_A_BLOCK
from kitsune.kernels.softmax import dimensions_of, is_offered, reference, softmax

#: One unit in the last place, twice over: the interpreter cuts off where torch rounds, and sums go in another order.
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 2**-6, torch.float16: 2**-9}
CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor")


def both(x, mask, scale, causal):
    """(output, gradient) by the kernel and by the reference in fp64, for the same inputs."""
    dy = torch.randn(x.shape, device=x.device).to(x.dtype)
    results = []
    for function, wide in ((softmax, False), (reference, True)):
        leaf = (x.detach().double() if wide else x.detach()).requires_grad_()
        y = function(leaf, mask, scale, causal)
        y.backward(dy.to(y.dtype))
        results.append((y.detach(), leaf.grad))
    return zip(*results, strict=True)


def assert_same(x, mask=None, scale=1.0, causal=False, tolerance=2e-6):
    assert is_offered(x, mask, causal)
    for ours, exact in both(x, mask, scale, causal):
        assert ours.dtype == x.dtype
        torch.testing.assert_close(ours.double(), exact, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (7,), (2, 3, 64), (1, 1000), (300, 17), (2, 2100)])
def test_it_computes_what_the_reference_does(device, dtype, shape):
    torch.manual_seed(0)
    assert_same(3 * torch.randn(shape, device=device).to(dtype), tolerance=TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 40, 40), (50, 7), (4, 1, 9)])
def test_nothing_beyond_the_diagonal_is_kept(device, dtype, shape):
    x = torch.randn(shape, device=device).to(dtype)
    assert_same(x, scale=0.3, causal=True, tolerance=TOLERANCES[dtype])
    assert not softmax(x, causal=True).triu(1).any()


def test_the_diagonal_is_that_of_attention(device):
    query, key = torch.randn(2, 3, 5, 4, device=device), torch.randn(2, 3, 9, 4, device=device)
    value = torch.randn(2, 3, 9, 6, device=device)
    ours = softmax(query @ key.transpose(-1, -2), scale=0.5, causal=True) @ value
    torch.testing.assert_close(ours, F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=0.5))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", ["boolean", "added"])
@pytest.mark.parametrize("shape", [(), (9,), (7, 1), (3, 1, 9), (2, 1, 7, 9), (2, 3, 7, 9)])
def test_a_mask_is_broadcast(device, shape, kind, causal):
    torch.manual_seed(0)
    x, noise = torch.randn(2, 3, 7, 9, device=device), torch.randn(shape, device=device)
    assert_same(x, noise > -0.5 if kind == "boolean" else noise, scale=0.4, causal=causal)


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_added_mask_has_a_dtype_of_its_own(device, dtype):
    x, mask = torch.randn(3, 20, device=device), torch.randn(20, device=device)
    assert_same(x, mask.to(dtype))
    assert_same(x.bfloat16(), mask.to(dtype), tolerance=2**-6)


@pytest.mark.parametrize("causal", [False, True])
def test_masks_and_scores_may_have_gaps(device, causal):
    x = torch.randn(3, 2, 9, 14, device=device).transpose(0, 1)[..., ::2]
    assert_same(x, torch.randn(7, 18, device=device)[:, ::2].t(), causal=causal)
    assert_same(x, (torch.randn(5, 2, 9, 8, device=device) > 0)[::3].transpose(0, 1)[..., :7][:, :1], causal=causal)


def test_windows_of_an_image_share_their_masks(device):
    """As in a Swin transformer: (images, windows, heads, n, n) under (1, windows, 1, n, n)."""
    x, mask = torch.randn(2, 3, 2, 4, 4, device=device), torch.rand(1, 3, 1, 4, 4, device=device) > 0.3
    assert dimensions_of(x, mask, False) == [(2, 0), (3, 16), (2, 0), (4, 4)]
    assert_same(x, mask)
    assert_same(x, mask, causal=True)


def test_neighbours_that_one_stride_goes_through_are_one_dimension(device):
    x = torch.randn(2, 3, 1, 7, 9, device=device)
    assert dimensions_of(x, None, False) == [(42, 0)]
    assert dimensions_of(x, None, True) == [(6, 0), (7, 0)]
    assert dimensions_of(x, torch.ones_like(x), False) == [(42, 9)]
    assert dimensions_of(x, x[:, :1], True) == [(2, 189), (3, 0), (7, 9)]


@pytest.mark.parametrize("causal", [False, True])
def test_more_strides_than_the_kernel_tells_apart_go_through_the_reference(device, causal):
    x, mask = torch.randn(2, 2, 2, 2, 3, 4, device=device), torch.rand(2, 1, 2, 1, 3, 4, device=device) > 0.3
    assert not is_offered(x, mask, causal)
    assert torch.equal(softmax(x, mask, 0.5, causal), reference(x, mask, 0.5, causal))


@pytest.mark.parametrize(
    "mask", [torch.zeros(4, 6, dtype=torch.bool), torch.full((4, 6), -torch.inf), torch.tensor(-torch.inf)]
)
@pytest.mark.parametrize("function", [softmax, reference])
def test_a_row_of_which_nothing_is_kept_is_zero_and_so_are_its_gradients(device, mask, function):
    mask = mask.to(device)
    if mask.dim():
        mask[1] = True if mask.dtype == torch.bool else 0.0
    x = torch.randn(4, 6, device=device, requires_grad=True)
    y = function(x, mask)
    (y * torch.randn_like(y)).sum().backward()
    dead = [0, 2, 3]
    assert not y[dead].any() and not x.grad[dead].any()
    assert not mask.dim() or (y[1] > 0).all()


def test_a_score_that_is_no_number_shows(device):
    x = torch.randn(3, 5, device=device)
    x[1, 2] = torch.nan
    assert torch.equal(softmax(x).isnan().any(-1).cpu(), torch.tensor([False, True, False]))
    keep = torch.ones(5, dtype=torch.bool, device=device)
    keep[2] = False
    assert not softmax(x, keep).isnan().any()


def test_large_scores_do_not_overflow(device):
    x = torch.tensor([[1e4, 1e4 - 1, -1e4], [-1e4, -1e4, -1e4]], device=device)
    assert_same(x)
    assert_same(x, torch.tensor([0.0, torch.finfo(torch.float32).min, 0.0], device=device))


def test_an_added_mask_that_learns_goes_through_the_reference(device):
    x, mask = torch.randn(3, 4, device=device), torch.randn(4, device=device, requires_grad=True)
    ours, theirs = (torch.autograd.grad(f(x, mask).square().sum(), mask) for f in (softmax, reference))
    assert torch.equal(*ours, *theirs) and ours[0].any()


@pytest.mark.parametrize("shape", [(0, 8), (4, 0), (0, 0), (2, 0, 5), (2, 5, 0)])
@pytest.mark.parametrize("causal", [False, True])
def test_nothing_is_launched_for_nothing(device, shape, causal):
    x = torch.ones(shape, device=device, requires_grad=True)
    for function in (softmax, reference):
        y = function(x, torch.ones(shape[-1], dtype=torch.bool, device=device), 1.0, causal)
        y.sum().backward()
        assert y.shape == x.grad.shape == shape


def test_a_mask_that_does_not_fit_is_refused(device):
    x = torch.randn(3, 4, device=device)
    for shape in [(3,), (2, 3, 4)]:
        for function in (softmax, reference):
            with pytest.raises(RuntimeError, match="expand"):
                function(x, torch.ones(shape, device=device))


def test_the_same_input_gives_the_same_bits(device):
    x = torch.randn(40, 33, device=device)
    assert torch.equal(kernel.forward(x, None, 1.0, True), kernel.forward(x, None, 1.0, True))
    assert torch.equal(kernel.backward(x, x, 1.0, True), kernel.backward(x, x, 1.0, True))


def test_what_triton_does_not_reach_is_computed_all_the_same(device):
    x, mask = torch.randn(3, 8, device=device), torch.randn(8, device=device)
    long = torch.randn(2, MOST_IN_A_BLOCK + 1, device=device)
    for given in ((x.double(), mask), (x, mask.double()), (long, None)):
        assert torch.equal(softmax(*given), reference(*given))


@pytest.mark.parametrize("mask", [None, torch.ones(5, dtype=torch.bool), torch.randn(3, 1)])
def test_the_operators_are_what_torch_asks_of_them(device, mask):
    x = torch.randn(3, 5, device=device, requires_grad=True)
    mask = None if mask is None else mask.to(device)
    torch.library.opcheck(kernel.forward, (x, mask, 0.5, True), test_utils=CHECKS)
    torch.library.opcheck(kernel.backward, (x.detach(), x.detach(), 0.5, True), test_utils=CHECKS)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_model_keeps_it_whole(device):
    x, mask = torch.randn(2, 3, 4, 5, device=device, requires_grad=True), torch.rand(2, 1, 1, 5, device=device) > 0.3
    compiled = torch.compile(lambda x: softmax(x, mask, 0.5, True), fullgraph=True, backend="aot_eager")
    ours, theirs = (
        torch.autograd.grad(f(x).square().sum(), x) for f in (compiled, lambda x: reference(x, mask, 0.5, True))
    )
    torch.testing.assert_close(ours, theirs)
