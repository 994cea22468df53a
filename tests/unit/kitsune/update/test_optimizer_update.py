"""The optimizer's update: learning rates in static tensors, what is baked in, and skipping."""

import pytest
import torch
from torch.optim.lr_scheduler import StepLR
from torch.optim.optimizer import register_optimizer_step_post_hook

from kitsune.update.loss_scaler import LossScaler
from kitsune.update.optimizer_update import Update, is_starting, parameters_of
from tests.step_cases import OPTIMIZERS, OwnSgd, adamw, sgd

CPU = torch.device("cpu")


def two_groups(make=torch.optim.AdamW, **options):
    parameters = [torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(2))]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    return make([{"params": [parameters[0]], "lr": 0.5}, {"params": [parameters[1]], "lr": 0.25}], lr=1.0, **options)


@pytest.fixture
def captured():
    """An update as a capture leaves it: the groups' own values are back, `rates` is what the graph reads."""
    update = Update(two_groups())
    update.begin_capture()
    rates = [group["lr"] for group in update.optimizer.param_groups]
    update.end_capture()
    return update, rates


def test_a_capture_reads_tensors_and_the_user_reads_numbers(captured):
    update, rates = captured
    assert [rate.item() for rate in rates] == [0.5, 0.25]
    assert all(isinstance(rate, torch.Tensor) and rate.shape == () for rate in rates)
    assert [group["lr"] for group in update.optimizer.param_groups] == [0.5, 0.25]


def test_a_changed_learning_rate_reaches_the_tensor(captured):
    update, rates = captured
    addresses = [rate.data_ptr() for rate in rates]
    for value in (0.125, 0.0, 3.0):
        update.optimizer.param_groups[0]["lr"] = value
        assert update.refresh()
        assert [rate.item() for rate in rates] == [value, 0.25]
    assert [rate.data_ptr() for rate in rates] == addresses


def test_a_learning_rate_that_is_a_tensor_is_read_at_every_step(captured):
    update, rates = captured
    own = torch.tensor(0.75)
    update.optimizer.param_groups[1]["lr"] = own
    assert update.refresh()
    own.fill_(0.5)
    assert update.refresh()
    assert rates[1].item() == 0.5


def test_an_unchanged_learning_rate_launches_nothing(captured):
    update, rates = captured
    versions = [rate._version for rate in rates]
    assert update.refresh()
    assert [rate._version for rate in rates] == versions


@pytest.mark.parametrize("key", ["weight_decay", "betas", "eps", "amsgrad", "maximize", "of_a_scheduler"])
def test_what_is_baked_in_is_watched(captured, key):
    update, _ = captured
    update.optimizer.param_groups[1][key] = (0.5, 0.5) if key == "betas" else 0.5
    assert not update.refresh()


def test_betas_that_are_changed_in_place_are_noticed(captured):
    update, _ = captured
    update.optimizer.param_groups[1]["betas"] = betas = [0.9, 0.99]
    update.begin_capture()
    update.end_capture()
    assert update.refresh()
    betas[0] = 0.5
    assert not update.refresh()


def test_what_a_scheduler_notes_down_is_not_baked_in(captured):
    update, _ = captured
    StepLR(update.optimizer, 1)
    assert "initial_lr" in update.optimizer.param_groups[0]
    assert update.refresh()


def test_a_new_group_is_noticed(captured):
    update, _ = captured
    update.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
    assert not update.refresh()


def test_a_hook_on_step_is_noticed(captured):
    update, _ = captured
    handle = update.optimizer.register_step_pre_hook(lambda *_: None)
    assert not update.refresh()
    assert "hook on optimizer.step" in update.why_not_capturable()
    handle.remove()
    assert update.refresh()
    assert update.why_not_capturable() is None


def test_a_hook_on_all_optimizers_is_noticed(captured):
    update, _ = captured
    handle = register_optimizer_step_post_hook(lambda *_: None)
    assert not update.refresh()
    handle.remove()
    assert update.refresh()


def test_a_scheduler_is_told_of_replayed_steps(captured, recwarn):
    update, _ = captured
    scheduler = StepLR(update.optimizer, 1)
    assert update.refresh()
    scheduler.step()
    assert [str(warning.message) for warning in recwarn] == []


@pytest.mark.parametrize(
    ("make", "options", "words"),
    [
        (torch.optim.AdamW, {}, None),
        (torch.optim.Adam, {"fused": True}, None),
        (torch.optim.SGD, {"fused": True}, None),
        (torch.optim.SGD, {}, "only when it is fused"),
        (torch.optim.RMSprop, {}, "RMSprop cannot"),
        (torch.optim.Adagrad, {}, "Adagrad cannot"),
        (OwnSgd, {}, "OwnSgd cannot"),
        (type("MyAdam", (torch.optim.Adam,), {}), {}, "MyAdam cannot"),  # may do anything in its own step
    ],
)
def test_why_an_update_is_not_captured(make, options, words):
    reason = Update(two_groups(make, **options)).why_not_capturable()
    assert reason is None if words is None else words in reason


@pytest.mark.parametrize("fused", [True, False])
def test_skipping_on_the_device_needs_a_fused_optimizer(fused):
    reason = Update(two_groups(fused=fused), scaler=LossScaler(CPU)).why_not_capturable()
    assert (reason is None) == fused


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("overflow", [True, False])
def test_an_overflowed_step_is_skipped(name, overflow):
    parameter = torch.nn.Parameter(torch.ones(3))
    update = Update(OPTIMIZERS[name]([parameter]), scaler=LossScaler(CPU, init_scale=4.0))
    parameter.grad = torch.full((3,), float("inf") if overflow else 4.0)
    update.prepare_gradients()
    update.step()
    assert torch.equal(parameter, torch.ones(3)) == overflow
    assert update.scaler.scale.item() == (2.0 if overflow else 4.0)
    parameter.grad = torch.full((3,), 4.0)
    update.prepare_gradients()
    update.step()
    assert torch.isfinite(parameter).all()
    assert not torch.equal(parameter, torch.ones(3))
    assert not hasattr(update.optimizer, "found_inf")


def test_gradients_are_unscaled_before_they_are_clipped():
    parameter = torch.nn.Parameter(torch.zeros(4))
    update = Update(sgd([parameter]), scaler=LossScaler(CPU, init_scale=8.0), clip_grad_norm=1.0)
    parameter.grad = torch.full((4,), 8.0)  # of norm 2 unscaled
    update.prepare_gradients()
    torch.testing.assert_close(parameter.grad, torch.full((4,), 0.5))


def test_momentum_that_is_still_to_come():
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = sgd([parameter])
    assert not is_starting(optimizer)
    parameter.grad = torch.ones(2)
    assert is_starting(optimizer)
    assert not is_starting(torch.optim.SGD([parameter], lr=1.0))
    assert not is_starting(adamw([parameter]))
    optimizer.step()
    assert not is_starting(optimizer)


def test_the_parameters_of_all_groups():
    optimizer = two_groups()
    assert [parameter.numel() for parameter in parameters_of(optimizer)] == [3, 2]
