"""TrainStep: steps that a replay would not repeat are not captured."""

import functools
from functools import partial

import pytest
import torch
import torch._inductor.exc
import torch.nn.functional as F
from torch import nn

from tests.step_cases import (
    LR,
    OPTIMIZERS,
    Mlp,
    assert_same,
    batches,
    is_captured,
    pair,
    train_both,
)

CAPTURES = ["step", "segments"]
STEPS = 8  # three to warm up, one to capture, four to replay


class Shifting(Mlp):
    """It centers its batch where that lies."""

    def forward(self, x):
        return super().forward(x.sub_(0.1))


@pytest.mark.parametrize("capture", CAPTURES)
def test_a_step_that_writes_into_its_batch_is_not_captured(device, capture):
    planned, plain = pair(device, {"capture": capture}, model=Shifting)
    for run in (planned, plain):
        (x, y), *_ = batches(1)
        same = x.to(device), y.to(device)
        run.train([same] * STEPS)
    assert_same(planned, plain)
    assert "into a copy" in planned.step.report.declined["capture"]


def as_computed(output, y):
    """A loss of the type of the output: what autocast made of it is seen, however little it changes the numbers."""
    missing = output - y.to(output.dtype)
    return (missing * missing).mean()


@pytest.mark.parametrize("first", [True, False])
def test_the_autocast_of_the_caller_is_that_of_the_step(device, first):
    planned, plain = pair(device, {"capture": "step"}, loss_fn=as_computed)
    many = batches(2 * STEPS)
    for number, batch in enumerate(many):  # a context each: casts of weights are kept to the end of one
        with torch.autocast(device.type, torch.bfloat16, enabled=first == (number < STEPS)):
            train_both(planned, plain, [batch])
    assert {loss.dtype for loss in plain.losses} == {torch.float32, torch.bfloat16}
    assert [loss.dtype for loss in planned.losses] == [loss.dtype for loss in plain.losses]
    # What differs by the last bit of fp32 may be rounded to another bfloat16.
    assert_same(planned, plain, **({} if device.type == "cpu" else {"rtol": 2e-2, "atol": 2e-3}))
    assert planned.step.report.applied == {"capture": "step"}


class Annealed(nn.Module):
    """A loss that knows modes and weights, and may count its calls."""

    def __init__(self, device, counts=False):
        super().__init__()
        self.counts, self.calls, self.weight = counts, 0, torch.ones(1, device=device)
        self.error = nn.MSELoss()

    def forward(self, output, y):
        self.calls += self.counts
        share = min(1.0, self.calls / 10) if self.counts else 1.0
        return self.error(output, y) * share * (self.weight if self.training else 0.1)


def with_a_loss_each(device, **options):
    planned, plain = pair(device, {"capture": "step"})
    for run in (planned, plain):
        run.loss_fn = Annealed(device, **options)
    planned.start({"capture": "step"})
    return planned, plain


def test_a_loss_that_counts_is_not_captured(device):
    planned, plain = with_a_loss_each(device, counts=True)
    train_both(planned, plain, batches(STEPS))
    assert_same(planned, plain)
    assert planned.step.report.declined["capture"].startswith("the step sets loss_fn.calls")


def weighted_anew(loss_fn):
    loss_fn.weight = torch.full_like(loss_fn.weight, 3.0)


@pytest.mark.parametrize("change", [nn.Module.eval, weighted_anew])
def test_a_loss_that_the_loop_changes_is_captured_anew(device, change):
    planned, plain = with_a_loss_each(device)
    many = batches(2 * STEPS)
    train_both(planned, plain, many[:STEPS])
    assert planned.step.is_settled
    for run in (planned, plain):
        change(run.loss_fn)
    train_both(planned, plain, many[STEPS:])
    assert_same(planned, plain)
    assert planned.step.report.applied == {"capture": "step"}


class Centered(nn.Module):
    """A loss that learns, by an optimizer of its own."""

    def __init__(self):
        super().__init__()
        self.center = nn.Parameter(torch.zeros(4))

    def forward(self, output, y):
        return F.mse_loss(output, y) + (output - self.center).square().mean()


@pytest.mark.parametrize("capture", CAPTURES)
def test_a_loss_that_learns_by_an_optimizer_of_its_own(device, capture):
    planned, plain = pair(device, {"capture": capture})
    for run in (planned, plain):
        run.loss_fn = Centered().to(device)
    planned.start({"capture": capture})
    for run in (planned, plain):
        own = torch.optim.SGD(run.loss_fn.parameters(), lr=0.5)
        for batch in batches(2 * STEPS):
            own.zero_grad()
            run.train([batch])
            own.step()
    assert_same(planned, plain)
    torch.testing.assert_close(planned.loss_fn.center, plain.loss_fn.center)
    assert bool(plain.loss_fn.center.any())
    told = planned.step.report.declined.get("capture", "")
    assert ("the gradient of a tensor (4) that is no parameter" in told) == (capture == "step")


