"""Cross entropy against its eager reference: loss, gradient, ignored and impossible targets, layouts, torch.compile."""

import pytest
import torch
import torch.nn.functional as F

from kitsune.kernels import cross_entropy as kernel
from kitsune.kernels.cross_entropy import REDUCTIONS, cross_entropy, reference
from kitsune.kernels.launch import DTYPES

#: One unit in the last place, twice over: the interpreter cuts off where torch rounds, and sums go in another order.
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 2**-6, torch.float16: 2**-9}


def draw(device, shape, dtype=torch.float32, ignored=0):
    """(logits, target), so many targets of them ignored."""
    torch.manual_seed(0)
    logits = (2 * torch.randn(shape, device=device)).to(dtype)
    target = torch.randint(shape[1], (shape[0], *shape[2:]), device=device)
    target.view(-1)[:ignored] = -100
    return logits, target


def both(logits, target, *settings, function=cross_entropy):
    """(loss, gradient of the logits) by the kernel and by the reference in fp64, for the same inputs."""
    results = []
    for compute, given in ((function, logits.detach()), (reference, logits.detach().double())):
        leaf = given.requires_grad_()
        loss = compute(leaf, target, *settings)
        torch.manual_seed(1)
        loss.backward(torch.randn(loss.shape, device=loss.device, dtype=torch.float64).to(logits.dtype).to(loss.dtype))
        results.append((loss.detach(), leaf.grad))
    return zip(*results, strict=True)


def assert_near(results, dtype):
    for ours, exact in results:
        assert ours.dtype == dtype
        scale = exact.abs().max().item() + 1
        torch.testing.assert_close(ours.double(), exact, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype] * scale)


@pytest.fixture
def no_way_out(monkeypatch):
    """The reference is out of reach: what is computed is computed by the kernels."""
    monkeypatch.setattr(kernel, "reference", None)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "ignored"), [((1, 1), 0), ((5, 7), 2), ((70, 20), 9), ((2, 1000), 0), ((3, 5003), 1)]
)
def test_it_computes_what_the_reference_does(no_way_out, device, dtype, shape, ignored):
    logits, target = draw(device, shape, dtype, ignored)
    assert_near(both(logits, target), dtype)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
