"""Linear cross entropy against its eager reference: loss and gradients by chunks, second backwards, fp16, autocast."""

import pytest
import torch
from torch._functorch import config as functorch

from kitsune.kernels import linear_cross_entropy as kernel
from kitsune.kernels.launch import DTYPES
from kitsune.kernels.linear_cross_entropy import linear_cross_entropy, reference

#: Of the norm of what is compared: logits and their gradient are rounded to the dtype (by the interpreter, cut off).
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}


@pytest.fixture
def small_chunks(monkeypatch):
    """Chunks of 64 rows, at most three; and the reference out of reach."""
    monkeypatch.setattr(kernel, "LOGITS_BYTES", 1)
    monkeypatch.setattr(kernel, "LEAST_ROWS", 64)
    monkeypatch.setattr(kernel, "MOST_CHUNKS", 3)
    monkeypatch.setattr(kernel, "reference", None)


def draw(device, rows, hidden, classes, dtype=torch.float32, ignored=0):
    """(x, weight, bias, target), so many targets of them ignored; the first three want gradients."""
    torch.manual_seed(0)
    x, weight, bias = (torch.randn(shape, device=device) for shape in ((rows, hidden), (classes, hidden), (classes,)))
    target = torch.randint(classes, (rows,), device=device)
    target[:ignored] = -100
    return *(tensor.to(dtype).requires_grad_() for tensor in (x, weight, bias)), target


def wide(*tensors):
    return [tensor.detach().double().requires_grad_() for tensor in tensors]


def assert_near(ours, exact, dtype):
    assert ours.dtype == dtype
    assert ours.shape == exact.shape
    error = (ours.double() - exact).norm() / exact.norm()
    assert error <= TOLERANCES[dtype], error


def assert_same_as_reference(x, weight, bias, target, *settings, function=linear_cross_entropy):
    """Loss and all gradients, by the kernel and by the reference in fp64, for the same inputs."""
    loss = function(x, weight, target, bias, *settings)
    dloss = torch.tensor(0.75, device=x.device)
    loss.backward(dloss.to(loss.dtype))
    leaves = [tensor for tensor in (x, weight, bias) if tensor is not None]
    exact_leaves = wide(*leaves)
    exact = reference(*exact_leaves[:2], target, *(exact_leaves[2:] or [None]), *settings)
    exact.backward(dloss.double())
    assert_near(loss.detach(), exact.detach(), x.dtype)
    for leaf, exact_leaf in zip(leaves, exact_leaves, strict=True):
        assert_near(leaf.grad, exact_leaf.grad, x.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "hidden", "classes", "ignored"),
    [(1, 1, 2, 0), (5, 7, 3, 2), (150, 30, 100, 40), (64, 4, 64, 0), (3, 8, 5003, 1)],
)
def test_it_computes_what_the_reference_does(small_chunks, device, dtype, rows, hidden, classes, ignored):
    x, weight, bias, target = draw(device, rows, hidden, classes, dtype, ignored)
    assert_same_as_reference(x, weight, None, target)
    x.grad = weight.grad = None
    assert_same_as_reference(x, weight, bias, target, -100, 0.1, "sum")


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_it_knows_reductions_and_smoothing(small_chunks, device, reduction, smoothing):
    assert_same_as_reference(*draw(device, 70, 5, 9, ignored=3), -100, smoothing, reduction)


def test_chunks_are_large_enough_for_matrix_products_and_about_equal():
    gpt2, llama = 50304 * 2, 128256 * 2
    assert kernel.rows_of_a_chunk(4096, gpt2) == 4096
    assert kernel.rows_of_a_chunk(16384, gpt2) == 4096  # 4 of them, as full as they get
    assert kernel.rows_of_a_chunk(4096, llama) == 2048
    assert kernel.rows_of_a_chunk(4096, 8 * llama) == 1024  # more than the budget, for fewer rows are slow
    assert kernel.rows_of_a_chunk(65536, llama) == 8192  # more than the budget, for every chunk rounds
    assert kernel.rows_of_a_chunk(100, gpt2) == 100
    assert kernel.rows_of_a_chunk(4096, 1000) == 4096


def test_only_what_needs_a_gradient_gets_one(monkeypatch, device):
    needed, forward = [], kernel.forward
    monkeypatch.setattr(kernel, "forward", lambda *given: needed.append(given[-3:]) or forward(*given))
    x, weight, bias, target = draw(device, 5, 4, 3)
    with torch.no_grad():
        linear_cross_entropy(x, weight, target, bias)
    linear_cross_entropy(x.detach(), weight, target).backward()
    linear_cross_entropy(x, weight.detach(), target, bias.detach()).backward()
    linear_cross_entropy(x.detach(), weight.detach(), target, bias).backward()
    assert needed == [(False,) * 3, (False, True, False), (True, False, False), (False, False, True)]
    x_, weight_, bias_ = wide(x, weight, bias)
    reference(x_, weight_, target).backward()
    assert_near(weight.grad, weight_.grad, torch.float32)
    x_.grad = None
    reference(x_, weight_, target, bias_).backward()
    assert_near(x.grad, x_.grad, torch.float32)
    assert_near(bias.grad, bias_.grad, torch.float32)


