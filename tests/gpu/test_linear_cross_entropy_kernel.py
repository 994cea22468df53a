"""Linear cross entropy on a GPU: the heads of real models, the memory it saves, streams, CUDA graphs, Inductor."""

import pytest
import torch
import torch.nn.functional as F

from kitsune.kernels import linear_cross_entropy as kernel
from kitsune.kernels.launch import DTYPES
from kitsune.kernels.linear_cross_entropy import linear_cross_entropy, reference

GPT2 = (4096, 768, 50257)
SHAPES = {
    "GPT-2": GPT2,
    "Llama 3.2 1B": (4096, 2048, 128256),
    "BERT": (2048, 768, 30522),
    "T5": (8192, 512, 32128),
    "a short last chunk": (1100, 256, 50257),
}
#: Of the norm of each row's and each class's gradient.
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 5e-3}


def draw(device, rows, hidden, classes, dtype):
    """(x, weight, target) with logits of standard deviation one and every seventh target ignored."""
    torch.manual_seed(0)
    x = torch.randn(rows, hidden, device=device).to(dtype).requires_grad_()
    weight = (torch.randn(classes, hidden, device=device) / hidden**0.5).to(dtype).requires_grad_()
    target = torch.randint(classes, (rows,), device=device)
    target[6::7] = -100
    return x, weight, target


def results_of(function, tensors, target, dloss=1.0, **settings):
    """(loss, *gradients) of `function` for copies of the tensors."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    loss = function(*leaves[:2], target, *leaves[2:], **settings)
    loss.backward(torch.full_like(loss, dloss))
    return loss.detach(), *(leaf.grad for leaf in leaves)


def exactly(tensors, target, **settings):
    """The same by the reference, in fp32."""
    return results_of(reference, [tensor.detach().float() for tensor in tensors], target, **settings)


def error(ours, exact):
    """The largest of the rows, each relative to its norm; rows of zeros are to be zeros."""
    ours, exact = ours.float(), exact.float()
    return ((ours - exact).norm(dim=-1) / exact.norm(dim=-1).clamp(min=1e-20)).max().item()


@pytest.fixture
def no_way_out(monkeypatch):
    """The reference is out of reach: what is computed is computed by the kernels."""
    monkeypatch.setattr(kernel, "reference", None)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_it_computes_what_the_reference_does(no_way_out, device, shape, dtype):
    *tensors, target = draw(device, *shape, dtype)
    scaler = 2.0**12 if dtype == torch.float16 else 1.0
    loss, *gradients = results_of(linear_cross_entropy, tensors, target, dloss=scaler)
    exact_loss, *exact = exactly(tensors, target, dloss=scaler)
    torch.testing.assert_close(loss.float(), exact_loss, rtol=TOLERANCES[dtype], atol=0)
    for ours, right in zip(gradients, exact, strict=True):
        assert ours.dtype == dtype
        assert error(ours, right) < TOLERANCES[dtype]


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_it_knows_bias_smoothing_and_reductions(no_way_out, device, reduction):
    x, weight, target = draw(device, 2048, 256, 30522, torch.bfloat16)
    bias = torch.randn(30522, device=device).bfloat16()
    settings = {"label_smoothing": 0.1, "reduction": reduction}
    loss, dx, dweight, dbias = results_of(linear_cross_entropy, (x, weight, bias), target, **settings)
    exact_loss, exact_dx, exact_dweight, exact_dbias = exactly((x, weight, bias), target, **settings)
    torch.testing.assert_close(loss.float(), exact_loss, rtol=2**-7, atol=0)
    for ours, exact in ((dx, exact_dx), (dweight, exact_dweight), (dbias, exact_dbias)):
        assert (ours - exact).norm() / exact.norm() < 2e-2


def test_it_is_about_as_near_to_the_truth_as_the_two_functions_of_torch(no_way_out, device):
    *tensors, target = draw(device, *GPT2, torch.bfloat16)
    _, *gradients = results_of(linear_cross_entropy, tensors, target)
    _, *eager = results_of(reference, tensors, target)
    _, *exact = exactly(tensors, target)
    for ours, theirs, right in zip(gradients, eager, exact, strict=True):
        assert (ours - right).norm() < 3 * (theirs - right).norm()


def test_it_takes_less_memory_than_the_two_functions_of_torch(no_way_out, device):
    x, weight, target = draw(device, *GPT2, torch.bfloat16)

    def peak(function):
        x.grad = weight.grad = None
        function(x, weight, target).backward()  # what is allocated once, such as the workspace of cuBLAS
        x.grad = weight.grad = None
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        function(x, weight, target).backward()
        return torch.cuda.max_memory_allocated() - before

    def eager(x, weight, target):
        return F.cross_entropy(F.linear(x, weight), target)

    ours, theirs = peak(linear_cross_entropy), peak(eager)
    assert ours < 0.6 * theirs


def test_a_graph_that_is_kept_can_go_backward_again(device):
    x, weight, target = draw(device, 2048, 128, 50257, torch.bfloat16)
    loss = linear_cross_entropy(x, weight, target)
    first = torch.autograd.grad(loss, (x, weight), loss.new_tensor(2.0), retain_graph=True)
    second = torch.autograd.grad(loss, (x, weight), loss.new_tensor(0.5), retain_graph=True)
    third = torch.autograd.grad(loss, (x, weight))
    for doubled, halved, plain in zip(first, second, third, strict=True):
        assert torch.equal(doubled, 2 * plain)
        assert torch.equal(halved, 0.5 * plain)


def test_under_autocast_it_is_cast_as_a_linear_layer_is(no_way_out, device):
    x, weight, target = draw(device, 2048, 768, 50257, torch.float32)
    with torch.autocast("cuda", torch.bfloat16):
        loss, *gradients = results_of(linear_cross_entropy, (x, weight), target)
    exact_loss, *exact = exactly((x, weight), target)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, exact_loss, rtol=1e-3, atol=0)
    for ours, right in zip(gradients, exact, strict=True):
        assert ours.dtype == torch.float32
        assert error(ours, right) < TOLERANCES[torch.bfloat16]


def test_it_runs_on_the_stream_that_is_current(no_way_out, device):
    *tensors, target = draw(device, 2048, 256, 32000, torch.bfloat16)
    expected = results_of(linear_cross_entropy, tensors, target)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(10_000_000)
        found = results_of(linear_cross_entropy, tensors, target)
    torch.cuda.current_stream().wait_stream(side)
    assert all(error(ours, right) < 1e-2 for ours, right in zip(found, expected, strict=True))


def test_a_cuda_graph_replays_it_on_new_targets(no_way_out, device):
    x, weight, target = draw(device, *GPT2, torch.bfloat16)

    def step():
        loss = linear_cross_entropy(x, weight, target)
        return loss, *torch.autograd.grad(loss, (x, weight))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for seed in range(2):
        torch.manual_seed(seed)
        target.random_(50257)
        target[seed::3] = -100
        graph.replay()
        for ours, right in zip(captured, exactly((x, weight), target), strict=True):
            assert (ours - right).norm() / right.norm() < TOLERANCES[torch.bfloat16]


@pytest.mark.timeout(300)
def test_inductor_keeps_it_whole(device):
    *tensors, target = draw(device, 2048, 256, 50257, torch.bfloat16)

    def head(x, weight, target):
        return 2 * linear_cross_entropy(x + 1, weight, target)

    found = results_of(torch.compile(head, fullgraph=True), tensors, target)
    expected = results_of(head, tensors, target)
    assert all(error(ours, right) < 1e-2 for ours, right in zip(found, expected, strict=True))
