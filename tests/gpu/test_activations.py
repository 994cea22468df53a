"""Activations in bf16 on a GPU, where autocast computes norms in fp32: captured, on several streams, and in a loop."""

import gc

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from kitsune import KitsuneOptimizer, Plan, TrainStep

BF16 = {"precision": "bf16", "compile": "default", "update": "kitsune"}
WIDTH, CLASSES, LAYERS = 256, 1000, 6


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.0, self.training)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.norm = nn.Embedding(CLASSES, WIDTH), nn.LayerNorm(WIDTH)
        self.positions = nn.Parameter(0.02 * torch.randn(128, WIDTH))
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        return self.head(self.norm(self.blocks(self.embedding(x) + self.positions)))


def loss_of(output, y):
    return F.cross_entropy(output.flatten(0, 1), y.flatten())


def batches(device, steps=8):
    chance = torch.Generator().manual_seed(1)
    return [torch.randint(0, CLASSES, (2, 64, 128), generator=chance).to(device).unbind() for _ in range(steps)]


def made(device):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Net().to(device)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def trained(device, knobs):
    """(losses, bytes that a captured step or a compiled forward and backward take at most)."""
    gc.collect()
    model, optimizer = made(device)
    with TrainStep(model, loss_of, optimizer, Plan.by_hand(**knobs)) as step:
        losses = [step(*batch).item() for batch in batches(device)]
        assert step.report.declined == {}
        torch.cuda.reset_peak_memory_stats(device)
        step(*batches(device)[0])
        return losses, torch.cuda.max_memory_allocated(device)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("how", [{}, {"capture": "step"}, {"capture": "step", "streams": 3}], ids=str)
def test_the_same_training_with_less_memory(device, more_streams_win, how):
    ours, our_bytes = trained(device, {**BF16, **how, "activations": "bf16"})
    plain, plain_bytes = trained(device, {**BF16, **how})
    assert ours == pytest.approx(plain, rel=1e-2)
    stream = 64 * 128 * WIDTH
    if not how:
        assert plain_bytes - our_bytes > LAYERS * stream  # each block keeps its input, of 4 bytes an element or of 2


@pytest.mark.timeout(240)
def test_in_a_loop_of_the_users(device):
    found = []
    for knobs in ({**BF16, "capture": "segments", "activations": "bf16", "weights": "bf16_copies"}, BF16):
        model, optimizer = made(device)
        optimizer = KitsuneOptimizer(optimizer, plan=Plan.by_hand(**knobs))
        losses = []
        for x, y in batches(device):
            optimizer.zero_grad()
            output = model(x)
            assert output.dtype == torch.float32
            loss = loss_of(output, y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert optimizer.report.declined == {}
        optimizer.close()
        found.append(losses)
    assert found[0] == pytest.approx(found[1], rel=1e-2)
