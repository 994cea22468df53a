"""Flags of an optimizer while plans are in force: what its owner set is known, whoever comes and goes."""

import copy
import itertools
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import kitsune
from kitsune import Plan, TrainStep
from kitsune.errors import DeclinedError
from kitsune.update.optimizer_flags import Switch, given_groups
from tests.step_cases import Mlp, batches

FLAGS = ("foreach", "fused", "capturable")
PLAN = Plan.by_hand(update="fused")


def flags_of(groups):
    return [tuple(group[flag] for flag in FLAGS) for group in groups]


@pytest.mark.parametrize("closed", [*itertools.permutations(range(3))])
def test_switches_go_in_any_order(closed):
    optimizer = torch.optim.AdamW(Mlp().parameters())
    switches = [
        Switch(optimizer, {"foreach": False, "fused": True}),
        Switch(optimizer, {"capturable": True}),
        Switch(optimizer, {"foreach": True, "fused": False}),
    ]
    for number in closed:
        assert flags_of(given_groups(optimizer)) == [(None, None, False)]
        assert flags_of(optimizer.state_dict()["param_groups"]) == [(None, None, False)]
        switches[number].undo()
    assert flags_of(optimizer.param_groups) == [(None, None, False)]


def test_a_checkpoint_that_is_loaded_brings_the_flags_of_its_owner_to_all_of_them():
    model = Mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    switches = [Switch(optimizer, {"foreach": False, "fused": True}) for _ in range(2)]
    optimizer.load_state_dict(torch.optim.AdamW(model.parameters(), foreach=True).state_dict())
    assert flags_of(optimizer.param_groups) == [(False, True, False)]
    assert flags_of(given_groups(optimizer)) == [(True, None, False)]
    for switch in switches:
        switch.undo()
    assert flags_of(optimizer.param_groups) == [(True, None, False)]


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_copy_of_the_optimizer_has_no_switches(duplicate):
    optimizer = torch.optim.AdamW(Mlp().parameters())
    Switch(optimizer, {"fused": True})
    assert flags_of(given_groups(duplicate(optimizer))) == [(None, True, False)]


@pytest.mark.parametrize("is_closed", [False, True])
def test_a_step_that_is_built_again_has_the_plan_again(is_closed):
    """As where the cell of a notebook is run twice."""
    model = Mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    first = TrainStep(model, F.mse_loss, optimizer, PLAN)
    (batch,) = batches(1)
    first(*batch)
    if is_closed:
        first.close()
    second = TrainStep(model, F.mse_loss, optimizer, PLAN, on_decline="raise")
    second(*batch)
    assert second.report.applied == {"update": "fused"}
    assert flags_of(optimizer.param_groups) == [(False, True, False)]
    second.close()
    if not is_closed:
        first.close()
    assert flags_of(optimizer.param_groups) == [(None, None, False)]


@pytest.mark.parametrize("choice", ["fused", "foreach"])
def test_an_archive_made_while_a_plan_is_in_force_is_that_of_the_step_as_given(choice, tmp_path):
    model = Mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    (batch,) = batches(1)
    kitsune.export(model, F.mse_loss, optimizer, batch, tmp_path / "before.ksn")
    assert TrainStep(model, F.mse_loss, optimizer, Plan.by_hand(update=choice)).report.applied == {"update": choice}
    kitsune.export(model, F.mse_loss, optimizer, batch, tmp_path / "during.ksn")
    assert (tmp_path / "during.ksn").read_bytes() == (tmp_path / "before.ksn").read_bytes()


@pytest.mark.parametrize("steps_before", [1, 4])
@pytest.mark.parametrize("knobs", [{"update": "fused"}, {"update": "fused", "precision": "fp16"}])
@pytest.mark.parametrize("make", [torch.optim.AdamW, lambda groups: torch.optim.SGD(groups, lr=0.01, momentum=0.9)])
def test_a_group_that_is_added_in_mid_run_gets_the_flags_and_no_update_is_made_twice(make, knobs, steps_before):
    """As layers are unfrozen one after the other."""
    ends = []
    for plan in (None, Plan.by_hand(**knobs)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
        model[0].requires_grad_(False)
        optimizer = make(list(model[1].parameters()))
        step = TrainStep(model, F.mse_loss, optimizer, plan, on_decline="raise")
        many = batches(steps_before + 4)
        losses = [step(*batch) for batch in many[:steps_before]]
        model[0].requires_grad_(True)
        optimizer.add_param_group({"params": list(model[0].parameters())})
        losses += [step(*batch) for batch in many[steps_before:]]
        assert [group["fused"] for group in optimizer.param_groups] == [None if plan is None else True] * 2
        ends.append((torch.stack(losses), [int(state.get("step", 0)) for state in optimizer.state.values()]))
    (plain, plain_counts), (planned, counts) = ends
    assert counts == plain_counts
    torch.testing.assert_close(planned, plain, rtol=2e-2, atol=2e-3)


def test_an_update_that_fails_half_way_is_not_repeated():
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
    first, second = ({"params": list(layer.parameters())} for layer in model)
    optimizer = torch.optim.AdamW([first, {**second, "betas": (0.9,)}])
    step = TrainStep(model, F.mse_loss, optimizer, PLAN)
    (batch,) = batches(1)
    with pytest.raises(DeclinedError, match="some parameters were updated by then"):
        step(*batch)
    assert [int(optimizer.state[parameter]["step"]) for parameter in model[0].parameters()] == [1, 1]
    optimizer.param_groups[1]["betas"] = (0.9, 0.999)
    step(*batch)
    assert "update" in step.report.declined
    assert [int(optimizer.state[parameter]["step"]) for parameter in model.parameters()] == [2, 2, 1, 1]
