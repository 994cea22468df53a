"""TrainStep: batches of other shapes, types and forms."""

import random
from functools import partial

import pytest
import torch
import torch._inductor.exc
import torch.nn.functional as F
from torch import nn

from tests.step_cases import (
    LR,
    Mlp,
    assert_same,
    batches,
    is_captured,
    pair,
    sgd,
    train_both,
)

CAPTURES = ["step", "segments"]
STEPS = 8  # three to warm up, one to capture, four to replay


@pytest.mark.parametrize("capture", CAPTURES)
@pytest.mark.on_streams
def test_the_odd_last_batch_runs_plain(device, capture):
    planned, plain = pair(device, {"capture": capture})
    epoch = [*batches(6), *batches(1, 2, 8)]
    train_both(planned, plain, epoch * 3)
    assert_same(planned, plain)
    assert is_captured(planned.step)
    assert len(planned.step._programs) == 1
    assert "of other shapes, or with other values of what is no tensor, run uncompiled and" in str(planned.step.report)


@pytest.mark.parametrize("capture", CAPTURES)
def test_batches_that_are_cut_to_one_length_run_by_one_program(device, capture):
    """On a GPU the kernel of a matrix product may go by the strides, and the graph has those of one batch."""
    planned, plain = pair(device, {"capture": capture}, optimizer=sgd)
    many = [(batches(1, 6, 8 + each, seed=each)[0][0].to(device)[:, :8], y) for each, (_, y) in enumerate(batches(9))]
    train_both(planned, plain, many)
    assert_same(planned, plain, **({"rtol": 1e-4, "atol": 1e-6} if device.type == "cuda" else {}))
    assert is_captured(planned.step)
    assert len(planned.step._programs) == 1


@pytest.mark.parametrize("capture", CAPTURES)
def test_batches_in_another_order_of_strides_are_others(device, capture):
    class Ordered(Mlp):
        def forward(self, x):
            return super().forward(x if x.is_contiguous() else x * 2)

    planned, plain = pair(device, {"capture": capture}, model=Ordered)
    many = [(x.t().contiguous().t() if at % 2 else x, y) for at, (x, y) in enumerate(batches(4 * STEPS))]
    train_both(planned, plain, many)
    assert_same(planned, plain)
    assert is_captured(planned.step)


@pytest.mark.on_streams
def test_a_frequent_other_shape_gets_a_program_of_its_own(device):
    planned, plain = pair(device, {"capture": "step"})
    usual, other = batches(1), batches(14, 3, 8)
    train_both(planned, plain, usual * 5)
    for count, batch in enumerate(other, start=1):
        train_both(planned, plain, [batch, *usual])
        assert len(planned.step._programs) == (1 if count <= 8 else 2)
    assert_same(planned, plain)
    assert planned.step.is_settled


