"""The drop-in: losses, gradients and updates of the loop."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from kitsune.errors import CaptureError
from tests.training_pairs import (
    STEPS,
    Batch,
    Net,
    adamw,
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


@pytest.mark.parametrize("make", [adamw, fused_adamw, sgd], ids=["adamw", "fused", "sgd"])
@pytest.mark.on_streams
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


class Heads(Net):
    """It returns two outputs, neither of which is computed from the other."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = torch.relu(self.second(torch.relu(self.norm(self.first(x)))))
        return self.head(hidden), hidden * 2


def test_a_hook_on_an_output_that_the_loss_does_not_read_is_not_called(device: torch.device) -> None:
    def loop(model: nn.Module, optimizer: Optimizer, data: list[Batch]) -> list[torch.Tensor]:
        losses = []
        for x, y in data:
            optimizer.zero_grad()
            output, hidden = model(x)
            hidden.register_hook(lambda gradient: gradient.clamp(-1, 1))
            loss = criterion(output, y)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return losses

    assert check(device, loop, make_model=Heads).captured == STEPS - WARM


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
@pytest.mark.on_streams
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


@pytest.mark.on_streams
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


@pytest.mark.on_streams
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


@pytest.mark.on_streams
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


def test_a_shape_that_is_never_captured_takes_no_place_of_others(device: torch.device) -> None:
    """The first two batches have a shape of their own; the two that are frequent after them are captured both."""
    both = pair(device, make_optimizer=fused_adamw)
    data = [*batches(device, 2, size=3), *batches(device, 20), *batches(device, 20, size=5)]
    train_both(both, simple_loop, data)
    assert both.captured == 2 * (20 - 8 - 3)
    assert both.optimizer.counts["other_shape"] == 16


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
