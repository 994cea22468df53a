"""The drop-in, and segments of a TrainStep, with launches on several streams."""

import pytest
import torch
from torch import nn

from kitsune.optimizer import KitsuneOptimizer
from kitsune.plan import Plan
from tests.contracts.towers import Stats, Towers, towers, trained
from tests.contracts.worlds import FORWARDS
from tests.step_cases import OPTIMIZERS, Convnet, assert_same, batches, pair, train_both

pytestmark = pytest.mark.only_on_streams


def test_num_streams_by_hand(streams_device):
    plain, model = towers(streams_device), towers(streams_device)
    optimizer = KitsuneOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), num_streams=3, memory_pool_size="1GB")
    expected = trained(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    assert all(map(torch.equal, trained(model, optimizer), expected))
    report = optimizer.report
    assert report.applied == {"capture": "segments", "streams": 3, "pool_bytes": 2**30}
    assert optimizer.scheduler.num_streams == 3
    assert "note      backward: " in str(report)
    assert " on 3 streams: " in str(report) or " on 2 streams: " in str(report)
    optimizer.close()


class Out(nn.Module):
    """Its numbers depend on what it counts where nobody looks."""

    COUNTS = type("Counts", (), {"calls": 0})()

    def __init__(self) -> None:
        super().__init__()
        self.towers = Towers()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.COUNTS.calls += 1
        return self.towers(x) * (1.0 + self.COUNTS.calls % 2)


@pytest.mark.parametrize("capture", ["segments", "step"])
def test_a_step_that_the_proof_finds_erratic_is_not_captured_at_all(streams_device, capture):
    planned, _ = pair(streams_device, {"capture": capture, "streams": 2}, model=Out, optimizer=OPTIMIZERS["sgd"])
    planned.train(batches(10))
    assert "something on the host decides what it does" in planned.step.report.declined["capture"]
    assert planned.step.report.applied == {}


def test_a_loss_that_replaces_what_it_reads_is_not_captured_at_all(streams_device):
    planned, plain = pair(streams_device, {"capture": "step", "streams": 2}, optimizer=OPTIMIZERS["sgd"])
    for run in (planned, plain):
        kept = {"mean": torch.zeros((), device=streams_device)}

        def loss_fn(output, y, kept=kept):
            loss = nn.functional.mse_loss(output, y)
            kept["mean"] = 0.9 * kept["mean"] + 0.1 * loss.detach()
            return loss + 0.1 * loss * kept["mean"]

        run.loss_fn = loss_fn
    planned.start({"capture": "step", "streams": 2})
    train_both(planned, plain, batches(10))
    assert_same(planned, plain)
    assert "reads a tensor that the step releases" in planned.step.report.declined["capture"]


def test_before_anything_is_decided_there_is_one_stream(streams_device):
    optimizer = KitsuneOptimizer(torch.optim.SGD(towers(streams_device).parameters(), lr=0.1), num_streams=3)
    assert optimizer.scheduler.num_streams == 1
    optimizer.close()


@pytest.mark.parametrize("model", [Towers, Convnet])
def test_segments_of_a_train_step_are_planned_too(streams_device, model):
    knobs = {"capture": "segments", "streams": 2}
    planned, plain = pair(streams_device, knobs, model=model)
    shape = (6, 3, 8, 8) if model is Convnet else (6, 8)
    train_both(planned, plain, batches(10, *shape))
    assert_same(planned, plain)
    assert planned.step.report.applied == knobs
    assert planned.step.report.picture is not None


def test_a_plan_of_a_whole_step_keeps_its_streams_in_the_loop(streams_device):
    model = towers(streams_device)
    plan = Plan.by_hand(capture="step", streams=2)
    optimizer = KitsuneOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), plan=plan)
    trained(model, optimizer)
    assert optimizer.report.applied == {"capture": "segments", "streams": 2}
    optimizer.close()


def test_everything_that_was_captured_was_planned(device):
    model = towers(device)
    optimizer = KitsuneOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), capture_graph=True)
    trained(model, optimizer)
    (forward,) = FORWARDS
    assert forward.streams_refusal == ""
    assert forward.plan is not None
    assert forward.plan.schedule.streams > 1
    optimizer.close()


class Scaled(torch.autograd.Function):
    """The identity, whose backward keeps a running mean of the gradients in a tensor that it is given."""

    @staticmethod
    def forward(context, hidden: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
        context.mean = mean
        return hidden * 1.0

    @staticmethod
    def backward(context, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        context.mean.mul_(0.9).add_(gradient.mean(0), alpha=0.1)
        return gradient, None


class Watched(Towers):
    """Towers with a running mean of its hidden values and one of their gradients, in no buffers."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.stats, self.backward_stats = Stats(device), Stats(device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.left(x)) * torch.relu(self.right(x))
        self.stats.see(hidden)
        return self.last(Scaled.apply(hidden, self.backward_stats.means[0]["hidden"]))

    def seen(self) -> list[torch.Tensor]:
        return [self.stats.means[0]["hidden"], self.backward_stats.means[0]["hidden"]]


def test_planning_leaves_no_trace_in_what_only_the_user_knows_of(streams_device):
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Watched(streams_device).to(streams_device))
    plain, model = models
    optimizer = KitsuneOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), num_streams=3)
    expected = trained(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    assert all(map(torch.equal, trained(model, optimizer), expected))
    assert optimizer.report.applied == {"capture": "segments", "streams": 3}
    assert optimizer.counts["captured"] > 0
    assert all(map(torch.equal, model.seen(), plain.seen()))
    assert all(mean.abs().sum() > 0 for mean in plain.seen())
    optimizer.close()


class ReturnsWeights(Towers):
    """As for terms of the loss that are the loop's."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return super().forward(x), self.left.weight, self.right.bias * 2


@pytest.mark.parametrize("share", [0.0, 0.1])
def test_outputs_that_are_parameters(streams_device, share):
    def weights_after(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        for x, y in batches(12):
            output, *terms = model(x.to(streams_device))
            loss = nn.functional.mse_loss(output, y.to(streams_device))
            if share:
                loss = loss + share * sum(term.square().mean() for term in terms)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return [parameter.detach() for parameter in model.parameters()]

    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(ReturnsWeights().to(streams_device))
    plain, model = models
    optimizer = KitsuneOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), num_streams=3)
    expected = weights_after(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    torch.testing.assert_close(weights_after(model, optimizer), expected, rtol=1e-4, atol=1e-5)
    assert optimizer.report.applied == {"capture": "segments", "streams": 3}
    optimizer.close()
