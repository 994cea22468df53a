"""TrainStep: what cannot be applied is declined."""

import warnings

import pytest
import torch
import torch._inductor.exc

from kitsune.errors import CaptureError, DeclinedError, WorkloadError
from kitsune.techniques import TECHNIQUES
from tests.step_cases import (
    OPTIMIZERS,
    Convnet,
    Mlp,
    Planned,
    assert_same,
    batches,
    is_captured,
    pair,
    train_both,
)

IMAGES = (4, 3, 8, 8)
STEPS = 8  # three to warm up, one to capture, four to replay


def failing(monkeypatch, name, error, *, after=0):
    """Makes a technique's forward fail, from the call after `after` on; returns the list of calls."""
    technique, calls = TECHNIQUES[name], []

    def apply(choice, build):
        forward = build.forward

        def broken(*args, **kwargs):
            calls.append(1)
            if len(calls) <= after:
                return forward(*args, **kwargs)
            forward(*args, **kwargs)
            raise error

        build.forward = broken

    monkeypatch.setattr(technique, "apply", apply)
    return calls


@pytest.mark.parametrize("after", [0, 1])
@pytest.mark.parametrize(
    ("name", "choice", "error"),
    [
        ("attention", "math", RuntimeError("No available kernel. Aborting execution.")),
        ("compile", "default", torch._dynamo.exc.InternalTorchDynamoError("the compiler broke")),
        ("compile", "default", torch._inductor.exc.InductorError(ValueError("the compiler broke"), None)),
        ("capture", "step", CaptureError("nothing can be captured")),
    ],
)
def test_a_technique_that_fails_in_the_first_steps_is_declined(device, monkeypatch, name, choice, error, after):
    calls = failing(monkeypatch, name, error, after=after)
    planned, plain = pair(device, {name: choice, "update": "fused"}, model=Convnet)
    train_both(planned, plain, batches(STEPS, *IMAGES))  # batch statistics too: as if it had never been tried
    assert len(calls) == after + 1
    assert planned.step.report.declined == {name: str(error).splitlines()[0]}
    assert planned.step.report.applied == {"update": "fused"}
    assert_same(planned, plain, rtol=1e-4, atol=1e-6)


def test_a_failed_technique_leaves_the_generators_as_they_were(device, monkeypatch):
    failing(monkeypatch, "attention", RuntimeError("No available kernel. Aborting execution."))
    planned, plain = pair(device, {"attention": "math"}, model=lambda: Mlp(dropout=0.5))
    train_both(planned, plain, batches(STEPS))
    assert_same(planned, plain)


def test_a_capture_that_fails_late_is_declined(device, monkeypatch):
    planned, plain = pair(device, {"capture": "step"}, optimizer=OPTIMIZERS["adamw by hand fused"])
    train_both(planned, plain, batches(STEPS))
    assert is_captured(planned.step)

    def refuse(function):
        raise CaptureError("out of graphs")

    monkeypatch.setattr(planned.step._recorder, "capture", refuse)
    for run in (planned, plain):
        run.optimizer.param_groups[0]["weight_decay"] = 0.25  # a new graph is needed
    train_both(planned, plain, batches(STEPS))
    assert planned.step.report.declined == {"capture": "out of graphs"}
    assert_same(planned, plain)


def test_declining_may_raise(device, monkeypatch):
    with pytest.raises(DeclinedError, match="layout cannot be applied: the model has no convolution") as caught:
        pair(device, {"layout": "channels_last"}, on_decline="raise")
    assert (caught.value.knob, caught.value.reason) == ("layout", "the model has no convolution")


def test_declining_in_the_first_step_may_raise_and_training_can_go_on(device, monkeypatch):
    failing(monkeypatch, "attention", RuntimeError("No available kernel. Aborting execution."))
    planned, plain = pair(device, {"attention": "math"}, on_decline="raise")
    with pytest.raises(DeclinedError, match="attention cannot be applied: No available kernel"):
        planned.train(batches(1))
    train_both(planned, plain, batches(STEPS))
    assert_same(planned, plain)


class Moody(Mlp):
    """Raises on demand."""

    error: Exception | None = None

    def forward(self, x):
        if self.error is not None:
            raise self.error
        return super().forward(x)


@pytest.mark.parametrize("knobs", [{}, {"update": "fused"}, {"capture": "step"}])
@pytest.mark.parametrize(
    "error", [RuntimeError("mine"), ValueError("mine"), KeyError("mine"), torch.OutOfMemoryError()]
)
def test_a_users_error_is_the_users(device, knobs, error):
    planned, plain = pair(device, knobs, model=Moody)
    planned.model.error = error
    with pytest.raises(type(error)) as caught:
        planned.train(batches(1))
    assert caught.value is error
    assert not planned.step.report.declined
    planned.model.error = None
    train_both(planned, plain, batches(STEPS))
    assert_same(planned, plain, **({"rtol": 1e-4, "atol": 1e-6} if "update" in knobs else {}))


def test_a_loss_that_is_no_scalar_is_refused(device):
    planned, _ = pair(device, {}, loss_fn=lambda output, y: (output - y).abs())
    with pytest.raises(WorkloadError, match="not a tensor of one element"):
        planned.train(batches(1))


@pytest.mark.parametrize("update", ["fused", "kitsune"])
def test_nothing_warns(device, update):
    planned, plain = pair(device, {"capture": "step", "update": update, "precision": "fp16"})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train_both(planned, plain, batches(STEPS))
    assert [str(warning.message) for warning in caught] == []
    assert isinstance(planned, Planned)


def test_no_program_is_left_when_applying_the_plan_again_fails(device, monkeypatch):
    planned, _ = pair(device, {"capture": "step"})
    planned.train(batches(8))
    planned.model.first.requires_grad_(False)

    def fails(self, choice, build):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(type(TECHNIQUES["capture"]), "apply", fails)
        with pytest.raises(MemoryError):
            planned.train(batches(1))
    assert len(planned.step._programs) == 0
    planned.train(batches(8))
    assert planned.step.is_settled
