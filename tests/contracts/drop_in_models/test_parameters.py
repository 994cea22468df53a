"""The drop-in: parameters and their gradients."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from kitsune.plan import Plan
from tests.contracts.drop_in_models.cases import fp16
from tests.training_pairs import (
    STEPS,
    Batch,
    Net,
    assert_same,
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


@pytest.mark.on_streams
def test_frozen_layers(device: torch.device) -> None:
    class Frozen(Net):
        def __init__(self) -> None:
            super().__init__()
            self.second.requires_grad_(False)

    assert check(device, simple_loop, make_model=Frozen).captured == STEPS - WARM


class TwoHeads(Net):
    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = torch.relu(self.norm(self.first(x)))
        return self.head(torch.relu(self.second(hidden))), self.other(hidden)


@pytest.mark.parametrize("turns", [(1, 0), (1, 0, 1), (0, 0, 0, 0, 0, 2, 1)])
def test_heads_that_take_turns(device: torch.device, turns: tuple[int, ...]) -> None:
    """Weight decay and momentum move what has a gradient, were it of zeros; a head that is not used has none."""

    def loop(model: Any, optimizer: Optimizer, data: list[Batch]) -> list[Any]:
        found = []
        for number, (x, y) in enumerate(data):
            outputs, turn = model(x), turns[number % len(turns)]
            used = outputs if turn == 2 else outputs[turn : turn + 1]
            optimizer.zero_grad()
            sum(criterion(output, y) for output in used).backward()
            found.append([weight.grad is None for weight in model.parameters()])
            optimizer.step()
        return found

    assert check(device, loop, make_model=TwoHeads).captured == STEPS - WARM


class Fills(torch.autograd.Function):
    """A product whose backward puts the weight's gradient where it belongs by itself."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        context.save_for_backward(x)
        context.weight = weight
        return x @ weight.detach().t()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (x,) = context.saved_tensors
        own = gradient.t() @ x
        context.weight.grad = own if context.weight.grad is None else context.weight.grad + own
        return gradient @ context.weight.detach(), None


class FillsGradient(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.norm(self.first(x)))
        return self.head(torch.relu(Fills.apply(hidden, self.second.weight)))


def test_a_backward_that_fills_a_gradient_by_itself(device: torch.device) -> None:
    both = pair(device, make_model=FillsGradient)
    data = batches(device)
    before = both.ours.second.weight.detach().clone()
    simple_loop(both.ours, both.optimizer, data[:8])
    middle = both.ours.second.weight.detach().clone()
    simple_loop(both.ours, both.optimizer, data[8:])
    assert not torch.equal(before, middle)
    assert not torch.equal(middle, both.ours.second.weight)
    assert both.captured == 0
    assert "sets a parameter's gradient by itself" in both.optimizer.report.declined["capture"]


class Conditioned(Net):
    """Its loop puts a tensor of the batch's own beside it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale


@pytest.mark.parametrize("period", [1, 8])
def test_attributes_that_the_loop_sets(device: torch.device, period: int) -> None:
    def loop(model: Any, optimizer: Optimizer, data: list[Batch]) -> list[torch.Tensor]:
        losses = []
        for number, (x, y) in enumerate(data):
            if number % period == 0:
                model.scale = x[:1, :3].exp()
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return losses

    both = check(device, loop, make_model=Conditioned)
    if period == 1:
        assert both.captured == 0
        assert "the loop sets scale between steps" in both.optimizer.report.declined["capture"]
    else:
        assert both.captured > 0


class Normalizes(Net):
    """In place, as a first layer of a pipeline may; its loop looks at the batch again."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.mul_(0.5))


def test_inputs_that_the_forward_writes(device: torch.device) -> None:
    def loop(model: Any, optimizer: Optimizer, data: list[Batch]) -> list[torch.Tensor]:
        found = []
        for x, y in data:
            batch = x.clone()
            optimizer.zero_grad()
            criterion(model(batch), y).backward()
            optimizer.step()
            found.append(batch)
        return found

    both = check(device, loop, make_model=Normalizes)
    assert both.captured == 0
    assert "writes into its input" in both.optimizer.report.declined["capture"]


