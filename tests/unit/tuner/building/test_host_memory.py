"""The peak memory of a step on a CPU."""

import torch
from torch import nn
from torch.nn import functional as F

from kitsune import Workload
from tuner.building.host_memory import held_bytes, peak_of_step
from tuner.workloads.plain_step import plain_step

MIB = 2**20
ROWS, WIDTH = 1024, 256  # 1 MiB in fp32


def workload(layers: int) -> Workload:
    model = nn.Sequential(*[part for _ in range(layers) for part in (nn.Linear(WIDTH, WIDTH), nn.Sigmoid())])
    optimizer = torch.optim.Adam(model.parameters())
    return Workload(model, F.mse_loss, optimizer, (torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)))


def test_what_a_step_holds_before_it() -> None:
    given = workload(4)
    weights = sum(parameter.nbytes for parameter in given.model.parameters())
    assert held_bytes(given) == weights + 2 * MIB
    plain_step(given, *given.batch)
    states = 2 * weights + 4 * len(list(given.model.parameters()))  # and the number of steps of each
    assert held_bytes(given) == 2 * weights + states + 2 * MIB


def test_each_layer_adds_what_its_backward_reads() -> None:
    """Four layers more: 4 MiB of results, less 1 MiB of earlier gradients, which are freed before these are there."""
    peaks = []
    for layers in (4, 8):
        given = workload(layers)
        plain_step(given, *given.batch)
        peaks.append(peak_of_step(lambda given=given: plain_step(given, *given.batch), given) - held_bytes(given))
    assert 3 * MIB <= peaks[1] - peaks[0] <= 4 * MIB


def test_memory_that_two_tensors_share_counts_once() -> None:
    given = workload(1)
    given.model.register_buffer("view", next(given.model.parameters()).detach()[:1])
    assert held_bytes(given) == held_bytes(workload(1))
