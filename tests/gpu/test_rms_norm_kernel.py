"""RMSNorm as Triton compiles it: rows of real models, more than 2**31 elements, streams, CUDA graphs, Inductor."""

from functools import partial

import pytest
import torch

from kitsune.kernels.rms_norm import reference, rms_norm
from tests.kernel_checks import check_current_stream, check_graph

EPS = 1e-6
#: One rounding of the result; sums over thousands of rows for fp32.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2**-8, torch.float16: 2**-10}
ROWS = {
    "Llama": ((4096, 4096), torch.float32),
    "Llama in bf16": ((4096, 4096), torch.bfloat16),
    "Llama in fp16": ((4096, 4096), torch.float16),
    "the heads of Qwen3": ((2048, 32, 128), torch.bfloat16),
    "rows of no even length": ((777, 1001), torch.bfloat16),
    "the longest rows": ((40, 65536), torch.bfloat16),
}


def inputs(device, shape, dtype):
    torch.manual_seed(0)
    x, dy = (torch.randn(shape, device=device).to(dtype) for _ in range(2))
    return x, torch.randn(shape[-1], device=device).to(dtype), dy


def step(function, x, weight, dy):
    """(output, gradient of x, gradient of the weight)."""
    leaves = [one.detach().requires_grad_() for one in (x, weight)]
    y = function(*leaves, EPS)
    return y.detach(), *torch.autograd.grad(y, leaves, dy)


@pytest.mark.parametrize("name", ROWS)
def test_it_computes_what_the_reference_does(device, name):
    shape, dtype = ROWS[name]
    given = inputs(device, shape, dtype)
    exact = step(reference, *(one.double() for one in given))
    for ours, wanted in zip(step(rms_norm, *given), exact, strict=True):
        assert ours.dtype == dtype
        atol = TOLERANCES[dtype] * (wanted.abs().max().item() + 1)
        torch.testing.assert_close(ours.double(), wanted, rtol=TOLERANCES[dtype], atol=atol)


def test_a_weight_of_another_length_is_torchs_to_broadcast_or_refuse(device):
    x, _, dy = inputs(device, (64, 768), torch.float32)
    gain = torch.full((1,), 3.0, device=device)
    for ours, wanted in zip(step(rms_norm, x, gain, dy), step(reference, x, gain, dy), strict=True):
        assert torch.equal(ours, wanted)
    with pytest.raises(RuntimeError, match="must match"):
        rms_norm(x, torch.ones(512, device=device), EPS)


def test_there_may_be_more_elements_than_an_int32_counts(device):
    x, weight, dy = inputs(device, (8, 4096), torch.bfloat16)
    many = torch.zeros(2**19 + 8, 4096, device=device, dtype=torch.bfloat16)
    slopes = torch.zeros_like(many)
    many[-8:], slopes[-8:] = x, dy
    y, dx, dweight = step(rms_norm, many, weight, slopes)
    wanted, dwanted, _ = step(rms_norm, x, weight, dy)
    assert torch.equal(y[-8:], wanted) and torch.equal(dx[-8:], dwanted)
    assert not y[:-8].any() and not dx[:-8].any() and dweight.any()


def test_it_runs_on_the_stream_that_is_current(device):
    given = inputs(device, (2048, 768), torch.bfloat16)
    check_current_stream(partial(step, rms_norm), given)


def test_a_cuda_graph_replays_it_on_what_its_inputs_hold_then(device):
    first, second = (inputs(device, (2048, 768), torch.bfloat16) for _ in range(2))
    second = [one.flip(0) for one in second]
    check_graph(partial(step, rms_norm), first, second)


def test_inductor_keeps_it_whole(device):
    x, weight, dy = inputs(device, (256, 768), torch.bfloat16)
    compiled = torch.compile(lambda x, weight, eps: 2 * rms_norm(x + 1, weight, eps), fullgraph=True)
    wanted = step(lambda x, weight, eps: 2 * rms_norm(x + 1, weight, eps), x, weight, dy)
    for ours, one in zip(step(compiled, x, weight, dy), wanted, strict=True):
        torch.testing.assert_close(ours, one)
