"""Attention without the mask of its batch on a GPU: captured, on several streams, and in a loop of the user's own."""

import pytest
import torch

from kitsune import KitsuneOptimizer, Plan, TrainStep
from kitsune.techniques import compile as technique
from tests.masked_language import Language, batch_of, losses_of_a_loop, plain_losses
from tests.step_cases import sgd

#: Padded batches become frequent, and then have a graph of their own.
PADDED = (0, 0, 0, 0, 3, *[5] * 14, 0, 5, 0)
PLANS = [
    {},
    {"capture": "segments"},
    {"capture": "step"},
    {"capture": "step", "streams": 4},
]


def batches(device):
    return [{name: value.to(device) for name, value in batch_of(padded).items()} for padded in PADDED]


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: "-".join(map(str, plan.values())) or "not captured")
def test_full_and_padded_batches_train_as_before(device, plan):
    torch._dynamo.reset()
    given = batches(device)
    wanted = plain_losses(given, device)
    model = Language().to(device)
    chosen = Plan.by_hand(compile="default", masks="dropped", **plan)
    with TrainStep(model, None, sgd(model.parameters()), plan=chosen) as step:
        losses = [step(batch) for batch in given]
        assert step.report.declined == {}
    torch.testing.assert_close(losses, wanted, rtol=1e-4, atol=1e-5)


def test_a_loop_of_the_users_own_trains_as_before(device):
    torch._dynamo.reset()
    given = batches(device)
    wanted = plain_losses(given, device)
    model = Language().to(device)
    chosen = Plan.by_hand(compile="default", masks="dropped", capture="segments")
    optimizer = KitsuneOptimizer(sgd(model.parameters()), plan=chosen)
    losses = losses_of_a_loop(model, optimizer, given)
    assert optimizer.counts["captured"] > 0
    optimizer.close()
    torch.testing.assert_close(losses, wanted, rtol=1e-4, atol=1e-5)


def test_in_bf16_a_full_batch_and_a_padded_one_have_programs_of_their_own(device, monkeypatch):
    """Which kernels run is torch's choice: cuDNN's read masks as well, and all of them have "flash" in their names."""
    torch._dynamo.reset()
    counts, real = [], technique.drop_constant_masks
    monkeypatch.setattr(technique, "drop_constant_masks", lambda graph: counts.append(real(graph)))
    model = Language().to(device)
    chosen = Plan.by_hand(compile="default", masks="dropped", precision="bf16", capture="step")
    with TrainStep(model, None, sgd(model.parameters()), plan=chosen) as step:
        for padded in [0] * 4 + [5] * 14:
            step({name: value.to(device) for name, value in batch_of(padded).items()})
    assert counts == [1, 0]
