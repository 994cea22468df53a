"""A part of a forward's autograd graph that somebody keeps is missed by every replay: such a forward is not captured.

By a recorder that takes the runs of the CPU for captures, as those of a GPU are: they give no graph to the user.
"""

from collections import OrderedDict
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses import FakeTensorMode

from kitsune.autograd.half_outputs import HalfOutput, StaticOutputs
from kitsune.autograd.hooks import roots_of
from kitsune.capture.guards import ModelGuard
from kitsune.capture.segment_graphs import Segments
from kitsune.capture.side_effects import SideEffects, kept_of_graph, newest_node
from kitsune.device.cuda_graph import HostGraph, Recorder
from kitsune.errors import CaptureError
from tests.unit.kitsune.launches.steps import CASES, CPU, warmed

KEPT = []


class Dry(Recorder):
    def __init__(self):
        super().__init__(CPU)
        self.executes = False

    def capture(self, function):
        return HostGraph.record(function)


class Expert(nn.Module):
    """Its loss has a second term, which the loop takes from where the model keeps it."""

    def __init__(self, place):
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 4)
        self.place, self.terms, self.by_name = place, [], {}

    def forward(self, x):
        hidden = torch.relu(self.first(x))
        term = hidden.square().mean()
        if self.place == "list":
            self.terms = [term]
        elif self.place == "tuple":
            self.terms = (term,)
        elif self.place == "dict":
            self.by_name["term"] = term
        elif self.place == "detached":
            self.by_name["term"] = term.detach()
        elif self.place == "elsewhere":
            KEPT[:] = [term]
        elif self.place == "hidden":
            KEPT[:] = [hidden]
        elif self.place == "grows":
            self.terms.append(term)
        return self.last(hidden)


def segments(model, *inputs, **options):
    optimizer = torch.optim.SGD([weight for weight in model.parameters() if weight.requires_grad], lr=0.1)
    return Segments(model, optimizer, model, Dry(), (inputs, {}), **options)


@pytest.fixture(autouse=True)
def _empty():
    KEPT.clear()


@pytest.mark.parametrize("place", ["list", "tuple", "dict", "elsewhere", "hidden"])
def test_a_kept_part_of_the_graph_is_found(place):
    with pytest.raises(CaptureError, match="keeps a tensor with its autograd graph"):
        segments(Expert(place), torch.randn(8, 6))


@pytest.mark.parametrize("place", ["nowhere", "detached"])
@pytest.mark.parametrize("retain_graph", [False, True])
def test_what_has_no_graph_may_be_kept(place, retain_graph):
    model, x = Expert(place), torch.randn(8, 6)
    kept = F.cross_entropy(model(x), torch.zeros(8, dtype=torch.long))  # of the iteration before
    assert segments(model, x, retain_graph=retain_graph).gradients_are_kept() is False
    kept.backward()


@pytest.mark.parametrize("name", CASES)
def test_no_model_keeps_a_graph_by_itself(name):
    step, _ = warmed(name)
    assert segments(step.model, step.inputs[0]).is_waiting is False


def test_a_compiled_model_keeps_no_graph_by_itself():
    model = Expert("nowhere")
    compiled, x = torch.compile(model, backend="aot_eager"), torch.randn(8, 6)
    compiled(x).sum().backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert Segments(model, optimizer, compiled, Dry(), ((x,), {})).is_waiting is False


def test_nodes_of_before_do_not_count():
    x = torch.randn(4, requires_grad=True)
    before = x * 2
    since = newest_node()
    assert kept_of_graph(since) is None
    after = before * 2
    assert kept_of_graph(since) is not None
    del after
    assert kept_of_graph(since) is None


def test_a_view_that_torch_does_not_tell_of_is_passed_over():
    base = torch.zeros(4, 2, requires_grad=True).clone()
    one, _ = base.unbind(1)
    with torch.no_grad():
        base.add_(1)
    since = newest_node()
    kept_of_graph(since)
    assert one.shape == (4,)


def test_tensors_without_data_that_the_compiler_keeps_are_passed_over():
    since = newest_node()
    with FakeTensorMode():
        fake = torch.empty(4, requires_grad=True) * 2
    assert kept_of_graph(since) is None
    assert fake.grad_fn is not None


@pytest.mark.parametrize(
    ("place", "change"),
    [("grows", "the step sets terms"), ("list", "the step sets terms"), ("dict", "the step sets by_name")],
)
def test_a_list_that_grows_is_told_and_one_that_holds_another_tensor(place, change):
    model, x = Expert(place), torch.randn(8, 6)
    model(x)
    host = SideEffects(model, CPU)
    model(x)
    assert host.change() == change


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.by_name.update(calls=1),
        lambda model: model.by_name.update(x=torch.ones(1)),
        lambda model: model.terms.append(None),
        lambda model: model.terms.extend([1, 2]),
        lambda model: model.by_name["within"].append(1),
        lambda model: model.by_name["within"][0].update(n=1),
    ],
)
def test_numbers_in_containers_are_seen(change):
    model = Expert("nowhere")
    model.by_name["within"] = [OrderedDict(n=0)]
    host = SideEffects(model, CPU)
    assert host.change() is None
    change(model)
    assert host.change() in ("the step sets by_name", "the step sets terms")


@pytest.mark.parametrize("twice", [False, True])
def test_other_memory_for_a_buffer_is_seen_however_often_it_changes(twice):
    model = nn.BatchNorm1d(4)
    host = SideEffects(model, CPU)
    for _ in range(1 + twice):  # the second may lie where the first did
        model.running_mean.data = model.running_mean * 0.9
    assert host.change() == "the step sets running_mean"


def test_sparse_buffers_and_numbers_of_numpy_are_looked_at():
    model = nn.Linear(2, 2)
    model.register_buffer("table", torch.eye(4).to_sparse())
    model.rate = np.float32(0.5)
    host, watch = SideEffects(model, CPU), ModelGuard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert host.change() is None
    assert watch.unchanged()
    model.rate = np.float32(0.25)
    assert host.change() == "the step sets rate"


def test_a_loss_is_found_behind_its_arguments():
    loss = nn.CrossEntropyLoss()
    for given in (loss, partial(loss), partial(partial(loss.forward))):
        assert roots_of(nn.Identity(), given)[1:] == [loss]
    assert len(roots_of(nn.Identity(), F.cross_entropy)) == 1


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_a_large_output_that_torch_compile_made_as_an_example_keeps_no_graph():
    """Its node raises when it is called, and counts as newer than all others."""
    output = StaticOutputs(None).output(torch.zeros(4, 2, dtype=torch.bfloat16, requires_grad=True).clone())
    since = newest_node()
    example = FakeTensorMode().from_tensor(output)
    assert isinstance(example, HalfOutput) and example.grad_fn is not None
    assert kept_of_graph(since) is None
