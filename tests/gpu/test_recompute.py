"""recompute on a GPU: captured steps need less memory, and compute the same."""

import gc

import pytest
import torch
from torch.nn import functional as F

from kitsune import Plan, TrainStep
from kitsune.device.backend import graph_pool_bytes, peak_bytes, pick_device, release_cached, reset_peak
from kitsune.knobs import KNOBS
from tests.step_cases import sgd
from tests.unit.kitsune.techniques.test_recompute import WIDTH, Stack

CHOICES = tuple(choice for choice in KNOBS["recompute"].choices if choice != "off")
MIB = 2**20
ROWS, POSITIONS = 256, 512


def trained(device, dropout=0.0, **knobs):
    """Losses, gradients, the peak of the settled steps above what was allocated before, and the report."""
    torch._dynamo.reset()
    weighed = pick_device("cuda")
    gc.collect()
    release_cached(weighed)  # cuBLAS's workspaces, too: 64 MiB that the first step in a process would have more
    torch.manual_seed(0)
    model = Stack(dropout).to(device)
    x, y = torch.randn(ROWS, POSITIONS, WIDTH, device=device), torch.randn(ROWS, device=device)
    before = torch.cuda.memory_allocated(weighed)
    with TrainStep(model, F.mse_loss, sgd(model.parameters()), Plan.by_hand(**knobs)) as step:
        losses = [step(x, y).item() for _ in range(6)]
        assert step.is_settled
        gc.collect()
        release_cached(weighed)
        reset_peak(weighed)
        losses += [step(x, y).item() for _ in range(2)]
        peak = peak_bytes(weighed) + graph_pool_bytes(weighed) - before
        return losses, [parameter.grad.clone() for parameter in model.parameters()], peak, step.report


@pytest.mark.parametrize("capture", ["none", "step"])
@pytest.mark.parametrize("choice", CHOICES)
def test_a_compiled_step_needs_less_memory_and_computes_the_same(device, choice, capture):
    plan = {"compile": "default", "capture": capture}
    plain, found = trained(device, **plan), trained(device, recompute=choice, **plan)
    assert not found[3].declined, found[3].declined
    torch.testing.assert_close(found[:2], plain[:2], rtol=1e-4, atol=1e-6)
    assert found[2] < plain[2] - MIB


@pytest.mark.parametrize("capture", ["none", "step"])
@pytest.mark.parametrize("choice", ["blocks", "blocks-keep-attention"])
def test_an_eager_step_needs_less_memory_and_computes_the_same(device, choice, capture):
    """Checkpoints set the generator back, so a capture may be declined; the step is then not captured."""
    plain, found = trained(device, capture=capture), trained(device, recompute=choice, capture=capture)
    assert set(found[3].declined) <= {"capture"}, found[3].declined
    torch.testing.assert_close(found[:2], plain[:2], rtol=1e-4, atol=1e-6)
    assert found[2] < plain[2] - MIB


@pytest.mark.parametrize("compiled", ["off", "default"])
def test_a_dropout_within_a_captured_block_has_the_mask_that_it_had(device, compiled):
    """By the directional derivative, since another mask changes no loss: the gradient is that of the loss."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Stack(0.5).to(device)
    x, y = torch.randn(64, 64, WIDTH, device=device), torch.randn(64, device=device)
    with TrainStep(
        model,
        F.mse_loss,
        torch.optim.SGD(model.parameters(), lr=0.0),
        Plan.by_hand(recompute="blocks", compile=compiled, capture="step"),
    ) as step:
        for _ in range(5):
            step(x, y)
        assert set(step.report.declined) <= ({"capture"} if compiled == "off" else set()), step.report.declined

        def loss_at(seed):
            torch.manual_seed(seed)
            return step(x, y).item()

        errors = []
        for seed in range(8):
            loss_at(seed)
            gradients = [parameter.grad.clone() for parameter in model.parameters()]
            size = torch.stack([(each**2).sum() for each in gradients]).sum().item()
            distance = 1e-2 / size
            losses = []
            for sign in (1, -1):
                with torch.no_grad():
                    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                        parameter.add_(gradient, alpha=sign * distance)
                losses.append(loss_at(seed))
                with torch.no_grad():
                    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                        parameter.sub_(gradient, alpha=sign * distance)
            errors.append(abs((losses[0] - losses[1]) / (2 * distance * size) - 1))
        assert sorted(errors)[4] < 0.05, errors
