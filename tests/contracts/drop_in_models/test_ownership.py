"""The drop-in: which model an optimizer runs."""

from typing import Any

import pytest
import torch
from torch import nn

from kitsune.optimizer import PATIENCE_STEPS, KitsuneOptimizer
from kitsune.plan import Plan
from tests.training_pairs import (
    STEPS,
    Net,
    adamw,
    assert_same,
    batches,
    check,
    criterion,
    fused_adamw,
    pair,
    seed,
    simple_loop,
    train_both,
)

WARM = 4  # the first forward finds the model, three warm up


@pytest.mark.on_streams
def test_two_models_and_two_optimizers(device: torch.device) -> None:
    """A GAN: each optimizer finds its own model; the discriminator sees inputs with and without gradients."""

    def train(wrap: Any) -> list[torch.Tensor]:
        seed()
        generator = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 6)).to(device)
        critic = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1)).to(device)
        make, judge = wrap(adamw(generator.parameters())), wrap(adamw(critic.parameters()))
        results = []
        for x, _ in batches(device, 20):
            fake = generator(x[:, :4])
            judge.zero_grad()
            loss = critic(fake.detach()).mean() - critic(x).mean()
            loss.backward()
            judge.step()
            make.zero_grad()
            wish = -critic(fake).mean()
            wish.backward()
            make.step()
            results += [loss.detach(), wish.detach()]
        made.append((make, judge))
        return results + [parameter.detach() for net in (generator, critic) for parameter in net.parameters()]

    made: list[Any] = []
    assert_same(train(KitsuneOptimizer), train(lambda optimizer: optimizer))
    make, judge = made[0]
    assert make.counts["captured"] == 20 - WARM
    assert judge.counts["captured"] > 8
    assert judge.counts["in_flight"] > 8
    assert judge.counts["differentiable"] > 8


def test_an_optimizer_of_two_models_stays_plain(device: torch.device) -> None:
    def train(wrap: Any) -> list[torch.Tensor]:
        seed()
        encoder, decoder = nn.Linear(6, 16).to(device), nn.Linear(16, 3).to(device)
        optimizer = wrap(adamw([*encoder.parameters(), *decoder.parameters()]))
        losses = []
        for x, y in batches(device):
            optimizer.zero_grad()
            loss = criterion(decoder(torch.relu(encoder(x))), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        made.append(optimizer)
        return losses

    made: list[Any] = []
    assert_same(train(KitsuneOptimizer), train(lambda optimizer: optimizer))
    assert f"before step {PATIENCE_STEPS}" in made[0].report.declined["capture"]
    assert not made[0]._attachment.is_looking


def test_two_optimizers_of_one_model(device: torch.device) -> None:
    def train(wrap: Any) -> list[torch.Tensor]:
        seed()
        model = Net().to(device)
        body = wrap(adamw([*model.first.parameters(), *model.norm.parameters(), *model.second.parameters()]))
        head = wrap(fused_adamw(model.head.parameters()))
        losses = []
        for x, y in batches(device):
            body.zero_grad()
            head.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            body.step()
            head.step()
            losses.append(loss.detach())
        made.append((body, head))
        return [*losses, *(parameter.detach() for parameter in model.parameters())]

    made: list[Any] = []
    assert_same(train(KitsuneOptimizer), train(lambda optimizer: optimizer))
    body, head = made[0]
    assert body.counts["captured"] == STEPS - WARM
    assert head.report.declined == {"capture": "another KitsuneOptimizer runs this model's forwards"}


def test_the_newest_optimizer_takes_a_model_over(device: torch.device) -> None:
    """As when the cell of a notebook is run again."""
    both = check(device, simple_loop, plan=Plan.by_hand(capture="segments", update="fused"), exact=False)
    first = both.optimizer
    both.optimizer = KitsuneOptimizer(adamw(both.ours.parameters()))
    both.plain_optimizer = adamw(both.plain.parameters())
    both.ours.load_state_dict(both.plain.state_dict())
    both.exact = True
    train_both(both, simple_loop, batches(device))
    assert both.captured == STEPS - WARM
    assert "a newer KitsuneOptimizer" in first.report.declined["capture"]
    assert first.report.applied == {}
    assert first.param_groups[0]["fused"] is None
    first.close()  # must not take the model from its new owner
    simple_loop(both.ours, both.optimizer, batches(device, 2))
    assert both.captured == STEPS - WARM + 2


def test_models_compiled_by_hand(device: torch.device) -> None:
    both = pair(device)
    both.ours.compile(backend="eager")
    train_both(both, simple_loop, batches(device, 3))
    assert "compiled by hand" in both.optimizer.report.declined["capture"]

    wrapped = pair(device)
    wrapped.ours = torch.compile(wrapped.ours, backend="eager")  # type: ignore[assignment]
    simple_loop(wrapped.ours, wrapped.optimizer, batches(device, 3))
    assert "compiled by hand" in wrapped.optimizer.report.declined["capture"]
