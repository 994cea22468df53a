"""What a planned step might get wrong unseen: writes that grow, constants, gradients of others; and weak proofs."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kitsune.device import Recorder
from kitsune.engine.dispatch import SegmentedForward
from kitsune.engine.planner import Planner
from kitsune.engine.proof import distance, is_as_near
from tests.unit.engine.steps import CPU, even_us


@pytest.fixture(autouse=True)
def _even(monkeypatch):
    monkeypatch.setattr("kitsune.engine.planned.measured_us", even_us)


def planned(step, *inputs):
    planner = Planner(Recorder(CPU), 3)
    graph, result = planner.capture(step, list(inputs))
    return planner.refusal, graph, result


@pytest.mark.parametrize("name", ["mm", "cat"])
def test_out_that_grows_within_its_memory_is_declined(name):
    x, weight, work = torch.randn(8, 6), torch.randn(6, 6), torch.zeros(96)

    def step():
        if name == "mm":
            torch.mm(x, weight, out=work[:0])
        else:
            torch.cat([x, x], out=work[:0])
        return (work[:48].view(8, 6) + x @ weight).sum()

    refusal, _, _ = planned(step, x)
    assert "changes the size of a tensor that it writes" in refusal
    assert "test_traces.py" in refusal


def test_tensors_that_only_look_otherwise_are_written_as_ever():
    x = torch.randn(4, 3)

    def step():
        hidden = x * 2
        hidden.t_()
        hidden.unsqueeze_(0)
        return hidden.add_(1).sum()

    refusal, graph, result = planned(step, x)
    assert refusal == ""
    x.normal_()
    graph.replay()
    assert torch.equal(result, step())


def test_the_gradient_of_a_leaf_that_the_step_does_not_return_is_kept_by_somebody():
    layer, x, probe = nn.Linear(6, 4), torch.randn(8, 6), torch.zeros(6, requires_grad=True)

    def step():
        probe.grad = None
        layer.zero_grad()
        loss = (layer(x + probe) ** 2).mean()
        loss.backward()
        return loss.detach(), [parameter.grad for parameter in layer.parameters()]

    assert planned(step, x)[0].startswith("the step keeps a tensor that it made")


def test_a_constant_that_is_written_is_declined():
    x, y = torch.randn(8, 6), torch.arange(8) % 4

    def step():
        seen = torch.tensor([0.0, 0.0, 0.0, 0.0])
        seen[y] = 1.0
        return (x.sum() * seen).sum()

    assert "makes a constant and writes into it" in planned(step, x, y)[0]


def test_a_tensor_that_is_only_passed_through_was_there():
    total, x, other = torch.zeros(3), torch.ones(3), torch.ones(2)

    def step():
        total.add_(x)
        return other

    refusal, graph, result = planned(step, x)
    assert refusal == ""
    assert total.tolist() == [1, 1, 1], "the recorded step alone has run"
    graph.replay()
    assert total.tolist() == [2, 2, 2]
    assert torch.equal(result, other)


def test_capturing_that_fails_leaves_the_state_as_it_was(monkeypatch):
    total, x = torch.zeros(3), torch.ones(3)

    def step():
        return total.add_(x).sum()

    def fails(*given):
        total.add_(100)
        raise KeyError(2)

    monkeypatch.setattr("kitsune.engine.planner.issue", fails)
    assert "KeyError" in planned(step, x)[0]
    assert total.tolist() == [1, 1, 1]


def test_lists_that_are_parts_of_one_tensor_are_copied_whole():
    x = [torch.randn(size) for size in (40_000, 30_000, 7, 2000)]

    def step():
        parts = [x[0] * 2, (x[1] * 2).sin(), (x[2] * 2).sin().cos(), x[3] * 3]
        flat = torch.empty(72_007)
        torch._foreach_copy_(flat.split([len(part) for part in parts]), parts)
        return flat.sin()

    refusal, graph, result = planned(step, *x)
    assert refusal == ""
    for each in x:
        each.normal_()
    graph.replay()
    assert torch.equal(result, step())


class Counting(nn.Module):
    """Counts its forwards where no buffer is."""

    def __init__(self, place):
        super().__init__()
        self.layer = nn.Linear(6, 4)
        count = torch.zeros(())
        if place == "buffer":
            self.register_buffer("count", count)
        elif place == "list":
            self.counts = [count]
        else:
            self.count = nn.Parameter(count, requires_grad=False) if place == "frozen parameter" else count

    def forward(self, x):
        count = self.counts[0] if hasattr(self, "counts") else self.count
        with torch.no_grad():
            count.add_(1)
        return self.layer(x) + count * 0, count


@pytest.mark.parametrize("place", ["buffer", "frozen parameter", "attribute", "list"])
@pytest.mark.parametrize("streams", [1, 3])
def test_planning_a_forward_leaves_what_it_writes_as_one_run_would(place, streams):
    model = Counting(place)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    forward = SegmentedForward(
        model, optimizer, lambda x: model(x)[0], lambda x: model(x)[0], CPU, capture=True, streams=streams
    )
    counts = []
    for _ in range(7):
        F.cross_entropy(forward(torch.randn(8, 6)), torch.randint(4, (8,))).backward()
        optimizer.step()
        optimizer.zero_grad()
        counts.append(int(model.counts[0] if place == "list" else model.count))
    assert forward.streams_refusal == ""
    assert (forward.plan is not None) == (streams > 1)
    assert counts == [1, 2, 3, 4, 5, 6, 7]


INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("one", "two", "apart"),
    [
        ([1.0, INF], [1.0, INF], 0.0),
        ([1.0, INF], [2.0, INF], 1.0),
        ([4.0, NAN], [2.0, NAN], 0.5),
        ([1.0, INF], [1.0, 2.0], INF),
        ([1.0, INF], [1.0, -INF], INF),
        ([1.0, NAN], [1.0, 2.0], INF),
        ([1, 2, 3, 4], [1, 2, 3, 10**6], 0.25),
        ([True, False], [True, True], 0.5),
    ],
)
def test_what_is_no_number_hides_nothing(one, two, apart):
    assert distance(torch.tensor(one), torch.tensor(two)) == pytest.approx(apart)


def test_noise_without_bounds_allows_nothing():
    assert is_as_near([0.0, 1e-9], [INF, 1e-9])
    assert not is_as_near([1e-9], [INF])
    assert not is_as_near([INF], [INF])
