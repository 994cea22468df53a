"""The drop-in on several streams of a GPU: what Inductor's kernels and checkpoints add to tests/contracts/drop_in."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from kitsune.optimizer import KitsuneOptimizer
from kitsune.plan import Plan
from tests.contracts.towers import Stats, Towers, trained
from tests.contracts.worlds import streams_device_of


@pytest.fixture
def streams_device(monkeypatch, tmp_path):
    yield from streams_device_of("gpu", monkeypatch, tmp_path)


class Compiled(Towers):
    """Its running mean is written by a kernel of Inductor's."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.stats = Stats(device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.left(x)) * torch.relu(self.right(x))
        self.stats.see(hidden)
        return self.last(hidden)


def test_planning_leaves_no_trace_in_what_compiled_code_writes(streams_device):
    found = []
    for streams in (1, 3):
        torch.manual_seed(0)
        model = Compiled(streams_device).to(streams_device)
        plan = Plan.by_hand(capture="segments", compile="default", **({"streams": streams} if streams > 1 else {}))
        optimizer = KitsuneOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), plan=plan)
        parameters = trained(model, optimizer)
        assert optimizer.report.applied == dict(plan.knobs)
        found.append([*parameters, model.stats.means[0]["hidden"].clone()])
        optimizer.close()
    assert all(map(torch.equal, *found))
    assert found[0][-1].abs().sum() > 0


class Checkpointed(Towers):
    """Its backward runs a forward of its own, and refuses to be asked for the gradients of chosen tensors."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = checkpoint(lambda given: torch.relu(self.right(given)), self.left(x)[:, :8], use_reentrant=True)
        return self.last(hidden)


@pytest.mark.parametrize("streams", [1, 3])
def test_a_backward_that_cannot_run_apart_leaves_the_training_alone(streams_device, streams):
    found = []
    for ours in (False, True):
        torch.manual_seed(0)
        model = Checkpointed().to(streams_device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if ours:
            optimizer = KitsuneOptimizer(optimizer, num_streams=streams, capture_graph=True)
        found.append(trained(model, optimizer))
    assert all(map(torch.equal, *found))
    assert "capture" in optimizer.report.declined
    optimizer.close()
