"""Mixed precision by hand: torch's autocast and scaler, by one configuration, with counts that are true."""

import copy
import itertools
import pickle

import pytest
import torch
from torch import nn

from kitsune.amp import AMPConfig, GradScaler, autocast
from kitsune.errors import SettingsError

FP16 = AMPConfig(dtype=torch.float16, init_scale=2.0**10, growth_interval=3, growth_factor=4.0, backoff_factor=0.25)


def trained(scaler, steps, overflow_at=()):
    """A model after so many steps by the scaler; in some of them a gradient is infinite."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(steps):
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).square().sum()
        scaler.scale(loss).backward()
        if number in overflow_at:
            model.weight.grad[0, 0] = torch.inf
        scaler.step(optimizer)
        scaler.update()
    return model


def test_no_step_is_skipped_where_all_gradients_are_finite():
    scaler = GradScaler("cpu", config=FP16)
    trained(scaler, 5)
    assert (scaler.statistics.steps, scaler.statistics.skipped) == (5, 0)
    assert scaler.statistics.scale == 2.0**10 * 4.0  # grown once, after three good steps


@pytest.mark.parametrize("overflow_at", [{0}, {2}, {1, 3}])
def test_every_overflow_is_counted_once(overflow_at):
    scaler = GradScaler("cpu", config=FP16)
    model = trained(scaler, 4, overflow_at)
    assert (scaler.statistics.steps, scaler.statistics.skipped) == (4, len(overflow_at))
    assert scaler.get_scale() <= 2.0**10 * 0.25 ** len(overflow_at) * 4.0
    assert all(parameter.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("overflows", list(itertools.product([False, True], repeat=3)))
def test_each_step_of_each_optimizer_counts_by_itself(overflows):
    scaler = GradScaler("cpu", config=FP16)
    models = [nn.Linear(2, 1) for _ in overflows]
    optimizers = [Stepped(model.parameters(), lr=0.1) for model in models]
    for _ in range(2):
        scaler.scale(sum(model(torch.ones(1, 2)).sum() for model in models)).backward()
        for model, optimizer, overflow in zip(models, optimizers, overflows, strict=True):
            model.weight.grad.fill_(torch.nan if overflow else 1.0)
            scaler.step(optimizer)
        scaler.update()
    assert (scaler.statistics.steps, scaler.statistics.skipped) == (6, 2 * sum(overflows))
    assert scaler.statistics.steps - scaler.statistics.skipped == sum(optimizer.steps for optimizer in optimizers)


class Stepped(torch.optim.SGD):
    """Counts the steps that it takes."""

    steps = 0

    def step(self, closure=None):
        self.steps += 1
        return super().step(closure)


def test_an_optimizer_that_skips_by_itself_is_counted_too():
    """Fused ones are stepped always, and look at the flag on the device."""
    scaler = GradScaler("cpu", config=FP16)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    for number in (torch.inf, 1.0):
        scaler.scale(model(torch.ones(1, 2)).sum()).backward()
        model.weight.grad.fill_(number)
        scaler.step(optimizer)
        scaler.update()
    assert (scaler.statistics.steps, scaler.statistics.skipped) == (2, 1)


def test_gradients_that_are_only_looked_at_are_no_step():
    scaler = GradScaler("cpu", config=FP16)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    model.weight.grad.fill_(torch.nan)
    scaler.unscale_(optimizer)
    scaler.update()
    assert (scaler.statistics.steps, scaler.statistics.skipped) == (0, 0)


def test_it_trains_as_the_scaler_of_torch_does():
    ours = GradScaler("cpu", config=FP16)
    theirs = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_factor=4.0, backoff_factor=0.25, growth_interval=3)
    one, other = trained(ours, 6, {2}), trained(theirs, 6, {2})
    assert torch.equal(one.weight, other.weight)
    assert theirs.state_dict().items() <= ours.state_dict().items()


@pytest.mark.parametrize("config", [AMPConfig(dtype=torch.bfloat16), AMPConfig(enabled=False, dtype=torch.float16)])
def test_a_scaler_that_is_not_needed_passes_everything_through(config):
    scaler = GradScaler("cpu", config=config)
    plain = trained(torch.amp.GradScaler("cpu", enabled=False), 3)
    assert torch.equal(trained(scaler, 3).weight, plain.weight)
    assert not scaler.is_enabled()
    assert (scaler.statistics.steps, scaler.statistics.skipped, scaler.statistics.scale) == (0, 0, 1.0)


def test_arguments_of_torch_go_over_the_configuration():
    assert GradScaler("cpu", config=FP16, init_scale=8.0).get_scale() == 8.0
    assert GradScaler("cpu").get_scale() == torch.amp.GradScaler("cpu").get_scale()
    assert GradScaler("cpu", 8.0, 3.0).get_growth_factor() == 3.0


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu"), "cpu:0"])
def test_a_configuration_is_one_wherever_it_is_given(device):
    for scaler in (GradScaler(FP16), GradScaler(device, config=FP16), GradScaler(config=FP16)):
        assert scaler.get_scale() == 2.0**10
        assert scaler.get_growth_interval() == 3


def test_numbers_in_order_go_over_the_configuration_too():
    scaler = GradScaler("cpu", 8.0, 3.0, config=FP16)
    assert (scaler.get_scale(), scaler.get_growth_factor(), scaler.get_backoff_factor()) == (8.0, 3.0, 0.25)
    assert not GradScaler("cpu", 8.0, 3.0, 0.5, 7, False, config=FP16).is_enabled()


@pytest.mark.parametrize(
    ("arguments", "named", "told"),
    [
        (("cpu",), {"config": 1}, "takes an AMPConfig as config=, not 1"),
        ((FP16,), {"config": FP16}, "takes one AMPConfig"),
        (("gpu",), {}, "takes a device as 'cuda' or 'cpu', not 'gpu'"),
        ((8.0,), {}, "takes a device"),
        (("cpu", 8.0), {"config": FP16, "init_scale": 4.0}, "each of init_scale, .* once"),
        (("cpu", 8.0, 3.0, 0.5, 7, True, 1), {"config": FP16}, "each of init_scale, .* once"),
    ],
)
def test_the_scaler_says_what_it_takes(arguments, named, told):
    with pytest.raises(SettingsError, match=told):
        GradScaler(*arguments, **named)


def test_a_gpu_by_its_number_is_a_gpu(monkeypatch):
    monkeypatch.setattr("kitsune.amp.has_bf16", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for device in ("cuda", "cuda:1", torch.device("cuda", 1)):
        assert GradScaler(device, config=AMPConfig()).is_enabled()  # float16: such a GPU has no bfloat16


def test_a_new_scale_is_taken_and_is_no_step():
    scaler = GradScaler("cpu", config=FP16)
    trained(scaler, 1)
    scaler.update(16.0)
    assert (scaler.statistics.steps, scaler.statistics.scale) == (1, 16.0)


def test_a_copy_counts_on_from_where_it_was():
    scaler = GradScaler("cpu", config=FP16)
    trained(scaler, 2, {1})
    again = copy.deepcopy(scaler)
    trained(again, 1, {0})
    assert (again.statistics.skipped, scaler.statistics.skipped) == (2, 1)


def test_a_checkpoint_counts_on_from_where_it_was():
    scaler, again = GradScaler("cpu", config=FP16), GradScaler("cpu")
    trained(scaler, 8, {1})
    state = scaler.state_dict()
    assert all(type(value) in (int, float) for value in state.values())
    again.load_state_dict(state)
    assert again.statistics == scaler.statistics
    assert again.state_dict() == state
    trained(again, 2, {0})
    assert (again.statistics.steps, again.statistics.skipped) == (10, 2)


def test_checkpoints_of_torch_and_of_ours_load_into_each_other():
    ours, theirs = GradScaler("cpu", config=FP16), torch.amp.GradScaler("cpu", init_scale=4.0)
    trained(ours, 4, {1})
    trained(theirs, 4)
    state = theirs.state_dict()
    theirs.load_state_dict(ours.state_dict())
    assert theirs.state_dict().items() <= ours.state_dict().items()
    ours.load_state_dict(state)
    assert state.items() <= ours.state_dict().items()
    assert (ours.statistics.steps, ours.statistics.skipped) == (0, 0)  # of a state that has no counts


def test_a_scaler_that_is_off_has_no_state_and_loads_none():
    scaler = GradScaler("cpu", enabled=False)
    scaler.load_state_dict(GradScaler("cpu").state_dict())
    assert scaler.state_dict() == {}


def test_a_pickle_holds_counts_and_no_tensors():
    scaler = GradScaler("cpu", config=FP16)
    trained(scaler, 2, {1})
    assert not any(isinstance(value, torch.Tensor) for value in scaler.__getstate__().values())
    assert pickle.loads(pickle.dumps(scaler)).statistics == scaler.statistics


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        (None, torch.bfloat16),
        (AMPConfig(dtype=torch.float16), torch.float16),
        (AMPConfig(enabled=False), torch.float32),
    ],
)
def test_autocast_computes_in_the_dtype_of_the_configuration(config, dtype):
    layer = nn.Linear(4, 3)
    with autocast(config, device_type="cpu"):
        assert layer(torch.ones(2, 4)).dtype == dtype
    assert autocast(config, device_type="cpu")(layer.forward)(torch.ones(2, 4)).dtype == dtype


def test_a_dtype_that_is_no_half_is_refused():
    with pytest.raises(SettingsError, match=r"use torch\.float16 or torch\.bfloat16"):
        AMPConfig(dtype=torch.float32)


@pytest.mark.parametrize("wrong", ["cuda", lambda: None])
def test_autocast_says_what_it_takes(wrong):
    with pytest.raises(SettingsError, match="takes an AMPConfig"):
        autocast(wrong)