class Doubled(torch.autograd.Function):
    """What it keeps has the name that nodes of leaves have theirs under."""

    @staticmethod
    def forward(context, x):
        context.variable = 2
        return x * context.variable

    @staticmethod
    def backward(context, gradient):
        return gradient * context.variable


class Starting(Mlp):
    """It begins with a state that requires a gradient, which nobody asks for."""

    def forward(self, x):
        return Doubled.apply(super().forward(x)) + torch.zeros(4, device=x.device, requires_grad=True)


@pytest.mark.parametrize("capture", CAPTURES)
def test_a_leaf_that_the_step_makes_and_lets_go_of_keeps_nothing_out(device, capture):
    planned, plain = pair(device, {"capture": capture}, model=Starting)
    train_both(planned, plain, batches(STEPS))
    assert_same(planned, plain)
    assert planned.step.report.applied == {"capture": capture}


class Pushed(Mlp):
    """It asks for the gradient of its own input, wherever that was copied to."""

    def forward(self, x):
        output = super().forward(x.requires_grad_())
        (force,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
        return output + force.mean()


@pytest.mark.parametrize("capture", CAPTURES)
def test_a_batch_that_the_forward_has_require_a_gradient(device, capture):
    planned, plain = pair(device, {"capture": capture}, model=Pushed)
    train_both(planned, plain, [(x.clone(), y) for x, y in batches(STEPS)])
    assert_same(planned, plain)
    assert "gradient" in planned.step.report.declined["capture"]


@pytest.mark.parametrize("given", ["itself", "with an argument", "a method of it"])
def test_a_hook_on_the_loss_runs_at_every_step(device, given):
    planned, plain = with_a_loss_each(device)
    calls = []
    loss = planned.loss_fn
    (loss.error if given == "a method of it" else loss).register_forward_hook(lambda *_: calls.append(1))
    if given != "itself":
        planned.step.close()
        planned.loss_fn = loss.forward if given == "a method of it" else functools.partial(loss)
        planned.start({"capture": "step"})
    train_both(planned, plain, batches(STEPS))
    assert_same(planned, plain)
    assert len(calls) == STEPS
    where = "error" if given == "a method of it" else "the loss"
    assert f"a forward hook on {where} would not run" in planned.step.report.declined["capture"]


def quantized(x):
    return torch.quantize_per_tensor(x, 0.1, 0, torch.quint8)


def nested(x):
    return torch.nested.nested_tensor([*x])


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch warns that one is new, and the other one old
@pytest.mark.parametrize("make", [quantized, nested])
@pytest.mark.parametrize("capture", CAPTURES)
def test_a_batch_of_what_is_no_plain_tensor_runs_uncaptured(device, capture, make):
    class Dense(Mlp):
        def forward(self, x):
            return super().forward(x.dequantize() if x.is_quantized else torch.nested.to_padded_tensor(x, 0.0))

    planned, plain = pair(device, {"capture": capture}, model=Dense)
    train_both(planned, plain, [(make(x.to(device)), y) for x, y in batches(STEPS)])
    assert_same(planned, plain)
    reason = planned.step.report.declined["capture"]
    is_waiting = device.type == "cuda" and make is nested and "waits for the device" in reason  # for its sizes
    assert "tensor, whose tensors cannot be found" in reason or is_waiting


def test_a_learning_rate_that_is_a_tensor_for_a_while(device):
    planned, plain = pair(device, {"capture": "step"}, optimizer=OPTIMIZERS["adamw by hand fused"])
    rates = [LR] * STEPS + [torch.tensor(LR / 4, device=device)] * 2 + [LR] * 2
    for rate, batch in zip(rates, batches(len(rates)), strict=True):
        for run in (planned, plain):
            run.optimizer.param_groups[0]["lr"] = rate
        train_both(planned, plain, [batch])
    assert_same(planned, plain)
    assert is_captured(planned.step)


class Carrying(Mlp):
    """It carries what it has seen into the next step, in a tuple, or by other memory for a buffer."""

    def __init__(self, place):
        super().__init__()
        self.place, self.carried = place, (torch.zeros(4), torch.zeros(4))
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        out = super().forward(x)
        if self.place == "tuple":
            out = out + 0.1 * self.carried[0].to(out.device)
            self.carried = (out.detach().mean(0), self.carried[0])
        else:
            out = out + 0.1 * self.mean
            self.mean.data = 0.9 * self.mean + 0.1 * out.detach().mean(0)
        return out


@pytest.mark.parametrize("capture", CAPTURES)
@pytest.mark.parametrize(("place", "named"), [("tuple", "carried"), ("buffer", "mean")])
def test_state_that_is_carried_to_the_next_step_is_not_captured(device, capture, place, named):
    planned, plain = pair(device, {"capture": capture}, model=partial(Carrying, place))
    train_both(planned, plain, batches(STEPS))
    assert_same(planned, plain)
    assert planned.step.report.declined["capture"].startswith(f"the step sets {named}")
