"""Softmax as Triton compiles it: the scores of real models under their masks, streams, CUDA graphs, Inductor."""

import pytest
import torch

from kitsune.kernels.softmax import is_offered, reference, softmax

#: The output is rounded once, the gradient twice: backward starts from the output as it was rounded.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}


def no_mask(shape, device):
    return None


def lengths(shape, device):
    """Each text of a batch has a length of its own. Of the first there is nothing: all its rows are dead."""
    most = torch.linspace(0, shape[-1], shape[0], device=device)[:, None, None, None]
    return torch.arange(shape[-1], device=device) < most


def distances(shape, device):
    """Added to the scores of all texts alike, head by head."""
    return -torch.rand(shape[1:], device=device)[None]


def neighbours(shape, device):
    """Each window of an image has a mask of its own, which all images and heads share."""
    _, windows, _, *square = shape
    return (torch.rand(1, windows, 1, *square, device=device) < 0.2).bfloat16() * -100


SCORES = {
    "GPT-2": ((4, 12, 1024, 1024), torch.float32, no_mask, True),
    "GPT-2 in bf16": ((4, 12, 1024, 1024), torch.bfloat16, no_mask, True),
    "GPT-2 in fp16": ((4, 12, 1024, 1024), torch.float16, no_mask, True),
    "BERT": ((8, 12, 512, 512), torch.bfloat16, lengths, False),
    "GPT-2 padded": ((4, 12, 1024, 1024), torch.bfloat16, lengths, True),
    "T5": ((4, 8, 512, 512), torch.float32, distances, False),
    "Swin": ((4, 64, 3, 49, 49), torch.bfloat16, neighbours, False),
    "ViT": ((8, 12, 197, 197), torch.float16, no_mask, False),
    "the words of GPT-2": ((128, 50257), torch.float32, no_mask, False),
}


def inputs(device, name):
    shape, dtype, mask, causal = SCORES[name]
    torch.manual_seed(0)
    x, dy = (torch.randn(shape, device=device).mul(3).to(dtype) for _ in range(2))
    return x, dy, (mask(shape, device), 0.5, causal)


def step(function, x, dy, rest):
    """(output, gradient)."""
    x = x.detach().requires_grad_()
    y = function(x, *rest)
    return y.detach(), *torch.autograd.grad(y, x, dy)


@pytest.mark.parametrize("name", SCORES)
def test_it_computes_what_the_reference_does(device, name):
    x, dy, rest = inputs(device, name)
    assert is_offered(x, rest[0], rest[2])
    y, dx = step(softmax, x, dy, rest)
    exact, dexact = step(reference, x.double(), dy.double(), rest)
    tolerance = TOLERANCES[x.dtype]
    assert y.dtype == dx.dtype == x.dtype
    torch.testing.assert_close(y.double(), exact, rtol=tolerance, atol=1e-7)
    slack = dexact.abs() + exact * dy.double().abs().amax(-1, keepdim=True)
    assert ((dx.double() - dexact).abs() <= tolerance * slack + 1e-6).all()  # fp16 has 24 bits behind the point


def test_there_may_be_more_elements_than_an_int32_counts(device):
    x, dy = (torch.randn(8, 4096, device=device).bfloat16() for _ in range(2))
    many = torch.zeros(2**19 + 8, 4096, device=device, dtype=torch.bfloat16)
    slopes = torch.zeros_like(many)
    many[-8:], slopes[-8:] = x, dy
    y, dx = step(softmax, many, slopes, (None, 1.0, False))
    wanted, dwanted = step(softmax, x, dy, (None, 1.0, False))
    assert torch.equal(y[-8:], wanted) and torch.equal(dx[-8:], dwanted)
    assert y[:-8].eq(1 / 4096).all() and not dx[:-8].any()


def test_a_mask_may_have_more_elements_than_an_int32_counts(device):
    x = torch.randn(2**19 + 8, 4096, device=device, dtype=torch.bfloat16)
    mask = torch.zeros(x.shape, device=device, dtype=torch.bool)
    mask[-8:, ::2] = True
    y = softmax(x, mask)
    torch.testing.assert_close(y[-8:], reference(x[-8:], mask[-8:]), rtol=2**-7, atol=0)
    assert not y[:-8].any()


def test_a_score_that_is_no_number_shows(device):
    x = torch.randn(64, 1000, device=device)
    x[5, 7] = torch.nan
    x[6] = torch.nan
    is_wrong = softmax(x).isnan()
    assert is_wrong[5:7].all() and not is_wrong[:5].any() and not is_wrong[7:].any()


def test_it_runs_on_the_stream_that_is_current(device):
    x, dy, rest = inputs(device, "GPT-2 padded")
    wanted = step(softmax, x, dy, rest)
    late = torch.zeros_like(x)
    torch.cuda.synchronize()
    side = torch.cuda.Stream(device)
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)  # some 25 ms, in which a kernel on another stream would read zeros
        late.copy_(x)
        ours = step(softmax, late, dy, rest)
    side.synchronize()
    assert all(map(torch.equal, ours, wanted))


def test_a_cuda_graph_replays_it_on_what_its_inputs_hold_then(device):
    x, dy, (mask, *rest) = inputs(device, "GPT-2 padded")
    new = [one.flip(0) for one in (x, dy, mask)]
    wanted = step(softmax, *new[:2], (new[2], *rest))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ours = step(softmax, x, dy, (mask, *rest))
    for one, other in zip((x, dy, mask), new, strict=True):
        one.copy_(other)
    graph.replay()
    torch.cuda.synchronize()
    assert all(map(torch.equal, ours, wanted))


def test_inductor_keeps_it_whole(device):
    x, dy, rest = inputs(device, "BERT")
    compiled = torch.compile(lambda x, *rest: 2 * softmax(x + 1, *rest), fullgraph=True)
    wanted = step(lambda x, *rest: 2 * softmax(x + 1, *rest), x, dy, rest)
    for ours, one in zip(step(compiled, x, dy, rest), wanted, strict=True):
        torch.testing.assert_close(ours, one)
