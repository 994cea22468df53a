"""What a planned step might get wrong unseen: writes that grow, constants, gradients of others; and weak proofs."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kitsune.capture.forward_dispatch import SegmentedForward
from kitsune.device.cuda_graph import Recorder
from kitsune.launches.execution.equivalence import checksum_of, distance, distances, is_as_near
from kitsune.launches.pipeline import Planner
from tests.unit.kitsune.launches.steps import CPU, even_us


@pytest.fixture(autouse=True)
def _even(monkeypatch):
    monkeypatch.setattr("kitsune.launches.plans.measured_us", even_us)


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

    monkeypatch.setattr("kitsune.launches.captured.issue", fails)
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


class Helper:
    """Of the user's: no module, and the model holds it."""

    def __init__(self, count):
        self.nested = [{"count": count}]


GLOBAL = Helper(torch.zeros(()))


class Counted(torch.autograd.Function):
    """Its backward counts too, in the tensor that it was given."""

    @staticmethod
    def forward(context, x, count):
        context.count = count
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        context.count.add_(1)
        return gradient, None


class Counting(nn.Module):
    """Counts its forwards where no buffer is."""

    def __init__(self, place):
        super().__init__()
        self.layer = nn.Linear(6, 4)
        self.place, count = place, torch.zeros(())
        if place == "buffer":
            self.register_buffer("count", count)
        elif place in ("list", "backward"):
            self.counts = [count]
        elif place == "helper":
            self.helper = Helper(count)
        elif place == "global":
            GLOBAL.nested[0]["count"] = count
        else:
            self.count = nn.Parameter(count, requires_grad=False) if place == "frozen parameter" else count

    def where(self):
        if self.place in ("list", "backward"):
            return self.counts[0]
        if self.place in ("helper", "global"):
            return (self.helper if self.place == "helper" else GLOBAL).nested[0]["count"]
        return self.count

    def forward(self, x):
        count = self.where()
        if self.place == "backward":
            return Counted.apply(self.layer(x), count)
        with torch.no_grad():
            count.add_(1)
        return self.layer(x) + count * 0


PLACES = ["buffer", "frozen parameter", "attribute", "list", "helper", "global", "backward"]


# On one stream a graph of the CPU runs the backward as it is captured, which a GPU does not.
@pytest.mark.parametrize(
    ("place", "streams"), [(place, n) for place in PLACES for n in (1, 3) if (place, n) != ("backward", 1)]
)
def test_planning_a_forward_leaves_what_it_writes_as_one_run_would(place, streams):
    model = Counting(place)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    forward = SegmentedForward(model, optimizer, model, model, CPU, capture=True, streams=streams)
    counts = []
    for _ in range(7):
        F.cross_entropy(forward(torch.randn(8, 6)), torch.randint(4, (8,))).backward()
        optimizer.step()
        optimizer.zero_grad()
        counts.append(int(model.where()))
    assert forward.streams_refusal == ""
    assert (forward.plan is not None) == (streams > 1)
    assert counts == [1, 2, 3, 4, 5, 6, 7]


def test_a_forward_that_keeps_a_tensor_somewhere_has_one_graph_that_writes_it():
    """Planned launches would write other memory in its place."""

    def seen(streams):
        torch.manual_seed(0)
        layer, helper = nn.Linear(6, 4), Helper(None)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)

        def model(x):
            hidden = layer(x)
            helper.nested[0]["last"] = hidden.detach()
            return hidden.sin()

        forward = SegmentedForward(layer, optimizer, model, model, CPU, capture=streams > 0, streams=streams)
        found = []
        for number in range(8):
            F.cross_entropy(forward(torch.full((8, 6), number / 8)), torch.arange(8) % 4).backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(helper.nested[0]["last"].sum().item())
        return found, forward

    (expected, _), (found, forward) = seen(0), seen(3)
    assert "keeps a tensor that it made" in forward.streams_refusal
    assert forward.counts["captured"] > 0
    assert found == expected


def test_a_shape_that_cannot_be_planned_takes_nothing_from_one_that_is():
    layer = nn.Linear(6, 4)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)

    def model(x):
        hidden = layer(x).tanh() * layer(x).sigmoid()
        return hidden * float(hidden.detach().sum() * 0 + 1) if len(x) == 5 else hidden

    forward = SegmentedForward(layer, optimizer, model, model, CPU, capture=True, streams=3)
    for rows in [8] * 6 + [5] * 16 + [8] * 3:
        F.cross_entropy(forward(torch.randn(rows, 6)), torch.zeros(rows, dtype=torch.long)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert forward.streams_refusal == ""
    assert forward.plan is not None
    assert forward.counts["one_stream"] == 1
    assert forward.counts["captured"] == 3 + 5 + 3


@pytest.mark.parametrize("is_refused", [False, True])
def test_planning_a_forward_draws_from_generators_of_the_users_as_one_run_would(is_refused):
    def losses(capture):
        torch.manual_seed(0)
        layer, own = nn.Linear(6, 4), torch.Generator().manual_seed(5)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)

        def model(x):
            noisy = layer(x) + torch.rand(4, generator=own)
            return noisy + float(noisy.detach().sum()) * 0 if is_refused else noisy

        forward = SegmentedForward(layer, optimizer, model, model, CPU, capture=capture, streams=3)
        found = []
        for _ in range(7):
            loss = F.cross_entropy(forward(torch.ones(8, 6)), torch.arange(8) % 4)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found, forward

    (expected, _), (found, forward) = losses(False), losses(True)
    assert found == expected
    assert bool(forward.streams_refusal) == is_refused


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
    assert distances([torch.tensor(one)], [torch.tensor(two)]) == [pytest.approx(apart)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_all_distances_at_once_are_those_one_by_one(dtype):
    torch.manual_seed(0)
    ones = [torch.randn(size).to(dtype) for size in (1, 7, 100, 0)] + [torch.tensor([1e4, -1e4]).to(dtype)]
    twos = [each + (0.01 * torch.randn(each.shape)).to(dtype) for each in ones[:-1]] + [-ones[-1]]
    ones, twos = [*ones, torch.arange(3), torch.tensor([0.0])], [*twos, torch.arange(3), torch.tensor([-0.0])]
    expected = [distance(*pair) for pair in zip(ones, twos, strict=True)]
    assert distances(ones, twos) == pytest.approx(expected, rel=torch.finfo(dtype).eps)
    assert expected[3] == expected[5] == 0.0  # nothing, and the same
    assert expected[6] > 0.0  # not the same bits


@pytest.mark.parametrize("size", [0, 1, 7, 8, 1000])
def test_other_bits_are_another_mark(size):
    trace = [torch.arange(size, dtype=torch.uint8), torch.randn(size)]
    assert checksum_of(trace) == checksum_of([each.clone() for each in trace])
    for at in range(2 if size else 0):
        other = [each.clone() for each in trace]
        other[at][-1] += 1
        assert checksum_of(trace) != checksum_of(other)


def test_noise_without_bounds_allows_nothing():
    assert is_as_near([0.0, 1e-9], [INF, 1e-9])
    assert not is_as_near([1e-9], [INF])
    assert not is_as_near([INF], [INF])
