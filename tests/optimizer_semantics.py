"""What the drop-in promises of a training loop, row by row: every test takes a device that captures."""

import copy
import io
import pickle
import threading
import types
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import OneCycleLR, StepLR
from torch.optim.optimizer import register_optimizer_step_post_hook

from kitsune.errors import CaptureError
from kitsune.optimizer import KitsuneOptimizer
from kitsune.plan import Plan
from tests.training_pairs import (
    STEPS,
    Batch,
    Net,
    Pair,
    adamw,
    assert_same,
    assert_same_state,
    batches,
    check,
    criterion,
    fused_adamw,
    pair,
    seed,
    sgd,
    simple_loop,
    train_both,
)

FUSED = Plan.by_hand(capture="segments", update="fused")
KERNEL = Plan.by_hand(capture="segments", update="kitsune")
both_updates = pytest.mark.parametrize("plan", [FUSED, KERNEL], ids=["fused", "kitsune"])
WARM = 4  # the first forward finds the model, three warm up


# Losses, gradients and updates


@pytest.mark.parametrize("make", [adamw, fused_adamw, sgd], ids=["adamw", "fused", "sgd"])
def test_criterion_outside_the_model(device: torch.device, make: Any) -> None:
    both = check(device, simple_loop, make_optimizer=make)
    assert both.captured == STEPS - WARM
    assert both.optimizer.report.applied == {"capture": "segments"}
    assert both.optimizer.report.declined == {}


def test_the_update_is_captured_too(device: torch.device) -> None:
    both = check(device, simple_loop, make_optimizer=fused_adamw)
    assert both.optimizer.counts["update"] >= STEPS - WARM - 3


def test_outputs_may_be_kept_and_changed(device: torch.device) -> None:
    def loop(model: nn.Module, optimizer: Optimizer, data: list[Batch]) -> list[torch.Tensor]:
        kept = []
        for x, y in data:
            optimizer.zero_grad()
            output = model(x)
            kept.append(output)
            criterion(output.mul(2.0).add_(1.0), y).backward()
            output.detach().mul_(3.0)
            optimizer.step()
        return [output.detach() for output in kept]

    assert check(device, loop).captured == STEPS - WARM


