"""The drop-in: values that a replay would freeze."""

import random

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from tests.training_pairs import (
    STEPS,
    Net,
    assert_same,
    batches,
    check,
    pair,
    simple_loop,
    train_both,
)

WARM = 4  # the first forward finds the model, three warm up


@pytest.mark.on_streams
def test_dropout_is_random_from_step_to_step(device: torch.device) -> None:
    class Dropped(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.dropout(super().forward(x), 0.5)

    both = pair(device, Dropped)
    data = batches(device, 1) * STEPS
    for batch in data:
        simple_loop(both.ours, both.optimizer, [batch])
    assert both.captured == STEPS - WARM
    both.optimizer.param_groups[0]["lr"] = 0.0
    masks = {tuple((both.ours(data[0][0]) == 0).flatten().tolist()) for _ in range(4)}
    assert len(masks) == 4
    if device.type == "cpu":  # the stream of random numbers itself stays
        check(device, simple_loop, make_model=Dropped)


def test_random_numbers_of_the_host(device: torch.device) -> None:
    class LayerDrop(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x if random.random() < 0.5 else x * 2)

    both = check(device, simple_loop, make_model=LayerDrop)
    assert both.captured == 0
    assert "random numbers on the host" in both.optimizer.report.declined["capture"]


def test_buffers_that_the_forward_replaces(device: torch.device) -> None:
    class Counts(Net):
        calls: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls = self.calls + 1
            return super().forward(x) / self.calls

    both = check(device, simple_loop, make_model=Counts)
    assert both.captured == 0
    assert "the step sets" in both.optimizer.report.declined["capture"]


def test_transforms_and_modes_see_the_operations(device: torch.device) -> None:
    class Smooth(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(torch.tanh(self.first(x)))

    both = check(device, simple_loop, make_model=Smooth)
    before = both.captured
    x, _ = batches(device, 1)[0]
    parameters = {name: parameter.detach() for name, parameter in both.ours.named_parameters()}

    def total(parameters: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.func.functional_call(both.ours, parameters, (x,)).square().sum()

    gradients = torch.func.grad(total)(parameters)
    assert gradients["head.weight"].abs().max() > 0
    with FlopCounterMode(display=False) as flops:
        both.ours(x)
    assert flops.get_total_flops() > 0
    compiled = torch.compile(lambda x: both.ours(x) * 2, backend="eager", fullgraph=True)
    assert_same(compiled(x).detach(), both.plain(x).detach() * 2)
    assert both.captured == before
    train_both(both, simple_loop, batches(device))
