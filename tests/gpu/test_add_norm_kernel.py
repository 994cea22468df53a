"""Sum and norm at once as Triton compiles them: the rows of real models, rounding, streams, CUDA graphs, Inductor."""

from functools import partial

import pytest
import torch

from kitsune.kernels.add_norm import add_layer_norm, add_rms_norm, reference, rms_reference
from tests.kernel_checks import check_current_stream, check_graph

EPS = 1e-5
#: One rounding of the result; sums over thousands of rows for fp32.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2**-8, torch.float16: 2**-10}
PAIRS = {"layer": (add_layer_norm, reference, 2), "rms": (add_rms_norm, rms_reference, 1)}
ROWS = {
    "BERT": ("layer", (2048, 768), torch.float32),
    "BERT in bf16": ("layer", (2048, 768), torch.bfloat16),
    "GPT-2 in fp16": ("layer", (4096, 768), torch.float16),
    "Llama in bf16": ("rms", (4096, 4096), torch.bfloat16),
    "Llama in fp16": ("rms", (4096, 4096), torch.float16),
    "rows of no even length": ("layer", (777, 1001), torch.bfloat16),
    "the longest rows": ("rms", (40, 65536), torch.bfloat16),
}


def inputs(device, kind, shape, dtype):
    """Summands, weights, gradients of both outputs. No dtype rounds the sums, so the reference in fp64 has the same."""
    torch.manual_seed(0)
    summands = [(torch.randint(-31, 32, shape, device=device) / 8).to(dtype) for _ in range(2)]
    weights = [torch.randn(shape[-1], device=device).to(dtype) for _ in range(PAIRS[kind][2])]
    return *summands, *weights, *(torch.randn(shape, device=device).to(dtype) for _ in range(2))


def step(function, *given):
    """(norm, sum, gradients of both summands and of the weights)."""
    *rest, dnormed, dtotal = given
    leaves = [one.detach().requires_grad_() for one in rest]
    normed, total = function(*leaves, EPS)
    return normed.detach(), total.detach(), *torch.autograd.grad((normed, total), leaves, (dnormed, dtotal))


@pytest.mark.parametrize("name", ROWS)
def test_it_computes_what_the_reference_does(device, name):
    kind, shape, dtype = ROWS[name]
    function, eager, _ = PAIRS[kind]
    given = inputs(device, kind, shape, dtype)
    exact = step(eager, *(one.double() for one in given))
    for ours, wanted in zip(step(function, *given), exact, strict=True):
        assert ours.dtype == dtype
        atol = TOLERANCES[dtype] * (wanted.abs().max().item() + 1)
        torch.testing.assert_close(ours.double(), wanted, rtol=TOLERANCES[dtype], atol=atol)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_sum_is_rounded_as_eager_rounds_it(device, dtype):
    x, residual = (torch.randn(2048, 768, device=device).to(dtype) for _ in range(2))
    weight, bias = (torch.randn(768, device=device).to(dtype) for _ in range(2))
    normed, total = add_layer_norm(x, residual, weight, bias, EPS)
    assert torch.equal(total, x + residual)
    wanted = reference(x, residual, weight, bias, EPS)[0]
    torch.testing.assert_close(normed, wanted, rtol=2 * TOLERANCES[dtype], atol=TOLERANCES[dtype])


def test_either_output_may_be_left_unused(device):
    x, residual, weight, dnormed, dtotal = inputs(device, "rms", (256, 4096), torch.float32)
    leaves = [one.requires_grad_() for one in (x, residual, weight)]
    for index, slope in enumerate((dnormed, dtotal)):
        ours, wanted = (
            torch.autograd.grad(function(*leaves, EPS)[index], leaves, slope, allow_unused=True)
            for function in (add_rms_norm, rms_reference)
        )
        for one, other in zip(ours, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-4)


def test_a_gain_of_one_element_is_broadcast_and_another_length_refused(device):
    x, residual, _, dnormed, dtotal = inputs(device, "rms", (64, 768), torch.float32)
    gain = torch.full((1,), 3.0, device=device)
    ours, wanted = (step(function, x, residual, gain, dnormed, dtotal) for function in (add_rms_norm, rms_reference))
    assert all(map(torch.equal, ours, wanted))
    with pytest.raises(RuntimeError, match="must match"):
        add_rms_norm(x, residual, torch.ones(512, device=device), EPS)
    with pytest.raises(RuntimeError, match="same shape"):
        add_layer_norm(x, residual, gain, gain, EPS)


def test_there_may_be_more_elements_than_an_int32_counts(device):
    x, residual, weight, dnormed, dtotal = inputs(device, "rms", (8, 4096), torch.bfloat16)
    many = [torch.zeros(2**19 + 8, 4096, device=device, dtype=torch.bfloat16) for _ in range(4)]
    for large, small in zip(many, (x, residual, dnormed, dtotal), strict=True):
        large[-8:] = small
    ours = step(add_rms_norm, *many[:2], weight, *many[2:])
    wanted = step(add_rms_norm, x, residual, weight, dnormed, dtotal)
    for large, small in zip(ours[:4], wanted[:4], strict=True):
        assert torch.equal(large[-8:], small) and not large[:-8].any()


def test_it_runs_on_the_stream_that_is_current(device):
    given = inputs(device, "layer", (2048, 768), torch.bfloat16)
    check_current_stream(partial(step, add_layer_norm), given)


def test_a_cuda_graph_replays_it_on_what_its_inputs_hold_then(device):
    first, second = (inputs(device, "layer", (2048, 768), torch.bfloat16) for _ in range(2))
    second = [one.flip(0) for one in second]
    check_graph(partial(step, add_layer_norm), first, second)


def test_inductor_keeps_it_whole(device):
    given = inputs(device, "layer", (256, 768), torch.bfloat16)
    compiled = torch.compile(lambda x, *rest: add_layer_norm(x + 1, *rest), fullgraph=True)
    wanted = step(lambda x, *rest: add_layer_norm(x + 1, *rest), *given)
    for ours, one in zip(step(compiled, *given), wanted, strict=True):
        torch.testing.assert_close(ours, one)