class Weighted(nn.Module):
    """Takes a second input, by position or by name."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x, weight, scale=1.0):
        return self.layer(x) * weight * scale


class WithLoss(nn.Module):
    """Returns its loss itself: a tensor, a dict, or an object."""

    def __init__(self, how):
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self.how = how

    def forward(self, x, labels):
        loss = F.mse_loss(self.layer(x), labels)
        return {"tensor": loss, "one element": loss.reshape(1), "dict": {"loss": loss}, "object": Output(loss)}[
            self.how
        ]


class Output:
    def __init__(self, loss):
        self.loss = loss


@pytest.mark.parametrize("capture", ["none", "step"])
@pytest.mark.parametrize("form", ["tuple", "dict", "dict with a number"])
@pytest.mark.on_streams
def test_inputs_by_position_and_by_name(device, capture, form):
    def formed(x, y):
        inputs = {"tuple": (x, y + 1), "dict": {"x": x, "weight": y + 1}}.get(form)
        return inputs or {"x": x, "weight": y + 1, "scale": 0.5}, y

    planned, plain = pair(device, {"capture": capture}, model=Weighted)
    train_both(planned, plain, [formed(x, y) for x, y in batches(STEPS)])
    assert_same(planned, plain)
    assert planned.step.is_settled


@pytest.mark.parametrize("capture", ["none", "step"])
@pytest.mark.parametrize("how", ["tensor", "one element", "dict", "object"])
@pytest.mark.on_streams
def test_a_model_that_returns_its_loss(device, capture, how):
    planned, plain = pair(device, {"capture": capture}, model=lambda: WithLoss(how), loss_fn=None)
    many = [({"x": x, "labels": y}, None) for x, y in batches(STEPS)]
    train_both(planned, plain, many)
    assert_same(planned, plain)
    assert planned.losses[-1].shape == ()


def test_another_number_in_the_batch_is_another_step(device):
    planned, plain = pair(device, {"capture": "step"}, model=Weighted)
    many = [({"x": x, "weight": y, "scale": 0.5 + (index > 5)}, y) for index, (x, y) in enumerate(batches(STEPS))]
    train_both(planned, plain, many)
    assert_same(planned, plain)


class Holder:
    """A batch whose tensors nobody but its model can see."""

    def __init__(self, x):
        self.x = x


class Opener(Mlp):
    def forward(self, holder):
        return super().forward(holder.x)


def test_tensors_that_an_object_hides_are_not_captured(device):
    planned, plain = pair(device, {"capture": "step"}, model=Opener)
    held = Holder(torch.empty(0))
    for x, y in batches(STEPS):
        held.x = x.to(device)
        train_both(planned, plain, [(held, y)])
    assert_same(planned, plain)
    assert "Holder" in planned.step.report.declined["capture"]


def test_a_batch_that_requires_a_gradient_is_not_captured(device):
    planned, plain = pair(device, {"capture": "step"})
    for x, y in batches(STEPS):
        inputs = [x.to(device).requires_grad_() for _ in range(2)]
        for run, own in zip((planned, plain), inputs, strict=True):
            run.train([(own, y)])
        torch.testing.assert_close(inputs[0].grad, inputs[1].grad)
    assert_same(planned, plain)
    assert "requires a gradient" in planned.step.report.declined["capture"]


class Sparse(nn.Module):
    """Its table gets a sparse gradient, told by a layer or only by a call."""

    def __init__(self, told):
        super().__init__()
        self.told, self.table, self.head = told, nn.Embedding(20, 8, sparse=told), nn.Linear(8, 4)

    def forward(self, x):
        rows = (x[:, :3] * 100).long() % 20
        words = self.table(rows) if self.told else F.embedding(rows, self.table.weight, sparse=True)
        return self.head(words.mean(1))


@pytest.mark.parametrize("capture", CAPTURES)
@pytest.mark.parametrize(
    ("told", "reason"),
    [(True, "a replayed graph would not fill sparse"), (False, "is sparse, which a replayed graph would not fill")],
)
def test_sparse_gradients_are_not_captured(device, capture, told, reason):
    planned, plain = pair(
        device, {"capture": capture}, model=lambda: Sparse(told), optimizer=partial(torch.optim.SGD, lr=LR)
    )
    train_both(planned, plain, batches(STEPS))
    assert_same(planned, plain)
    assert planned.model.table.weight.grad.is_sparse
    assert reason in planned.step.report.declined["capture"]


class Stateful(Mlp):
    """Does something on the host at every step that its results depend on."""

    def __init__(self, what):
        super().__init__()
        self.what = what
        self.calls = 0
        self.carried = None
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        output = super().forward(x)
        if self.what == "counts":
            self.calls += 1
            return output * self.calls
        if self.what == "draws":
            return output * random.random()
        if self.what == "carries":
            output = output if self.carried is None else output + self.carried
            self.carried = output.detach()
            return output
        self.mean = 0.5 * self.mean + output.detach().mean(0)
        return output + self.mean


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("counts", "the step sets calls"),
        ("draws", "the step draws random numbers on the host"),
        ("carries", "the step sets carried"),
        ("replaces a buffer", "the step sets mean"),
    ],
)
@pytest.mark.on_streams
def test_what_happens_on_the_host_is_not_captured(device, what, words):
    planned, plain = pair(device, {"capture": "step"}, model=lambda: Stateful(what))
    for run in (planned, plain):
        random.seed(3)
        run.train(batches(STEPS))
    assert_same(planned, plain)
    assert planned.step.report.declined == {"capture": f"{words}, which a replayed graph would not"}
