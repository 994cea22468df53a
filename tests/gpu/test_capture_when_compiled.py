"""A step that waits for the device as it is given, and no longer when it is compiled, is captured when it is."""

import pytest
import torch
from torch.nn import functional as F

from kitsune import KitsuneOptimizer, Plan, TrainStep, Workload
from kitsune.techniques import inapplicable, observed_facts
from tests.step_cases import sgd
from tuner.search.space import Space

COMPILED = {"compile": "default", "capture": "step"}


class Masked(torch.nn.Module):
    """Looks at its mask on the host, outside of what torch.compile traces: compiled, the mask is passed on as it is."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x, mask):
        if not torch.compiler.is_compiling() and mask.all():
            return self.linear(x)
        return self.linear(x * mask)


def masked(device):
    torch.manual_seed(0)
    model = Masked().to(device)
    x = {"x": torch.randn(4, 8, device=device), "mask": torch.ones(4, 8, device=device)}
    return Workload(model, F.mse_loss, sgd(model.parameters()), (x, torch.randn(4, 8, device=device)))


def llama(device):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    model = transformers.LlamaForCausalLM(config).to(device).train()
    ids = torch.randint(0, 128, (2, 32), device=device)
    x = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}
    return Workload(model, None, torch.optim.AdamW(model.parameters(), lr=1e-3), (x, None))


def captured(made, knobs, steps=8):
    """The losses, and what was declined."""
    step = TrainStep(made.model, made.loss_fn, made.optimizer, Plan.by_hand(**knobs))
    losses = [step(*made.batch).item() for _ in range(steps)]
    return losses, dict(step.report.declined)


@pytest.mark.parametrize("make", [masked, llama])
def test_it_is_searched_and_captured_compiled_only(device, make):
    reasons = inapplicable(observed_facts(make(device), device))
    assert "waits for the device at" in reasons["capture=step, compile=off"]
    assert "capture=step" not in reasons
    space = Space.of(reasons)
    assert space.allows({"capture": "step"}) is not None
    assert space.allows(COMPILED) is None
    plain, _ = captured(make(device), {})
    losses, declined = captured(make(device), COMPILED)
    assert declined == {}
    assert losses == pytest.approx(plain, rel=1e-3)
    assert "waits for the device" in captured(make(device), {"capture": "step"})[1]["capture"]


def test_a_loop_with_the_default_configuration_of_transformers_is_captured(device):
    """Its forwards would return the cache for generation that the configuration asks for."""
    plain, _ = captured(llama(device), {})
    made = llama(device)
    assert made.model.config.use_cache
    optimizer = KitsuneOptimizer(made.optimizer, plan=Plan.by_hand(compile="default", capture="segments"))
    losses = []
    for _ in range(8):
        output = made.model(**made.batch[0])
        output.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(output.loss.item())
    assert optimizer.report.declined == {}
    assert optimizer.counts["captured"] > 0
    assert losses == pytest.approx(plain, rel=1e-3)
