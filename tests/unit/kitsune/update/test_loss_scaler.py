"""The loss scaler follows torch.amp.GradScaler's rule."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kitsune.update.loss_scaler import LossScaler

CPU = torch.device("cpu")


@settings(max_examples=50)
@given(
    overflows=st.lists(st.booleans(), max_size=30),
    init=st.sampled_from([1.0, 1024.0, 65536.0]),
    interval=st.integers(1, 5),
)
def test_it_goes_as_torchs_own(overflows, init, interval):
    ours = LossScaler(CPU, init_scale=init, growth_interval=interval)
    theirs = torch.amp.GradScaler("cpu", init_scale=init, growth_interval=interval)
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    for overflow in overflows:
        number = float("inf") if overflow else 2.0
        parameter.grad = torch.full((3,), number)
        theirs.scale(torch.ones(()))
        theirs.unscale_(optimizer)
        mine = torch.full((3,), number)
        ours.unscale([mine])
        assert torch.equal(mine, parameter.grad)
        assert bool(ours.found_inf) == overflow
        theirs.update()
        ours.update()
        assert ours.scale.item() == theirs.get_scale()
        assert ours.found_inf.item() == 0.0
    assert ours.skipped.item() == sum(overflows)


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_one_bad_number_in_any_gradient_is_an_overflow(bad):
    scaler = LossScaler(CPU)
    gradients = [torch.ones(4), torch.ones(4, dtype=torch.float64), torch.ones(4)]
    gradients[1][2] = bad
    scaler.unscale(gradients)
    assert scaler.found_inf.item() == 1.0


def test_an_overflow_stays_until_the_update():
    scaler = LossScaler(CPU, init_scale=8.0)
    scaler.unscale([torch.tensor([float("inf")])])
    scaler.unscale([torch.ones(1)])
    assert scaler.found_inf.item() == 1.0
    scaler.update()
    assert (scaler.scale.item(), scaler.skipped.item()) == (4.0, 1)


def test_no_gradients_are_no_overflow():
    scaler = LossScaler(CPU)
    scaler.unscale([])
    scaler.update()
    assert (scaler.scale.item(), scaler.skipped.item()) == (65536.0, 0)
