"""The drop-in: parts of a plan."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from kitsune.amp import ScalerStatistics
from kitsune.errors import DeclinedError
from kitsune.knobs import KNOBS
from kitsune.plan import Plan
from tests.contracts.drop_in_models.cases import Hidden, Returns, fp16, loop_over
from tests.training_pairs import (
    STEPS,
    Batch,
    adamw,
    assert_same,
    assert_same_state,
    batches,
    check,
    criterion,
    fused_adamw,
    pair,
    sgd,
    simple_loop,
    train_both,
)

WARM = 4  # the first forward finds the model, three warm up


@pytest.mark.parametrize("capture", [False, True])
@pytest.mark.on_streams
def test_fp16_gradients_are_those_of_grad_scaler(device: torch.device, capture: bool) -> None:
    """The user's loss and backward are untouched; the gradients are, to the bit, unscale_'s."""
    both = pair(device, make_optimizer=sgd, enable_amp=True, amp_config=fp16(), capture_graph=capture)
    scaler = torch.amp.GradScaler(device.type, init_scale=65536.0)
    for index, (x, y) in enumerate(batches(device)):
        weight = 10.0**-index  # small gradients, which fp16 alone would lose
        both.plain_optimizer.zero_grad()
        with torch.autocast(device.type, dtype=torch.float16, cache_enabled=False):
            output = both.plain(x)
        scaler.scale(criterion(output.float(), y) * weight).backward()
        scaler.unscale_(both.plain_optimizer)

        both.optimizer.zero_grad()
        mine = both.ours(x)
        if index:
            assert mine.dtype == torch.float32
            assert_same(mine.detach(), output.float().detach())
        (criterion(mine, y) * weight).backward()
        for one, other in zip(both.ours.parameters(), both.plain.parameters(), strict=True):
            if index:  # the first forward, by which the model is found, is plain
                assert_same(one.grad, other.grad)
            else:
                one.grad = other.grad.clone()  # type: ignore[union-attr]
        scaler.step(both.plain_optimizer)
        scaler.update()
        both.optimizer.step()
        if not index:
            both.ours.load_state_dict(both.plain.state_dict())
    assert both.captured == (STEPS - WARM if capture else 0)
    assert_same_state(both)


@pytest.mark.parametrize("capture", [False, True])
@pytest.mark.parametrize("make", [adamw, fused_adamw, sgd], ids=["adamw", "fused", "sgd"])
def test_an_overflow_skips_one_step_and_halves_the_scale(device: torch.device, make: Any, capture: bool) -> None:
    config = fp16(init_scale=1024.0, growth_interval=1000)
    both = pair(device, make_optimizer=make, enable_amp=True, amp_config=config, capture_graph=capture)
    optimizer, model = both.optimizer, both.ours
    data = batches(device, 16)
    for x, y in data[:10]:
        simple_loop(model, optimizer, [(x, y)])
    assert optimizer._loop is not None
    scaler = optimizer._loop.scaler
    assert scaler is not None
    for index, (x, y) in enumerate(data[10:]):
        before = [parameter.detach().clone() for parameter in model.parameters()]
        optimizer.zero_grad()
        (criterion(model(x), y) * (float("inf") if index == 2 else 1.0)).backward()
        optimizer.step()
        moved = any(not torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
        assert moved == (index != 2)
        assert scaler.scale.item() == (512.0 if index >= 2 else 1024.0)
    assert optimizer.report.scaler == ScalerStatistics(steps=16, skipped=1, scale=512.0)
    assert bool(both.captured) == capture
    if capture and make is fused_adamw:
        assert optimizer.counts["update"] > 0


def scaled_down(device: torch.device) -> tuple[Any, ScalerStatistics]:
    """A pair that has found its scale, and what it is."""
    config = fp16(init_scale=2.0**20, growth_interval=1000)
    both = pair(device, make_optimizer=sgd, enable_amp=True, amp_config=config)
    for x, y in batches(device, 8):
        both.optimizer.zero_grad()
        (criterion(both.ours(x), y) * 64).backward()
        both.optimizer.step()
    found = both.optimizer.report.scaler
    assert found is not None and found.skipped > 0 and found.scale < 2.0**20
    return both, found


@pytest.mark.parametrize("is_late", [False, True], ids=["before it is needed", "in mid-run"])
def test_a_checkpoint_has_the_scale(device: torch.device, is_late: bool) -> None:
    first, found = scaled_down(device)
    checkpoint = first.optimizer.state_dict()
    again = pair(device, make_optimizer=sgd, enable_amp=True, amp_config=fp16())
    if is_late:
        simple_loop(again.ours, again.optimizer, batches(device, 2))
    again.optimizer.load_state_dict(checkpoint)
    assert again.optimizer.state_dict()["loss_scaling"] == checkpoint["loss_scaling"]
    simple_loop(again.ours, again.optimizer, batches(device, 2))
    assert again.optimizer.report.scaler == ScalerStatistics(found.steps + 2, found.skipped, found.scale)
    first.plain_optimizer.load_state_dict(checkpoint)  # torch's own takes what it knows


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))])
def test_a_copy_has_the_scale(device: torch.device, duplicate: Any) -> None:
    first, found = scaled_down(device)
    model, optimizer = duplicate((first.ours, first.optimizer))
    assert optimizer.state_dict()["loss_scaling"] == first.optimizer.state_dict()["loss_scaling"]
    simple_loop(model, optimizer, batches(device, 2))
    assert optimizer.report.scaler == ScalerStatistics(found.steps + 2, found.skipped, found.scale)


def test_the_scale_outlives_a_new_assembly(device: torch.device) -> None:
    """What is built anew in mid-step must still see the overflow of the micro-batches before."""
    both = pair(device, make_optimizer=sgd, enable_amp=True, amp_config=fp16(init_scale=64.0), capture_graph=False)
    data = batches(device, 4)
    simple_loop(both.ours, both.optimizer, data)
    both.optimizer.zero_grad()
    (criterion(both.ours(data[0][0]), data[0][1]) * float("inf")).backward()
    both.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1, device=device))]})
    before = [parameter.detach().clone() for parameter in both.ours.parameters()]
    both.optimizer.step()
    assert_same([parameter.detach() for parameter in both.ours.parameters()], before)


def test_one_bad_micro_batch_skips_the_accumulated_step(device: torch.device) -> None:
    both = pair(device, make_optimizer=sgd, enable_amp=True, amp_config=fp16(), capture_graph=False)
    data = batches(device, 8)
    simple_loop(both.ours, both.optimizer, data[:2])
    before = [parameter.detach().clone() for parameter in both.ours.parameters()]
    both.optimizer.zero_grad()
    for factor, (x, y) in zip((float("inf"), 1.0), data[2:4], strict=True):
        (criterion(both.ours(x), y) * factor).backward()
    both.optimizer.step()
    assert_same([parameter.detach() for parameter in both.ours.parameters()], before)


@pytest.mark.parametrize("capture", [False, True])
def test_bf16_is_autocast_of_the_forward(device: torch.device, capture: bool) -> None:
    both = pair(device, enable_amp=True, capture_graph=capture)
    simple_loop(both.ours, both.optimizer, batches(device, 1))
    simple_loop(both.plain, both.plain_optimizer, batches(device, 1))

    def loop(model: nn.Module, optimizer: Optimizer, data: list[Batch]) -> list[torch.Tensor]:
        losses = []
        for x, y in data:
            optimizer.zero_grad()
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=model is both.plain):
                output = model(x)
            loss = criterion(output.float(), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return losses

    train_both(both, loop, batches(device))
    assert both.optimizer.report.applied["precision"] == "bf16"
    assert both.captured == (STEPS - 3 if capture else 0)


def test_second_order_through_scaled_forwards_is_a_clear_error(device: torch.device) -> None:
    both = pair(device, enable_amp=True, amp_config=fp16(), capture_graph=False)
    x, y = batches(device, 1)[0]
    simple_loop(both.ours, both.optimizer, [(x, y)])
    loss = criterion(both.ours(x), y)
    with pytest.raises(Exception, match="create_graph=True"):
        torch.autograd.grad(loss, list(both.ours.parameters()), create_graph=True)


def test_scaled_forwards_keep_their_graph_when_asked(device: torch.device) -> None:
    both = pair(device, enable_amp=True, amp_config=fp16(), capture_graph=False)
    x, y = batches(device, 1)[0]
    simple_loop(both.ours, both.optimizer, [(x, y)])
    loss = criterion(both.ours(x), y)
    parameters = list(both.ours.parameters())
    once = torch.autograd.grad(loss, parameters, retain_graph=True)
    assert_same(torch.autograd.grad(loss, parameters), once)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, parameters)


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.conv(x)).mean((2, 3)))


@pytest.mark.on_streams
def test_channels_last(device: torch.device) -> None:
    plan = Plan.by_hand(layout="channels_last", capture="segments", update="fused")
    both = pair(device, Conv, exact=False, plan=plan)
    data = [
        (torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(i)).to(device), y[:4])
        for i, (_, y) in enumerate(batches(device))
    ]
    train_both(both, simple_loop, data)
    assert both.captured == STEPS - WARM
    assert both.optimizer.counts["update"] > 0
    assert both.optimizer.report.applied == {"layout": "channels_last", "update": "fused", "capture": "segments"}
    both.optimizer.close()
    assert both.ours.conv.weight.is_contiguous()


def test_a_whole_step_becomes_segments(device: torch.device) -> None:
    both = check(device, simple_loop, plan=Plan.by_hand(capture="step"))
    assert both.captured == STEPS - WARM
    assert both.optimizer.report.applied == {"capture": "segments"}
    assert any("capture=step became segments" in note for note in both.optimizer.report.notes)


def test_every_knob_is_accounted_for(device: torch.device) -> None:
    plan = Plan.by_hand(
        layout="channels_last",
        precision="tf32",
        attention="cudnn",
        accumulation=2,
        recompute="blocks",
        fusion="kitsune",
        update="fused",
        capture="step",
        streams=4,
        pool_bytes=2**30,
        prefetch=2,
    )
    both = pair(device, plan=plan)
    simple_loop(both.ours, both.optimizer, batches(device))
    report = both.optimizer.report
    assert report.applied.keys() | report.declined.keys() == set(KNOBS) - {
        "compile",
        "weights",
        "activations",
        "masks",
        "inductor",
    }
    assert not report.applied.keys() & report.declined.keys()


@pytest.mark.parametrize("capture", [False, True])
def test_a_compiler_that_fails_is_declined(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, capture: bool
) -> None:
    from torch._inductor.exc import InductorError

    def broken(*_: Any, **__: Any) -> Any:
        raise InductorError(RuntimeError("no kernel today"), None)

    monkeypatch.setattr("torch._inductor.compile", broken)
    both = check(device, simple_loop, enable_fusion=True, capture_graph=capture)
    assert "no kernel today" in both.optimizer.report.declined["compile"]
    assert both.captured == (STEPS - WARM if capture else 0)


def test_on_decline_raise_speaks_up_at_the_first_forward(device: torch.device) -> None:
    both = pair(device, plan=Plan.by_hand(layout="channels_last"), on_decline="raise")
    with pytest.raises(DeclinedError, match="no convolution"):
        both.ours(batches(device, 1)[0][0])
    assert "no convolution" in both.optimizer.report.declined["layout"]
    train_both(both, simple_loop, batches(device))


def test_on_decline_raise_speaks_up_when_capture_fails(device: torch.device) -> None:
    both = pair(device, lambda: Returns(Hidden), on_decline="raise")
    loop = loop_over(lambda out: out.logits)
    with pytest.raises(DeclinedError, match="Hidden"):
        loop(both.ours, both.optimizer, batches(device))
    loop(both.ours, both.optimizer, batches(device))
    assert both.optimizer.report.applied == {}


def test_switched_off(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KITSUNE_DISABLE", "1")
    both = check(device, simple_loop, plan=Plan.by_hand(capture="segments", update="fused"), enable_amp=True)
    assert both.captured == 0
    declined = both.optimizer.report.declined
    assert declined == dict.fromkeys(("capture", "update", "precision"), "KITSUNE_DISABLE is set")
    assert both.ours._compiled_call_impl is None


def test_errors_of_the_users_stay_theirs(device: torch.device) -> None:
    both = check(device, simple_loop)
    x, y = batches(device, 1)[0]
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        both.ours(x[:, :4])
    train_both(both, simple_loop, [(x, y)])
