"""Activations on the host: less memory of the GPU, and the same gradients to the bit."""

import torch
from torch import nn
from torch.nn import functional as F

from kitsune.memory import DynamicActivationOffloading

ROWS, WIDTH, LAYERS = 2**14, 512, 6
MIB = 2**20


def test_what_a_backward_reads_waits_on_the_host(device):
    torch.manual_seed(0)
    model = nn.Sequential(*(part for _ in range(LAYERS) for part in (nn.Linear(WIDTH, WIDTH), nn.GELU()))).to(device)
    x = torch.randn(ROWS, WIDTH, device=device)
    offloader = DynamicActivationOffloading()
    found, kept = [], []
    for context in (torch.enable_grad(), offloader.applied(model)):
        model.zero_grad(set_to_none=True)
        before = torch.cuda.memory_allocated(device)
        with context:
            loss = F.mse_loss(model(x), torch.zeros_like(x))
        kept.append(torch.cuda.memory_allocated(device) - before)
        loss.backward()
        found.append([parameter.grad.clone() for parameter in model.parameters()])
        del loss
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)
    assert kept[1] < kept[0] - LAYERS * ROWS * WIDTH * 4
    assert offloader.offloaded_bytes >= LAYERS * ROWS * WIDTH * 4


def test_copies_made_by_hand_can_be_read_at_once(device):
    offloader = DynamicActivationOffloading()
    given = torch.randn(2**24, device=device)
    torch.cuda._sleep(10**8)  # so that an unfinished copy would be seen
    kept = offloader.offload_activations([given])
    assert kept[0].is_pinned()
    assert torch.equal(kept[0], given.cpu())
    back = offloader.reload_activations(kept, device)
    assert torch.equal(back[0], given)
