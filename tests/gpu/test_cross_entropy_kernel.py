"""The cross entropy kernels on a GPU: real vocabularies, three dtypes, streams, CUDA graphs, Inductor."""

import pytest
import torch

from kitsune.kernels import cross_entropy as kernel
from kitsune.kernels.cross_entropy import REDUCTIONS, cross_entropy, reference
from kitsune.kernels.launch import DTYPES

#: (relative, absolute) of an element of the gradient: half a unit in the last place, and what exponentials lose.
GRADIENT = {torch.float32: (1e-5, 1e-9), torch.bfloat16: (2**-8, 1e-9), torch.float16: (2**-10, 6e-8)}
LOSS = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-10}

SHAPES = {
    "GPT-2": (4096, 50257),
    "Llama 2": (4096, 32000),
    "Llama 3": (2048, 128256),
    "BERT": (2048, 30522),
    "ResNet-50": (256, 1000),
    "segments": (100003, 21),
    "one row": (1, 5003),
}


@pytest.fixture(autouse=True)
def no_way_out(monkeypatch):
    """The reference is out of reach: what is computed is computed by the kernels."""
    monkeypatch.setattr(kernel, "reference", None)


def draw(device, shape, dtype=torch.float32):
    """(logits, target), every seventh target ignored."""
    torch.manual_seed(0)
    logits = torch.randn(shape, device=device, dtype=dtype)
    target = torch.randint(shape[1], shape[:1], device=device)
    target[6::7] = -100
    return logits.requires_grad_(), target


def assert_same_as_reference(logits, target, *settings, function=cross_entropy):
    loss = function(logits, target, *settings)
    loss.backward(torch.ones_like(loss))
    wide = logits.detach().double().requires_grad_()
    exact = reference(wide, target, *settings)
    exact.backward(torch.ones_like(exact))
    torch.testing.assert_close(loss.double(), exact, rtol=LOSS[logits.dtype], atol=LOSS[logits.dtype])
    relative, absolute = GRADIENT[logits.dtype]
    torch.testing.assert_close(logits.grad.double(), wide.grad, rtol=relative, atol=absolute)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_it_computes_what_the_reference_does(device, shape, dtype):
    logits, target = draw(device, shape, dtype)
    assert_same_as_reference(logits, target, -100, 0.0, "none")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_it_knows_what_torch_knows_of_reductions_and_smoothing(device, smoothing, reduction, dtype):
    assert_same_as_reference(*draw(device, (512, 50257), dtype), -100, smoothing, reduction)


def test_rows_of_a_padded_vocabulary_may_have_gaps_between_them(device):
    wide, target = draw(device, (512, 50304), torch.bfloat16)
    assert_same_as_reference(wide.detach()[:, :50257].requires_grad_(), target % 50257)


def test_more_than_two_to_the_31_logits_are_counted_right(device):
    rows, classes = 43008, 50257
    logits = torch.zeros(rows, classes, device=device, dtype=torch.bfloat16)
    logits[-2:].normal_()
    target = torch.zeros(rows, device=device, dtype=torch.int64)
    target[-2:] = torch.tensor([classes - 1, 7], device=device)
    losses = cross_entropy(logits.requires_grad_(), target, reduction="none")
    losses.backward(torch.ones_like(losses))
    last = logits.detach()[-2:].double().requires_grad_()
    exact = reference(last, target[-2:], reduction="none")
    exact.sum().backward()
    torch.testing.assert_close(losses[-2:].double(), exact, rtol=2**-8, atol=0)
    torch.testing.assert_close(logits.grad[-2:].double(), last.grad, rtol=2**-8, atol=1e-9)


def test_a_target_that_is_no_class_is_no_fault_of_the_device(device):
    logits, target = draw(device, (64, 1000))
    target[1] = 1000
    losses = cross_entropy(logits, target, reduction="none")
    losses.backward(torch.ones_like(losses))
    assert losses.isnan().nonzero().tolist() == [[1]]
    assert logits.grad.isnan().any(1).nonzero().tolist() == [[1]]


def test_a_mean_over_ignored_targets_is_nan_and_has_no_gradient(device):
    logits, target = draw(device, (64, 1000))
    loss = cross_entropy(logits, target.fill_(-100))
    loss.backward()
    assert loss.isnan()
    assert not logits.grad.any()


def test_it_runs_on_the_stream_that_is_current(device):
    logits, target = draw(device, (512, 32000), torch.bfloat16)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(10_000_000)
        logits.data.mul_(2)
        assert_same_as_reference(logits, target, -100, 0.0, "sum")


def test_a_cuda_graph_replays_it_on_new_numbers(device):
    logits, target = draw(device, (512, 50257), torch.bfloat16)

    def step():
        loss = cross_entropy(logits, target)
        return loss, *torch.autograd.grad(loss, logits)

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
        logits.data.normal_()
        target.random_(50257)
        target[seed] = -100
        graph.replay()
        assert all(map(torch.equal, captured, step()))


@pytest.mark.timeout(300)
def test_inductor_keeps_it_whole(device):
    logits, target = draw(device, (512, 50257), torch.bfloat16)
    compiled = torch.compile(lambda logits, target: cross_entropy(logits * 2, target), fullgraph=True)
    loss = compiled(logits, target)
    loss.backward()
    gradient, logits.grad = logits.grad, None
    expected = cross_entropy(logits * 2, target)
    expected.backward()
    assert torch.equal(loss, expected)
    assert torch.equal(gradient, logits.grad)