class Prompted(Net):
    """What it scales by is learned by an optimizer of its own, and is nobody's parameter."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.prompt[0]


@pytest.mark.parametrize("knob", ["capture", "precision"])
def test_a_gradient_of_what_is_no_parameter(device: torch.device, knob: str) -> None:
    prompts = []

    def loop(model: Any, optimizer: Optimizer, data: list[Batch]) -> list[torch.Tensor]:
        model.prompt = [torch.ones((), device=device, requires_grad=True)]
        own = torch.optim.SGD(model.prompt, lr=0.5)
        losses = []
        for batch in data:
            own.zero_grad()
            losses += simple_loop(model, optimizer, [batch])
            own.step()
        prompts.append(model.prompt[0].detach())
        return losses

    options = {"capture": {}, "precision": {"enable_amp": True, "amp_config": fp16(), "capture_graph": False}}
    both = check(device, loop, make_model=Prompted, **options[knob])
    assert both.captured == 0
    assert "the gradient of a tensor (scalar) that is no parameter" in both.optimizer.report.declined[knob]
    assert abs(float(prompts[0]) - 1) > 0.01
    assert_same(*prompts)


class Forced(Net):
    """It asks for the gradient of its own input, as a force is one of an energy."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = super().forward(x.requires_grad_())
        (force,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
        return output + force.mean()


def test_an_input_that_the_forward_has_require_a_gradient(device: torch.device) -> None:
    def loop(model: Any, optimizer: Optimizer, data: list[Batch]) -> list[torch.Tensor]:
        return simple_loop(model, optimizer, [(x.clone(), y) for x, y in data])

    both = check(device, loop, make_model=Forced)
    assert both.captured == 0
    assert "that is no parameter" in both.optimizer.report.declined["capture"]


class Sparse(Net):
    """The gradient of its table is sparse, which no layer tells."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        words = nn.functional.embedding((x * 100).long() % 20, self.table.weight, sparse=True)
        return self.head(torch.relu(self.second(words.mean(1))))


@pytest.mark.parametrize("options", [{}, {"num_streams": 2}, {"plan": Plan.by_hand(precision="bf16")}])
def test_sparse_gradients(device: torch.device, options: dict[str, Any]) -> None:
    both = pair(device, make_model=Sparse, make_optimizer=partial(torch.optim.SGD, lr=0.1), exact=False, **options)
    if "plan" in options:
        simple_loop(both.ours, both.optimizer, batches(device))
        assert both.optimizer.report.applied == {"precision": "bf16"}
    else:
        train_both(both, simple_loop, batches(device))
        assert "a gradient is sparse" in both.optimizer.report.declined["capture"]
    assert both.ours.table.weight.grad.is_sparse
    assert both.captured == 0


class Recomputed(Net):
    """Its backward computes a layer once more in place of keeping what that layer has made."""

    def __init__(self, share: float, *, reentrant: bool) -> None:
        super().__init__()
        self.layer = nn.Sequential(self.second, nn.ReLU(), nn.Dropout(share))
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.norm(self.first(x)))
        return self.head(checkpoint(self.layer, hidden, use_reentrant=self.reentrant))


@pytest.mark.parametrize("share", [0.0, 0.2])
def test_activations_that_are_computed_again(device: torch.device, share: float) -> None:
    both = check(device, simple_loop, make_model=lambda: Recomputed(share, reentrant=False))
    # On a GPU torch reads and sets the state of the generator for it, which a capture may refuse.
    assert both.captured == STEPS - WARM or (device.type == "cuda" and both.optimizer.report.declined["capture"])


@pytest.mark.parametrize("share", [0.0, 0.2])
def test_a_backward_within_the_backward_is_left_alone(device: torch.device, share: float) -> None:
    both = check(device, simple_loop, make_model=lambda: Recomputed(share, reentrant=True))
    assert both.captured == 0
    assert "use_reentrant=True" in both.optimizer.report.declined["capture"]


@pytest.mark.parametrize("capture", [False, True])
def test_a_backward_within_the_backward_is_not_scaled(device: torch.device, capture: bool) -> None:
    options = {"enable_amp": True, "amp_config": fp16(), "capture_graph": capture}
    both = check(device, simple_loop, make_model=lambda: Recomputed(0.0, reentrant=True), **options)
    assert "use_reentrant=True" in both.optimizer.report.declined["precision"]


def test_an_output_that_repeats_itself(device: torch.device) -> None:
    class Repeating(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).mean(0, keepdim=True).expand(len(x), -1)

    both = check(device, simple_loop, make_model=Repeating)
    assert both.captured == STEPS - WARM


@pytest.mark.on_streams
def test_tied_weights(device: torch.device) -> None:
    class Tied(Net):
        def __init__(self) -> None:
            super().__init__()
            self.third = nn.Linear(16, 16)
            self.third.weight = self.second.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = torch.tanh(self.second(torch.relu(self.norm(self.first(x)))))
            return self.head(torch.relu(self.third(hidden)))

    both = check(device, simple_loop, make_model=Tied, make_optimizer=fused_adamw)
    assert both.captured == STEPS - WARM
    assert both.optimizer.counts["update"] > 0


class SharesGradients(Net):
    """autograd.grad returns one tensor for both biases, and views of one tensor for both halves of a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Parameter(torch.zeros(8, 16)), nn.Parameter(torch.zeros(8, 16))
        self.upper, self.lower = nn.Parameter(torch.randn(8, 16) / 4), nn.Parameter(torch.randn(8, 16) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.norm(self.first(x))) + self.one + self.two
        return self.head(hidden @ torch.cat([self.upper, self.lower]))


@pytest.mark.parametrize("options", [{}, {"enable_amp": True}], ids=["captured", "scaled"])
@pytest.mark.on_streams
def test_gradients_that_share_memory(device: torch.device, options: dict[str, Any]) -> None:
    def loop(model: nn.Module, optimizer: Optimizer, data: list[Batch]) -> list[torch.Tensor]:
        norms = []
        for x, y in data:
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(0.5)  # twice on the same memory would be seen
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False))
            optimizer.step()
        return norms

    if not options:
        both = check(device, loop, make_model=SharesGradients, make_optimizer=fused_adamw)
        assert both.captured == STEPS - WARM
        assert both.optimizer.counts["update"] > 0
        return
    for capture in (False, True):
        both = pair(device, SharesGradients, sgd, amp_config=fp16(), capture_graph=capture, **options)
        simple_loop(both.ours, both.optimizer, batches(device))
        assert torch.equal(both.ours.one, both.ours.two)
        assert both.ours.one.abs().max() > 1e-4  # type: ignore[operator,union-attr]


def test_parameters_that_are_not_used(device: torch.device) -> None:
    class Spare(Net):
        def __init__(self) -> None:
            super().__init__()
            self.spare = nn.Linear(4, 4)

    both = check(device, simple_loop, make_model=Spare, make_optimizer=fused_adamw)
    assert both.captured == STEPS - WARM
    assert both.ours.spare.weight.grad is None
    assert both.optimizer.counts["update"] > 0


def test_optimizer_of_a_part_of_the_model(device: torch.device) -> None:
    class Parts(Net):
        def parameters(self, recurse: bool = True) -> Any:
            return super().parameters(recurse)

    def make_optimizer(parameters: Any) -> Optimizer:
        return fused_adamw(list(parameters)[-2:])

    def loop(model: nn.Module, optimizer: Optimizer, data: list[Batch]) -> list[torch.Tensor]:
        losses = []
        for x, y in data:
            model.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return losses

    both = check(device, loop, make_model=Parts, make_optimizer=make_optimizer)
    assert both.captured == STEPS - WARM
    assert both.optimizer.counts["update"] > 0