def test_it_knows_what_torch_knows_of_reductions_and_smoothing(no_way_out, device, smoothing, reduction):
    for dtype in DTYPES:
        assert_near(both(*draw(device, (5, 37), dtype, 2), -100, smoothing, reduction), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_cast", [False, True])
def test_the_loss_is_in_the_dtype_that_torch_gives_it(device, dtype, is_cast):
    logits, target = draw(device, (3, 5), dtype)
    with torch.autocast(device.type, torch.bfloat16, enabled=is_cast):
        expected = F.cross_entropy(logits, target).dtype
        assert cross_entropy(logits, target).dtype == expected
        assert reference(logits, target).dtype == expected


def test_a_mean_over_ignored_targets_is_nan_and_has_no_gradient(device):
    logits, _ = draw(device, (3, 5))
    logits.requires_grad_()
    loss = cross_entropy(logits, torch.full((3,), 4, device=device), ignore_index=4)
    loss.backward()
    assert loss.isnan()
    assert torch.equal(logits.grad, torch.zeros_like(logits))


def test_a_sum_over_ignored_targets_is_zero(device):
    logits, _ = draw(device, (3, 5))
    assert cross_entropy(logits, torch.full((3,), -1, device=device), ignore_index=-1, reduction="sum") == 0


@pytest.mark.parametrize("wrong", [-1, 5, 2**32])
def test_a_target_that_is_no_class_spoils_its_row_alone(device, wrong):
    logits, target = draw(device, (3, 5))
    target[1] = wrong
    logits.requires_grad_()
    losses = cross_entropy(logits, target, reduction="none")
    losses.sum().backward()
    assert losses.isnan().tolist() == [False, True, False]
    assert logits.grad.isnan().all(1).tolist() == [False, True, False]


def test_logits_may_be_masked_by_infinity_and_by_the_least_number(device):
    logits, target = draw(device, (3, 5003))
    logits[0, :4999], target[0] = -torch.inf, 5000
    logits[1, 1:], target[1] = torch.finfo(torch.float32).min, 0
    logits[2, 1:], target[2] = torch.finfo(torch.float32).min, 1
    assert_near(both(logits, target, -100, 0.0, "none"), torch.float32)


def test_large_logits_do_not_overflow_or_blur_the_loss(device):
    logits = torch.tensor([[1e6, 1e6, -1e6], [3e6, 0.0, 3e6]], device=device)
    loss = cross_entropy(logits, torch.tensor([0, 2], device=device), reduction="none")
    torch.testing.assert_close(loss, torch.full_like(loss, 2.0).log())


@pytest.mark.parametrize("cut", [lambda wide: wide[:, :50], lambda wide: wide[:, ::2], lambda wide: wide.T[:32]])
def test_rows_may_have_gaps_between_them(no_way_out, device, cut):
    wide, target = draw(device, (64, 64))
    logits = cut(wide)
    assert_near(both(logits, target[: len(logits)] % logits.shape[1]), torch.float32)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_padding_behind_the_rows_is_not_read_and_gets_no_gradient(no_way_out, device, reduction):
    wide, target = draw(device, (7, 64))
    wide.fill_(torch.nan)
    logits = wide[:, :50].copy_(torch.randn(7, 50, device=device))
    target = target % 50
    assert kernel.width_of(logits) == 64
    assert_near(both(logits, target, -100, 0.1, reduction), torch.float32)
    loss, *kept = kernel.forward(logits, target, -100, 0.1, reduction, torch.float32)
    memory = torch.full((7, 64), 7.0, device=device)
    kernel.write_backward(memory[:, :50], torch.ones_like(loss), logits, target, *kept, -100, 0.1)
    wanted = kernel.backward(torch.ones_like(loss), logits, target, *kept, -100, 0.1)
    assert torch.equal(memory[:, :50], wanted) and not memory[:, 50:].any()


def test_what_is_no_padding_of_the_tensors_own_is_left_alone(device):
    wide = torch.zeros(7, 64, device=device)
    assert kernel.width_of(wide) == 64
    assert kernel.width_of(wide[:, 14:]) == 50, "the padding of the last row is not there"
    assert kernel.width_of(torch.zeros(7, 200, device=device)[:, :50]) == 50, "there is too much of it"


def test_classes_before_other_dimensions_are_found(no_way_out, device):
    logits, target = draw(device, (2, 7, 3, 4))
    logits = logits.contiguous(memory_format=torch.channels_last)
    for reduction in REDUCTIONS:
        assert_near(both(logits, target, -100, 0.1, reduction), torch.float32)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_classes_that_do_not_lie_side_by_side_go_through_the_reference(monkeypatch, device, reduction):
    monkeypatch.setattr(kernel, "forward", None)
    assert_near(both(*draw(device, (2, 7, 3, 4)), -100, 0.0, reduction), torch.float32)


def test_nothing_is_launched_for_nothing(monkeypatch, device):
    monkeypatch.setattr(kernel, "forward", None)
    logits, target = torch.ones(0, 8, device=device, requires_grad=True), torch.ones(0, device=device).long()
    loss = cross_entropy(logits, target)
    loss.backward()
    assert loss.isnan()
    assert logits.grad.shape == (0, 8)
    assert cross_entropy(logits, target, reduction="none").shape == (0,)


def test_the_same_input_gives_the_same_bits(device):
    logits, target = draw(device, (500, 33), ignored=3)
    first, second = (kernel.forward(logits, target, -100, 0.1, "mean", torch.float32) for _ in range(2))
    assert all(map(torch.equal, first, second))
    grads = [kernel.backward(first[0], logits, target, *first[1:], -100, 0.1) for _ in range(2)]
    assert torch.equal(*grads)


def test_what_the_kernels_do_not_offer_is_computed_all_the_same(device):
    logits, target = draw(device, (3, 8))
    wide, shares = logits.double(), logits.softmax(1)
    assert torch.equal(cross_entropy(wide, target), reference(wide, target))
    assert torch.equal(cross_entropy(logits, shares), reference(logits, shares))
    assert torch.equal(cross_entropy(logits[0], target[0]), reference(logits[0], target[0]))


def test_what_torch_refuses_is_refused_by_torch(device):
    logits, target = draw(device, (3, 8))
    with pytest.raises(ValueError, match="average is not a valid value"):
        cross_entropy(logits, target, reduction="average")
    with pytest.raises(RuntimeError, match="label_smoothing must be between"):
        cross_entropy(logits, target, label_smoothing=1.5)
    with pytest.raises(ValueError, match="batch_size"):
        cross_entropy(logits, target[:2])


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_the_operator_is_what_torch_asks_of_one(device, reduction):
    logits, target = draw(device, (3, 5), ignored=1)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    settings = (-100, 0.1, reduction, torch.float32)
    torch.library.opcheck(kernel.forward, (logits.requires_grad_(), target, *settings), test_utils=checks)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_model_keeps_it_whole(device):
    logits, target = draw(device, (3, 5), ignored=1)
    compiled = torch.compile(cross_entropy, fullgraph=True, backend="aot_eager")
    assert_near(both(logits, target, -100, 0.1, "mean", function=compiled), torch.float32)