class Both(Net):
    """It returns what it has computed its output from, too."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = torch.relu(self.second(torch.relu(self.norm(self.first(x)))))
        return self.head(hidden), hidden


def loop_of_both(how: str, first: int, errors: list[str]) -> Any:
    """From its `first` step on it asks for the gradient of what comes before the output."""

    def loop(model: nn.Module, optimizer: Optimizer, data: list[Batch]) -> list[torch.Tensor]:
        losses = []
        for index, (x, y) in enumerate(data):
            optimizer.zero_grad()
            output, hidden = model(x)
            hook = None
            if index >= first and how in ("hook", "passing"):
                hook = hidden.register_hook(lambda gradient: gradient * 0.5)
            elif index >= first and how == "kept":
                hidden.retain_grad()
            loss = criterion(output, y) + 0.1 * hidden.square().mean()
            try:
                loss.backward()
            except CaptureError as error:
                errors.append(str(error))
                continue
            if hook is not None and how == "passing":
                hook.remove()
            losses += [hidden.grad] if how == "kept" and index >= first else []
            optimizer.step()
            losses.append(loss.detach())
        return losses

    return loop


@pytest.mark.parametrize("how", ["hook", "passing", "kept"])
def test_gradients_of_outputs_that_others_are_computed_from(device: torch.device, how: str) -> None:
    """Inside a captured forward they flow past what the loop sees of them."""
    errors: list[str] = []
    both = check(device, loop_of_both(how, 0, errors), make_model=Both)
    assert both.captured == 0
    assert not errors
    assert "from which another one is computed" in both.optimizer.report.declined["capture"]


def test_nobody_need_ask_for_them(device: torch.device) -> None:
    errors: list[str] = []
    assert check(device, loop_of_both("never", 0, errors), make_model=Both).captured == STEPS - WARM
    assert not errors


@pytest.mark.parametrize("how", ["hook", "kept"])
def test_who_asks_for_them_later_is_told(device: torch.device, how: str) -> None:
    both, errors = pair(device, make_model=Both), []
    data = batches(device, STEPS, 8)
    loop_of_both(how, 8, errors)(both.ours, both.optimizer, data)
    assert len(errors) == 1
    assert "capture_graph=False" in errors[0]
    assert both.captured == 9 - WARM
    assert "from which another one is computed" in both.optimizer.report.declined["capture"]


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradient_accumulation(device: torch.device, set_to_none: bool) -> None:
    def loop(model: nn.Module, optimizer: Optimizer, data: list[Batch]) -> list[torch.Tensor]:
        losses = []
        for index, (x, y) in enumerate(data):
            loss = criterion(model(x), y) / 3
            loss.backward()
            losses.append(loss.detach())
            if index % 3 == 2:
                optimizer.step()
                optimizer.zero_grad(set_to_none=set_to_none)
        return losses

    both = check(device, loop, steps=60)
    assert both.captured == 60 - WARM
    assert both.optimizer._loop is not None
    assert both.optimizer._loop.is_settled
    told = "the update is not captured: its gradients are not those of one captured backward, as where several are"
    assert any(note.startswith(told) for note in both.optimizer.report.notes)


@pytest.mark.parametrize("foreach", [True, False])
def test_clipping_between_backward_and_step(device: torch.device, foreach: bool) -> None:
    def loop(model: nn.Module, optimizer: Optimizer, data: list[Batch]) -> list[torch.Tensor]:
        norms = []
        for x, y in data:
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=foreach))
            optimizer.step()
        return norms

    both = check(device, loop, make_optimizer=fused_adamw)
    assert both.captured == STEPS - WARM
    assert both.optimizer.counts["update"] > 0


def test_gradients_exchanged_by_the_loop(device: torch.device) -> None:
    def loop(model: nn.Module, optimizer: Optimizer, data: list[Batch]) -> list[torch.Tensor]:
        for x, y in data:
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad = parameter.grad.sign() * 0.01
            optimizer.step()
        return [parameter.detach() for parameter in model.parameters()]

    both = check(device, loop, make_optimizer=fused_adamw)
    assert both.captured == STEPS - WARM
    assert both.optimizer.counts["update"] == 0


def test_gradients_kept_by_the_loop(device: torch.device) -> None:
    """Nothing that is handed out changes afterwards, so such forwards are not replayed."""

    def loop(model: nn.Module, optimizer: Optimizer, data: list[Batch]) -> list[torch.Tensor]:
        kept: list[torch.Tensor] = []
        for index, (x, y) in enumerate(data):
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
            if index in (5, 6):
                kept += [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
            if index == 9:
                kept = [gradient.clone() for gradient in kept]
        return kept

    both = check(device, loop)
    assert both.optimizer.counts["kept"] > 0
    assert both.captured > 3


def test_two_forwards_a_step(device: torch.device) -> None:
    def loop(model: nn.Module, optimizer: Optimizer, data: list[Batch]) -> list[torch.Tensor]:
        losses = []
        for x, y in data:
            optimizer.zero_grad()
            loss = criterion(model(x), y) + criterion(model(x * 0.5), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return losses

    both = check(device, loop)
    assert both.captured > 0
    assert both.optimizer.counts["in_flight"] == both.captured
    assert any("before the backward of the last one" in note for note in both.optimizer.report.notes)


def test_a_forward_whose_result_is_dropped(device: torch.device) -> None:
    def loop(model: nn.Module, optimizer: Optimizer, data: list[Batch]) -> list[torch.Tensor]:
        for x, _ in data:
            model(x)
        return simple_loop(model, optimizer, data)

    both = check(device, loop)
    assert both.captured == 2 * STEPS - WARM
    assert "in_flight" not in both.optimizer.counts


def test_evaluation_in_between(device: torch.device) -> None:
    def loop(model: nn.Module, optimizer: Optimizer, data: list[Batch]) -> list[torch.Tensor]:
        results = []
        for x, y in data:
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            with torch.no_grad():
                results.append(model(x))
            loss.backward()
            model.eval()
            results.append(model(x).detach())
            with torch.inference_mode():
                results.append(model(x).clone())
            model.train()
            optimizer.step()
            results.append(loss.detach())
        return results

    assert check(device, loop).captured == STEPS - WARM


def test_last_odd_batch(device: torch.device) -> None:
    both = pair(device)
    data = batches(device, 9)
    data = [*data, (data[0][0][:5], data[0][1][:5])] * 2
    train_both(both, simple_loop, data)
    assert both.captured == 18 - WARM
    assert both.optimizer.counts["other_shape"] == 2


def test_second_frequent_shape(device: torch.device) -> None:
    both = pair(device, make_optimizer=fused_adamw)
    data = [batch for pairs in zip(batches(device, 24), batches(device, 24, size=5), strict=True) for batch in pairs]
    train_both(both, simple_loop, data)
    assert both.optimizer.counts["other_shape"] == 8
    assert both.captured > 24
    assert both.optimizer.counts["update"] > 20


def test_plain_arguments_that_change(device: torch.device) -> None:
    class Scaled(Net):
        def forward(self, x: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
            return super().forward(x * factor)

    def loop(model: nn.Module, optimizer: Optimizer, data: list[Batch]) -> list[torch.Tensor]:
        losses = []
        for index, (x, y) in enumerate(data):
            optimizer.zero_grad()
            loss = criterion(model(x, factor=1 + index / 10), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return losses

    assert check(device, loop, make_model=Scaled).captured == 0


def test_retain_graph(device: torch.device) -> None:
    def loop(model: nn.Module, optimizer: Optimizer, data: list[Batch]) -> list[torch.Tensor]:
        losses = []
        for x, y in data:
            optimizer.zero_grad()
            output = model(x)
            loss = criterion(output, y)
            loss.backward(retain_graph=True)
            (output.square().mean()).backward()
            optimizer.step()
            losses.append(loss.detach())
        return losses

    assert check(device, loop).captured == STEPS - WARM


def test_autograd_grad_gives_tensors_of_their_own(device: torch.device) -> None:
    """As gradient surgery does: one gradient a task, combined by hand."""

    def loop(model: nn.Module, optimizer: Optimizer, data: list[Batch]) -> list[torch.Tensor]:
        parameters, losses = list(model.parameters()), []
        for x, y in data:
            output = model(x)
            loss = criterion(output, y)
            one = torch.autograd.grad(loss, parameters, retain_graph=True)
            two = torch.autograd.grad(output.square().mean(), parameters)
            for parameter, first, second in zip(parameters, one, two, strict=True):
                parameter.grad = first - 0.1 * second
            optimizer.step()
            losses.append(loss.detach())
        return losses

    assert check(device, loop).captured == STEPS - WARM


def test_create_graph_is_a_clear_error(device: torch.device) -> None:
    both = check(device, simple_loop)
    x, y = batches(device, 1)[0]
    loss = criterion(both.ours(x), y)
    with pytest.raises(CaptureError, match=r"create_graph=True.*close\(\)"):
        torch.autograd.grad(loss, list(both.ours.parameters()), create_graph=True)
    both.optimizer.close()
    gradients = torch.autograd.grad(criterion(both.ours(x), y), list(both.ours.parameters()), create_graph=True)
    assert all(gradient.requires_grad for gradient in gradients)


def test_stale_backward_is_a_clear_error(device: torch.device) -> None:
    both = check(device, simple_loop)
    x, y = batches(device, 1)[0]
    loss = criterion(both.ours(x), y)
    loss.backward(retain_graph=True)
    criterion(both.ours(x), y).backward()
    with pytest.raises(CaptureError, match="overwritten by a later one"):
        loss.backward()


def test_a_second_backward_after_a_forward_of_another_shape(device: torch.device) -> None:
    both = pair(device)
    data = [
        batch
        for both_sizes in zip(batches(device, 14), batches(device, 14, size=5), strict=True)
        for batch in both_sizes
    ]
    train_both(both, simple_loop, data)

    def twice(model: nn.Module, optimizer: Optimizer, data: list[Batch]) -> list[torch.Tensor]:
        (x, y), (small, labels) = data[:2]
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward(retain_graph=True)
        criterion(model(small), labels).backward()
        loss.backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    before = both.captured
    train_both(both, twice, data)
    assert both.captured == before + 2


def test_zero_grad_by_the_model(device: torch.device) -> None:
    def loop(model: nn.Module, optimizer: Optimizer, data: list[Batch]) -> list[torch.Tensor]:
        losses = []
        for x, y in data:
            model.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return losses

    assert check(device, loop).captured == STEPS - WARM


def test_zero_grad_between_forward_and_backward(device: torch.device) -> None:
    def loop(model: nn.Module, optimizer: Optimizer, data: list[Batch]) -> list[torch.Tensor]:
        losses = []
        for x, y in data:
            loss = criterion(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return losses

    assert check(device, loop).captured == STEPS - WARM


# Learning rates and hyperparameters


def schedule(name: str, optimizer: Optimizer) -> Any:
    if name == "step":
        return StepLR(optimizer, step_size=2, gamma=0.5)
    return OneCycleLR(optimizer, max_lr=0.02, total_steps=STEPS, cycle_momentum=name == "cycle with momentum")


@pytest.mark.parametrize("name", ["step", "cycle", "cycle with momentum"])
@pytest.mark.parametrize("built", ["before", "after"])
def test_schedulers(device: torch.device, name: str, built: str) -> None:
    def loop(model: nn.Module, optimizer: Optimizer, data: list[Batch]) -> list[torch.Tensor]:
        inner = getattr(optimizer, "base_optimizer", optimizer)
        scheduler = schedule(name, inner if built == "before" else optimizer)
        if built == "before" and isinstance(optimizer, KitsuneOptimizer):
            optimizer = KitsuneOptimizer(inner)
            wrappers.append(optimizer)
        losses = []
        for batch in data:
            losses += simple_loop(model, optimizer, [batch])
            scheduler.step()
            losses.append(torch.tensor(scheduler.get_last_lr()))
        return losses

    wrappers: list[KitsuneOptimizer] = []
    both = check(device, loop, make_optimizer=fused_adamw)
    optimizer = wrappers[0] if wrappers else both.optimizer
    assert optimizer.counts["captured"] == STEPS - WARM
    if name == "cycle with momentum":
        assert any("hyperparameter other than the learning rate" in note for note in optimizer.report.notes)
    else:
        assert optimizer.counts["update"] > 0


def test_hyperparameters_changed_by_hand(device: torch.device) -> None:
    def loop(model: nn.Module, optimizer: Optimizer, data: list[Batch]) -> list[torch.Tensor]:
        losses = []
        for index, batch in enumerate(data):
            optimizer.param_groups[0]["lr"] = 0.01 / (1 + index)
            if index == 10:
                optimizer.param_groups[0]["weight_decay"] = 0.3
            losses += simple_loop(model, optimizer, [batch])
        return losses

    both = check(device, loop, make_optimizer=fused_adamw)
    assert both.captured == STEPS - WARM
    assert both.optimizer.counts["update"] > 0


def test_param_group_added_in_mid_run(device: torch.device) -> None:
    def loop(model: nn.Module, optimizer: Optimizer, data: list[Batch]) -> list[torch.Tensor]:
        losses = simple_loop(model, optimizer, data)
        optimizer.add_param_group({"params": list(model.head.parameters()), "lr": 0.5})
        return losses + simple_loop(model, optimizer, data)

    def make_optimizer(parameters: Any) -> Optimizer:
        return fused_adamw(list(parameters)[:5])

    both = check(device, loop, make_optimizer=make_optimizer)
    assert both.captured > 0
    assert both.optimizer.counts["update"] > 0


@both_updates
def test_a_param_group_that_is_added_is_the_plans_too(device: torch.device, plan: Plan) -> None:
    both = pair(device, make_optimizer=lambda parameters: adamw(list(parameters)[:5]), plan=plan, exact=False)
    train_both(both, simple_loop, batches(device))
    assert both.optimizer._loop is not None
    for model, optimizer in ((both.plain, both.plain_optimizer), (both.ours, both.optimizer)):
        optimizer.add_param_group({"params": list(model.head.parameters())})
    assert [group["fused"] for group in both.optimizer.param_groups] == [True, True]
    train_both(both, simple_loop, batches(device))
    assert both.optimizer.report.applied == plan.knobs
    both.optimizer.close()
    assert [group["fused"] for group in both.optimizer.param_groups] == [None, None]


# The user's own mixed precision


def scaler_loop(*, clip: bool, autocast: bool) -> Any:
    def loop(model: nn.Module, optimizer: Optimizer, data: list[Batch]) -> list[torch.Tensor]:
        kind = data[0][0].device.type
        scaler = torch.amp.GradScaler(kind, init_scale=2.0**15, growth_interval=4)
        losses = []
        for index, (x, y) in enumerate(data):
            optimizer.zero_grad()
            with torch.autocast(kind, dtype=torch.bfloat16, enabled=autocast):
                loss = criterion(model(x), y)
            scale = float("inf") if index == 8 else 1.0
            scaler.scale(loss * scale).backward()
            if clip:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            losses += [loss.detach(), torch.tensor(scaler.get_scale())]
        return losses

    return loop


@pytest.mark.parametrize("make", [adamw, fused_adamw, sgd], ids=["adamw", "fused", "sgd"])
@pytest.mark.parametrize("clip", [False, True])
def test_grad_scaler(device: torch.device, make: Any, clip: bool) -> None:
    both = check(device, scaler_loop(clip=clip, autocast=False), make_optimizer=make)
    assert both.captured == STEPS - WARM


@pytest.mark.parametrize("clip", [False, True])
def test_grad_scaler_beside_the_kernel(device: torch.device, clip: bool) -> None:
    """It divides the gradients by the scale where the loop has not, and leaves them so."""
    gradients: list[list[torch.Tensor]] = []

    def loop(model: nn.Module, optimizer: Optimizer, data: list[Batch]) -> list[torch.Tensor]:
        results = scaler_loop(clip=clip, autocast=False)(model, optimizer, data)
        gradients.append([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
        return results

    both = check(device, loop, plan=KERNEL, exact=False)
    assert both.captured == STEPS - WARM
    assert both.optimizer.report.applied == KERNEL.knobs
    assert_same(gradients[1], gradients[0], exact=False)


@pytest.mark.parametrize("make", [adamw, fused_adamw, sgd], ids=["adamw", "fused", "sgd"])
def test_autocast_of_the_loop_is_captured(device: torch.device, make: Any) -> None:
    both = check(device, scaler_loop(clip=True, autocast=True), make_optimizer=make)
    assert both.captured == STEPS - WARM


def test_autocast_that_comes_and_goes(device: torch.device) -> None:
    """What was captured with one precision is not replayed with another."""

    def loop(model: nn.Module, optimizer: Optimizer, data: list[Batch]) -> list[torch.Tensor]:
        losses = []
        for index, (x, y) in enumerate(data):
            optimizer.zero_grad()
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=index % 3 != 2):
                output = model(x)
            assert output.dtype == (torch.float32 if index % 3 == 2 else torch.bfloat16)
            loss = criterion(output.float(), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return losses

    both = check(device, loop, steps=24)
    assert both.captured == 16 - WARM
    assert both.optimizer.counts["other_shape"] == 8


def test_two_shapes_in_flight(device: torch.device) -> None:
    """Graphs of two shapes share no memory: what one throws away may not be where another keeps its gradients."""

    def loop(model: nn.Module, optimizer: Optimizer, data: list[Batch]) -> list[torch.Tensor]:
        losses = []
        for index, (x, y) in enumerate(data):
            small = x[:5], y[:5]
            optimizer.zero_grad()
            if index < 16:  # one after the other, until both are captured
                for batch in ((x, y), small):
                    criterion(model(batch[0]), batch[1]).backward()
            else:
                big, little = model(x), model(small[0])
                (criterion(big, y) + criterion(little, small[1])).backward()
            optimizer.step()
            losses.append(criterion(model(x), y).detach())
        return losses

    both = check(device, loop, steps=20, make_optimizer=sgd)
    assert both.optimizer.counts.get("in_flight", 0) == 0
    assert both.captured > 2 * 4


def test_autocast_of_the_loop_stands(device: torch.device) -> None:
    both = check(device, scaler_loop(clip=True, autocast=True), enable_amp=True)
    assert both.captured == 0
    assert any("the loop's own autocast" in note for note in both.optimizer.report.notes)


# Closures


@pytest.mark.parametrize("by_keyword", [False, True])
@pytest.mark.parametrize("plan", [None, KERNEL], ids=["given", "kitsune"])
def test_closure_that_holds_the_whole_step(device: torch.device, by_keyword: bool, plan: Plan | None) -> None:
    def loop(model: nn.Module, optimizer: Optimizer, data: list[Batch]) -> list[torch.Tensor]:
        losses = []
        for x, y in data:

            def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
                optimizer.zero_grad()
                loss = criterion(model(x), y)
                loss.backward()
                return loss

            loss = optimizer.step(closure=closure) if by_keyword else optimizer.step(closure)
            losses.append(loss.detach())  # type: ignore[union-attr]
        return losses

    both = check(device, loop, make_optimizer=adamw if plan else fused_adamw, plan=plan, exact=plan is None)
    assert both.captured == STEPS - WARM
    assert both.optimizer.counts["update"] > 0


def test_lbfgs_stays_plain(device: torch.device) -> None:
    def loop(model: nn.Module, optimizer: Optimizer, data: list[Batch]) -> list[torch.Tensor]:
        losses = []
        for x, y in data[:4]:

            def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
                optimizer.zero_grad()
                loss = criterion(model(x), y)
                loss.backward()
                return loss

            losses.append(optimizer.step(closure).detach())  # type: ignore[union-attr,call-overload]
        return losses

    both = check(device, loop, make_optimizer=lambda parameters: torch.optim.LBFGS(parameters, max_iter=3))
    assert both.captured == 0
    assert "LBFGS" in both.optimizer.report.declined["capture"]


# Checkpoints and copies


@pytest.mark.parametrize("make", [adamw, fused_adamw, sgd], ids=["adamw", "fused", "sgd"])
def test_checkpoints_load_with_and_without_kitsune(device: torch.device, make: Any) -> None:
    both = check(device, simple_loop, make_optimizer=make)
    files = [io.BytesIO(), io.BytesIO()]
    torch.save((both.plain.state_dict(), both.plain_optimizer.state_dict()), files[0])
    torch.save((both.ours.state_dict(), both.optimizer.state_dict()), files[1])
    seed(5)
    crossed = Pair(Net().to(device), None, Net().to(device), None)  # type: ignore[arg-type]
    crossed.plain_optimizer = make(crossed.plain.parameters())
    crossed.optimizer = KitsuneOptimizer(make(crossed.ours.parameters()))
    for model, optimizer, file in (
        (crossed.ours, crossed.optimizer, files[0]),
        (crossed.plain, crossed.plain_optimizer, files[1]),
    ):
        file.seek(0)
        model_state, optimizer_state = torch.load(file, weights_only=True)
        model.load_state_dict(model_state)
        optimizer.load_state_dict(optimizer_state)
    train_both(crossed, simple_loop, batches(device))
    assert crossed.captured == STEPS - WARM


def test_checkpoint_loaded_in_mid_run(device: torch.device) -> None:
    def loop(model: nn.Module, optimizer: Optimizer, data: list[Batch]) -> list[torch.Tensor]:
        losses = simple_loop(model, optimizer, data[:9])
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        losses += simple_loop(model, optimizer, data)
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        return losses + simple_loop(model, optimizer, data)

    both = check(device, loop, make_optimizer=fused_adamw)
    assert both.captured == 9 + 2 * STEPS - WARM
    assert both.optimizer.counts["update"] > STEPS + 5


def test_empty_checkpoint_loaded_in_mid_run(device: torch.device) -> None:
    """State that is made anew must not be made under capture, where each replay would make it again."""

    def loop(model: nn.Module, optimizer: Optimizer, data: list[Batch]) -> list[torch.Tensor]:
        fresh = copy.deepcopy(optimizer.state_dict())
        losses = simple_loop(model, optimizer, data)
        optimizer.load_state_dict(fresh)
        return losses + simple_loop(model, optimizer, data)

    both = check(device, loop, make_optimizer=fused_adamw)
    assert both.optimizer.counts["update"] > STEPS


def test_state_cleared_in_mid_run(device: torch.device) -> None:
    def loop(model: nn.Module, optimizer: Optimizer, data: list[Batch]) -> list[torch.Tensor]:
        losses = simple_loop(model, optimizer, data)
        optimizer.state.clear()
        return losses + simple_loop(model, optimizer, data)

    assert check(device, loop, make_optimizer=fused_adamw).optimizer.counts["update"] > STEPS


@both_updates
def test_checkpoint_keys_are_plain_at_all_times(device: torch.device, plan: Plan) -> None:
    both = pair(device, plan=plan, exact=False)
    for batch in batches(device):
        train_both(both, simple_loop, [batch])  # compares the checkpoints, keys and flags included
        assert_same(both.optimizer.state_dict()["param_groups"], both.plain_optimizer.state_dict()["param_groups"])
    assert both.captured > 0
    assert both.optimizer.report.applied == plan.knobs


def test_copies_of_the_model_are_plain(device: torch.device) -> None:
    both = check(device, simple_loop)
    average = copy.deepcopy(both.ours)
    thawed = pickle.loads(pickle.dumps(both.ours))
    x, _ = batches(device, 1)[0]
    for model in (average, thawed):
        assert model._compiled_call_impl is None
        assert type(model) is Net
        before = both.captured
        assert torch.isfinite(model(x)).all()
        assert both.captured == before
    averaged = torch.optim.swa_utils.AveragedModel(both.ours)
    averaged.update_parameters(both.ours)
    assert_same(dict(averaged.module.state_dict()), dict(both.ours.state_dict()))


def test_model_keeps_its_looks(device: torch.device) -> None:
    both = check(device, simple_loop)
    assert type(both.ours) is Net
    assert repr(both.ours) == repr(both.plain)
    assert [name for name, _ in both.ours.named_modules()] == [name for name, _ in both.plain.named_modules()]
    assert list(both.ours.state_dict()) == list(both.plain.state_dict())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in both.ours.modules())


@both_updates
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))])
def test_copies_of_model_and_optimizer_train_on(device: torch.device, duplicate: Any, plan: Plan) -> None:
    both = check(device, simple_loop, plan=plan, exact=False)
    model, optimizer = duplicate((both.ours, both.optimizer))
    assert optimizer.param_groups[0]["params"][0] is next(model.parameters())
    assert optimizer.param_groups[0]["fused"] is None
    copied = Pair(both.plain, both.plain_optimizer, model, optimizer, exact=False)
    train_both(copied, simple_loop, batches(device))
    assert copied.captured == STEPS - WARM


def test_prepared_as_accelerate_does(device: torch.device) -> None:
    """State loaded from itself, and `step` swapped on the instance."""
    both = pair(device)
    both.optimizer.load_state_dict(both.optimizer.state_dict())
    given, called = both.optimizer.step, []

    def patched(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        called.append(True)
        return given(*args, **kwargs)

    both.optimizer.step = types.MethodType(patched, both.optimizer)  # type: ignore[method-assign]
    train_both(both, simple_loop, batches(device))
    assert len(called) == STEPS
    assert both.captured == STEPS - WARM


# The optimizer's own hooks


@pytest.mark.parametrize("plan", [None, KERNEL], ids=["given", "kitsune"])
def test_step_hooks_run_exactly_once(device: torch.device, plan: Plan | None) -> None:
    both = pair(device, make_optimizer=adamw if plan else fused_adamw, plan=plan, exact=plan is None)
    seen: list[str] = []
    inner = both.optimizer.base_optimizer
    inner.register_step_pre_hook(lambda *_: seen.append("inner before"))
    inner.register_step_post_hook(lambda *_: seen.append("inner after"))
    both.optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    both.optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    train_both(both, simple_loop, batches(device))
    assert seen == ["before", "inner before", "inner after", "after"] * STEPS


def test_own_step_hooks_do_not_hinder_the_captured_update(device: torch.device) -> None:
    both = pair(device, make_optimizer=fused_adamw)
    seen: list[Any] = []
    both.optimizer.register_step_pre_hook(lambda optimizer, args, kwargs: seen.append(args))
    both.optimizer.register_step_post_hook(lambda optimizer, *_: seen.append(optimizer))
    train_both(both, simple_loop, batches(device))
    assert seen == [(both.optimizer,), both.optimizer] * STEPS
    assert both.optimizer.counts["update"] > 0


@pytest.mark.parametrize("plan", [None, KERNEL], ids=["given", "kitsune"])
def test_step_hooks_of_all_optimizers_run_exactly_once(device: torch.device, plan: Plan | None) -> None:
    make = adamw if plan else fused_adamw
    both = check(device, simple_loop, make_optimizer=make, plan=plan, exact=plan is None)
    seen: list[Any] = []
    handle = register_optimizer_step_post_hook(lambda optimizer, *_: seen.append(optimizer))
    try:
        simple_loop(both.ours, both.optimizer, batches(device))
    finally:
        handle.remove()
    assert seen == [both.optimizer.base_optimizer] * STEPS


def test_state_hooks_are_shared(device: torch.device) -> None:
    both = pair(device)
    seen: list[str] = []
    both.optimizer.register_state_dict_post_hook(lambda *_: seen.append("saved"))
    both.optimizer.register_load_state_dict_post_hook(lambda *_: seen.append("loaded"))
    both.optimizer.load_state_dict(both.optimizer.state_dict())
    assert seen == ["saved", "loaded"]


def test_wrapping_warns_of_nothing(device: torch.device) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        both = pair(device)
        scheduler = StepLR(both.optimizer, 3)
        for batch in batches(device):
            simple_loop(both.ours, both.optimizer, [batch])
            scheduler.step()
    assert both.captured == STEPS - WARM


@pytest.mark.parametrize("has_threads", [True, False])
def test_a_captured_backward_runs_on_the_thread_that_calls_it(device: torch.device, has_threads: bool) -> None:
    """And what the user has set for other backwards is there again after the step."""
    threads: list[int] = []
    settings: list[bool] = []

    def loop(model: nn.Module, optimizer: Optimizer, data: list[Batch]) -> list[torch.Tensor]:
        losses: list[torch.Tensor] = []
        with torch.autograd.set_multithreading_enabled(has_threads):
            for x, y in data:
                optimizer.zero_grad()
                output = model(x)
                output.register_hook(lambda _: threads.append(threading.get_ident()))
                losses.append(criterion(output, y))
                losses[-1].backward()
                optimizer.step()
                settings.append(torch._C._is_multithreading_enabled())
        return losses

    both = check(device, loop)
    assert set(settings) == {has_threads}
    assert threads[-both.captured :] == [threading.get_ident()] * both.captured


@both_updates
def test_close_gives_everything_back(device: torch.device, plan: Plan) -> None:
    both = check(device, simple_loop, plan=plan, exact=False)
    applied = dict(both.optimizer.report.applied)
    both.optimizer.close()
    assert both.ours._compiled_call_impl is None
    assert both.ours.__dict__.keys() == both.plain.__dict__.keys()
    inner = both.optimizer.base_optimizer
    for mine, theirs in zip(inner.param_groups, both.plain_optimizer.param_groups, strict=True):
        assert {**mine, "params": None} == {**theirs, "params": None}
    assert not inner._optimizer_state_dict_post_hooks
    assert "_init_group" not in inner.__dict__
    assert both.optimizer.report.applied == applied == plan.knobs
    train_both(both, simple_loop, batches(device))
    both.optimizer.close()
    assert_same_state(both)


def test_a_forward_that_fails_once_is_looked_at_again(device: torch.device) -> None:
    """What the last warming forward finds out is not lost with it."""

    class Counting(Net):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.training:
                self.calls += 1
                if self.calls == WARM:
                    raise ConnectionError("the user's own")
            return super().forward(x) * (1 + 0.1 * self.calls)

    def loop(model: nn.Module, optimizer: Optimizer, data: list[Batch]) -> list[torch.Tensor]:
        losses = []
        for x, y in data:
            optimizer.zero_grad()
            try:
                loss = criterion(model(x), y)
            except ConnectionError:
                continue
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return losses

    both = check(device, loop, make_model=Counting)
    assert both.captured == 0
    assert both.optimizer.report.declined["capture"].startswith("the step sets calls")