@pytest.mark.parametrize("needs", [(False,) * 3, (True, False, False), (False, True, True)])
def test_a_gradient_that_is_not_needed_takes_no_memory(device, needs):
    x, weight, bias, target = draw(device, 5, 4, 3)
    loss, *gradients, _ = kernel.forward(x, weight, target, bias, -100, 0.0, "mean", torch.float32, *needs)
    assert [gradient.numel() > 0 for gradient in gradients] == list(needs)
    assert_near(loss, reference(*wide(x, weight), target, *wide(bias)).detach(), torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_graph_that_is_kept_can_go_backward_again(device, dtype):
    x, weight, bias, target = draw(device, 6, 5, 7, dtype)
    leaves, exact_leaves = (x, weight, bias), wide(x, weight, bias)
    loss = linear_cross_entropy(x, weight, target, bias)
    exact = reference(*exact_leaves[:2], target, exact_leaves[2])
    for by in (0.0, 1.0, -3.0, 1.0):
        given = loss.new_tensor(by)
        gradients, exact_gradients = (
            torch.autograd.grad(end, ends, given.to(end.dtype), retain_graph=True)
            for end, ends in ((loss, leaves), (exact, exact_leaves))
        )
        for ours, right in zip(gradients, exact_gradients, strict=True):
            torch.testing.assert_close(ours.double(), right, rtol=0, atol=TOLERANCES[dtype] * 10)
            ours.fill_(torch.nan)  # whoever is given a gradient may write into it
    loss.backward()
    exact.backward()
    for leaf, exact_leaf in zip(leaves, exact_leaves, strict=True):
        assert_near(leaf.grad, exact_leaf.grad, dtype)


def test_a_second_derivative_is_refused_and_not_left_out(device):
    x, weight, _, target = draw(device, 5, 16, 11)
    loss = linear_cross_entropy(x, weight, target)
    gradients = torch.autograd.grad(loss, (x, weight), create_graph=True)
    assert all(gradient.requires_grad for gradient in gradients)
    with pytest.raises(RuntimeError, match="has no second derivative"):
        gradients[0].square().sum().backward()


def test_gradients_that_accumulate_leave_what_is_kept_alone(device):
    x, weight, _, target = draw(device, 6, 5, 7)
    loss = linear_cross_entropy(x, weight, target)
    for times in (1, 2, 3):
        loss.backward(retain_graph=times < 3)
    exact = wide(x, weight)
    (3 * reference(*exact, target)).backward()
    assert_near(weight.grad, exact[1].grad, torch.float32)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_a_graph_that_is_not_kept_hands_its_gradient_over(device):
    x, weight, _, target = draw(device, 6, 5, 7)
    loss = linear_cross_entropy(x, weight, target)
    held = loss.grad_fn.saved_tensors[1].untyped_storage().data_ptr()
    loss.backward()
    assert weight.grad.untyped_storage().data_ptr() == held


def test_fp16_keeps_gradients_that_a_loss_scaler_would_save(small_chunks, device):
    """Of a mean over 256 rows, where most classes have a probability near 1e-8: 4e-11, or zero in fp16."""
    x, weight, _, target = draw(device, 256, 4, 100, torch.float16)
    with torch.no_grad():
        x[:, 0], weight[:, 0] = 1, 0
        weight[:4, 0] = 18
    target %= 4
    loss = linear_cross_entropy(x, weight, target)
    loss.backward(loss.new_tensor(2.0**15))
    exact = wide(x, weight)
    (2.0**15 * reference(*exact, target)).backward()
    errors = (weight.grad.double() - exact[1].grad).norm(dim=1) / exact[1].grad.norm(dim=1)
    assert errors.median() < 0.02


def test_fp16_sums_over_the_rows_do_not_overflow(device):
    x = torch.full((512, 2), 400.0, device=device, dtype=torch.float16)
    weight = torch.zeros(2, 2, device=device, dtype=torch.float16, requires_grad=True)
    linear_cross_entropy(x, weight, torch.zeros(512, device=device).long()).backward()  # sums of 102400, over 512
    torch.testing.assert_close(weight.grad, weight.new_tensor([[-200.0, -200.0], [200.0, 200.0]]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_mean_over_ignored_targets_is_nan_and_has_no_gradient(device, dtype):
    x, weight, bias, target = draw(device, 3, 4, 5, dtype, ignored=3)
    loss = linear_cross_entropy(x, weight, target, bias)
    loss.backward()
    assert loss.isnan()
    assert all(torch.equal(leaf.grad, torch.zeros_like(leaf)) for leaf in (x, weight, bias))


def test_a_target_that_is_no_class_is_seen_in_the_loss(device):
    """Also 7, one of the classes that only pad the weight."""
    x, weight, _, target = draw(device, 3, 4, 5)
    target[1] = 7
    loss = linear_cross_entropy(x, weight, target)
    loss.backward()
    assert loss.isnan()
    assert x.grad.isnan().all(1).tolist() == [False, True, False]


def test_tensors_may_have_gaps(small_chunks, device):
    x, weight, bias, target = draw(device, 80, 20, 82)
    cut = x[::2, :15], weight[:41, 5:], bias[::2]
    assert_same_as_reference(*(tensor.detach().requires_grad_() for tensor in cut), target[::2] % 41)
    turned = x[:20].T, weight[:20].T
    assert_same_as_reference(*(tensor.detach().requires_grad_() for tensor in turned), None, target[:20] % 20)


def test_under_autocast_it_is_cast_as_a_linear_layer_is(small_chunks, device):
    x, weight, bias, target = draw(device, 30, 20, 40)
    half = x.detach().bfloat16().requires_grad_()
    with torch.autocast(device.type, torch.bfloat16):
        loss = linear_cross_entropy(half, weight, target, bias)
    loss.backward()
    exact = wide(half, weight, bias)
    reference(*exact[:2], target, exact[2]).backward()
    assert loss.dtype == torch.float32
    for leaf, exact_leaf in zip((half, weight, bias), exact, strict=True):
        assert leaf.grad.dtype == leaf.dtype
        error = (leaf.grad.double() - exact_leaf.grad).norm() / exact_leaf.grad.norm()
        assert error < TOLERANCES[torch.bfloat16]


def test_the_same_input_gives_the_same_bits(small_chunks, device):
    x, weight, bias, target = draw(device, 150, 8, 70, ignored=5)
    settings = (-100, 0.1, "mean", torch.float32, True, True, True)
    first, second = (kernel.forward(x, weight, target, bias, *settings) for _ in range(2))
    assert all(map(torch.equal, first, second))


def test_what_the_kernel_does_not_offer_is_computed_all_the_same(monkeypatch, device):
    monkeypatch.setattr(kernel, "forward", None)
    x, weight, bias, target = draw(device, 6, 4, 5)
    assert torch.equal(linear_cross_entropy(*wide(x, weight), target), reference(*wide(x, weight), target))
    each = linear_cross_entropy(x, weight, target, bias, reduction="none")
    assert torch.equal(each, reference(x, weight, target, bias, reduction="none"))
    assert linear_cross_entropy(x[:0], weight, target[:0]).isnan()
    assert linear_cross_entropy(x.view(2, 3, 4), weight, torch.zeros(2, 5, device=device).long()).shape == ()


def test_what_torch_refuses_is_refused_by_torch(device):
    x, weight, _, target = draw(device, 6, 4, 5)
    with pytest.raises(RuntimeError, match="dtype"):
        linear_cross_entropy(x.bfloat16(), weight, target)
    with pytest.raises(ValueError, match="batch_size"):
        linear_cross_entropy(x, weight, target[:2])
    with pytest.raises(RuntimeError, match="shape"):
        linear_cross_entropy(x[:, :3], weight, target)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("has_bias", [True, False])
def test_the_operator_is_what_torch_asks_of_one(device, reduction, has_bias):
    x, weight, bias, target = draw(device, 6, 4, 5, ignored=1)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    settings = (-100, 0.1, reduction, torch.float32, True, True, has_bias)
    given = (x, weight, target, bias if has_bias else None, *settings)
    torch.library.opcheck(kernel.forward, given, test_utils=checks)


def test_the_scaling_is_what_torch_asks_of_an_operator(device):
    given = (torch.randn(5, 3, device=device), torch.tensor(2.0, device=device), torch.tensor(0.5, device=device), 3.0)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(kernel.scale, given, test_utils=checks)
    expected = given[0] * 3
    kernel.scale(*given)
    torch.testing.assert_close(given[0], expected)


def test_scaling_goes_through_all_elements(device, monkeypatch):
    monkeypatch.setattr(kernel, "SCALERS", 2)
    gradient, two = torch.ones(3 * kernel.SCALED_AT_ONCE + 5, device=device), torch.tensor(2.0, device=device)
    kernel.scale(gradient, two, two, 1.0)
    assert torch.equal(gradient, torch.full_like(gradient, 4.0))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_model_keeps_it_whole(small_chunks, device):
    compiled = torch.compile(linear_cross_entropy, fullgraph=True, backend="aot_eager")
    assert_same_as_reference(*draw(device, 70, 4, 5, ignored=1), -100, 0.1, "mean", function=compiled)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@functorch.patch(donated_buffer=False)  # torch refuses to keep compiled graphs otherwise
def test_a_compiled_graph_that_is_kept_can_go_backward_again(device):
    x, weight, _, target = draw(device, 6, 4, 5)
    compiled = torch.compile(linear_cross_entropy, fullgraph=True, backend="aot_eager")
    loss = compiled(x, weight, target)
    for _ in range(3):
        loss.backward(loss.new_tensor(2.0), retain_graph=True)
    exact = wide(x, weight)
    (6 * reference(*exact, target)).backward()
    assert_near(weight.grad, exact[1].grad, torch.float32)
