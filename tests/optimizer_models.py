"""What the drop-in does with models of every kind, and with those that change: every test's device captures."""

import copy
import pickle
import random
from collections import OrderedDict
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from kitsune.amp import ScalerStatistics
from kitsune.errors import DeclinedError
from kitsune.knobs import KNOBS
from kitsune.optimizer import PATIENCE_STEPS, KitsuneOptimizer
from kitsune.plan import Plan
from tests.training_pairs import (
    STEPS,
    Batch,
    Net,
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

WARM = 4  # the first forward finds the model, three warm up


class Output(OrderedDict[str, Any]):
    """An output with attributes, as Hugging Face's models return it."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


pytree.register_pytree_node(
    Output,
    lambda output: (list(output.values()), list(output)),
    lambda values, keys: Output(zip(keys, values, strict=True)),
)


@dataclass
class Hidden:
    """An output that no pytree looks into."""

    logits: torch.Tensor


class Returns(Net):
    """A model that returns its logits in some wrapping."""

    def __init__(self, wrap: Any) -> None:
        super().__init__()
        self.wrap = wrap

    def forward(self, x: torch.Tensor) -> Any:
        return self.wrap(super().forward(x))


def loop_over(unwrap: Any) -> Any:
    def loop(model: nn.Module, optimizer: Optimizer, data: list[Batch]) -> list[torch.Tensor]:
        losses = []
        for x, y in data:
            optimizer.zero_grad()
            loss = criterion(unwrap(model(x)), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return losses

    return loop


# Outputs and inputs


@pytest.mark.parametrize(
    ("wrap", "unwrap"),
    [
        (lambda out: (out, None, 3), lambda out: out[0]),
        (lambda out: {"logits": out, "detached": out.detach()}, lambda out: out["logits"]),
        (lambda out: Output(loss=out.mean(), logits=out), lambda out: out.logits),
        (lambda out: [out, (out * 2, [out.argmax(1)])], lambda out: out[0] + out[1][0]),
        (lambda out: (out, out), lambda out: out[0] + out[1]),
    ],
    ids=["tuple", "dict", "attributes", "nested", "twice the same"],
)
def test_outputs_of_many_forms(device: torch.device, wrap: Any, unwrap: Any) -> None:
    both = check(device, loop_over(unwrap), make_model=lambda: Returns(wrap))
    assert both.captured == STEPS - WARM
    x, _ = batches(device, 1)[0]
    assert type(both.ours(x)) is type(both.plain(x))


def test_outputs_that_hide_their_tensors(device: torch.device) -> None:
    both = check(device, loop_over(lambda out: out.logits), make_model=lambda: Returns(Hidden))
    assert both.captured == 0
    assert "Hidden" in both.optimizer.report.declined["capture"]


def test_hidden_outputs_are_not_scaled(device: torch.device) -> None:
    both = pair(device, lambda: Returns(Hidden), enable_amp=True, amp_config=fp16(), capture_graph=False)
    train_both(both, loop_over(lambda out: out.logits), batches(device))
    assert "Hidden" in both.optimizer.report.declined["precision"]


@dataclass(eq=False)
class Graph:
    x: torch.Tensor


class TakesGraph(Net):
    def forward(self, graph: Graph) -> torch.Tensor:  # type: ignore[override]
        return super().forward(graph.x)


@dataclass
class Unhashable(Graph):
    pass


@pytest.mark.parametrize("kind", [Graph, Unhashable])
def test_arguments_that_hide_their_tensors(device: torch.device, kind: Any) -> None:
    def loop(model: nn.Module, optimizer: Optimizer, data: list[Batch]) -> list[torch.Tensor]:
        same, losses = kind(data[0][0]), []
        for x, y in data:
            same.x = x
            optimizer.zero_grad()
            loss = criterion(model(same), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return losses

    both = check(device, loop, make_model=TakesGraph)
    assert both.captured == 0
    if kind is Graph:
        assert "Graph" in both.optimizer.report.declined["capture"]


def test_keyword_and_dict_arguments(device: torch.device) -> None:
    class Keywords(Net):
        def forward(self, *, batch: dict[str, torch.Tensor], mask: torch.Tensor | None = None) -> torch.Tensor:  # type: ignore[override]
            return super().forward(batch["x"] if mask is None else batch["x"] * mask)

    def loop(model: nn.Module, optimizer: Optimizer, data: list[Batch]) -> list[torch.Tensor]:
        losses = []
        for x, y in data:
            optimizer.zero_grad()
            loss = criterion(model(batch={"x": x}, mask=x > 0), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return losses

    assert check(device, loop, make_model=Keywords).captured == STEPS - WARM


@pytest.mark.parametrize("options", [{}, {"enable_amp": True}], ids=["capture", "scaled"])
def test_inputs_that_require_gradients(device: torch.device, options: dict[str, Any]) -> None:
    def loop(model: nn.Module, optimizer: Optimizer, data: list[Batch]) -> list[torch.Tensor]:
        gradients = []
        for x, y in data:
            optimizer.zero_grad()
            given = x.clone().requires_grad_()
            criterion(model(given * 2), y).backward()
            optimizer.step()
            assert given.grad is not None
            gradients.append(given.grad)
        return gradients

    if options:
        options = {**options, "amp_config": fp16(), "exact": False}
    both = pair(device, make_optimizer=sgd, **options)
    if options:
        for x, y in batches(device):
            loop(both.ours, both.optimizer, [(x, y)])
    else:
        train_both(both, loop, batches(device))
    assert both.captured == 0
    assert any("whose inputs require gradients" in note for note in both.optimizer.report.notes)


def test_lengths_stay_on_the_host(device: torch.device) -> None:
    """torch wants the lengths of packed sequences on the CPU; a drop-in moves nothing."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.GRU(6, 8, batch_first=True)
            self.head = nn.Linear(8, 3)

        def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            _, hidden = self.cell(packed)
            return self.head(hidden[-1])

    def loop(model: nn.Module, optimizer: Optimizer, data: list[Batch]) -> list[torch.Tensor]:
        losses = []
        for index, (x, y) in enumerate(data):
            optimizer.zero_grad()
            lengths = (torch.arange(8) + index) % 4 + 1
            loss = criterion(model(x.unsqueeze(1).repeat(1, 4, 1), lengths), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return losses

    both = pair(device, Recurrent, capture_graph=device.type == "cuda", enable_amp=False)
    train_both(both, loop, batches(device))
    assert both.captured == 0


# Parameters


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


# Changes in mid-run


def test_freezing_and_thawing_a_layer(device: torch.device) -> None:
    def loop(model: nn.Module, optimizer: Optimizer, data: list[Batch]) -> list[torch.Tensor]:
        losses = simple_loop(model, optimizer, data)
        model.second.requires_grad_(False)
        losses += simple_loop(model, optimizer, data)
        model.second.requires_grad_(True)
        return losses + simple_loop(model, optimizer, data)

    both = check(device, loop, make_optimizer=fused_adamw)
    assert both.captured == 3 * STEPS - WARM - 3 - 3
    assert both.optimizer.counts["update"] > STEPS


def test_replacing_a_module(device: torch.device) -> None:
    def loop(model: nn.Module, optimizer: Optimizer, data: list[Batch]) -> list[torch.Tensor]:
        losses = simple_loop(model, optimizer, data)
        seed(3)
        model.head = nn.Linear(16, 3).to(data[0][0].device)
        optimizer.add_param_group({"params": model.head.parameters()})
        return losses + simple_loop(model, optimizer, data)

    both = check(device, loop, make_optimizer=sgd)
    assert both.captured == 2 * STEPS - WARM - 3


def test_replacing_the_tensor_of_a_parameter(device: torch.device) -> None:
    def loop(model: nn.Module, optimizer: Optimizer, data: list[Batch]) -> list[torch.Tensor]:
        losses = simple_loop(model, optimizer, data)
        model.second.weight.data = model.second.weight.data * 0.5
        return losses + simple_loop(model, optimizer, data)

    both = check(device, loop, make_optimizer=fused_adamw)
    assert both.captured > STEPS


def test_a_submodule_put_into_evaluation(device: torch.device) -> None:
    def loop(model: nn.Module, optimizer: Optimizer, data: list[Batch]) -> list[torch.Tensor]:
        losses = simple_loop(model, optimizer, data)
        model.norm.eval()
        return losses + simple_loop(model, optimizer, data)

    assert check(device, loop).captured == 2 * STEPS - WARM - 3


# Hooks


def install(model: Any, kind: str, seen: list[str]) -> Any:
    def hook(*_: Any) -> None:
        seen.append(kind)

    if kind == "gradient":
        return model.second.weight.register_hook(lambda gradient: hook() or gradient * 0.5)
    if kind == "accumulated":
        return model.second.weight.register_post_accumulate_grad_hook(hook)
    if kind == "of all modules":
        return nn.modules.module.register_module_forward_hook(hook)
    return getattr(model.second, f"register_{kind}_hook")(hook)


KINDS = ["forward_pre", "forward", "full_backward_pre", "full_backward", "gradient", "accumulated"]


@pytest.mark.parametrize("kind", KINDS)
def test_hooks_from_the_start(device: torch.device, kind: str) -> None:
    both = pair(device)
    seen: list[str] = []
    install(both.plain, kind, [])
    install(both.ours, kind, seen)
    train_both(both, simple_loop, batches(device))
    assert len(seen) == STEPS
    assert both.captured == 0
    assert "hook" in both.optimizer.report.declined["capture"]


@pytest.mark.parametrize("later", [False, True])
def test_a_hook_on_a_gradient_does_not_run_twice(device: torch.device, later: bool) -> None:
    both = pair(device, enable_amp=True, amp_config=fp16(), capture_graph=False)
    seen: list[str] = []
    if later:
        simple_loop(both.ours, both.optimizer, batches(device))
        both.plain.load_state_dict(both.ours.state_dict())
        both.plain_optimizer.load_state_dict(copy.deepcopy(both.optimizer.state_dict()))
    install(both.plain, "gradient", [])
    install(both.ours, "gradient", seen)
    train_both(both, simple_loop, batches(device))
    assert len(seen) == STEPS
    assert "would run twice" in both.optimizer.report.declined["precision"]


@pytest.mark.parametrize("kind", KINDS)
def test_hooks_added_in_mid_run(device: torch.device, kind: str) -> None:
    both = check(device, simple_loop)
    seen: list[str] = []
    install(both.plain, kind, [])
    install(both.ours, kind, seen)
    train_both(both, simple_loop, batches(device))
    assert len(seen) == STEPS
    assert "hook" in both.optimizer.report.declined["capture"]


def test_hooks_of_all_modules(device: torch.device) -> None:
    both = check(device, simple_loop)
    seen: list[str] = []
    handle = install(both.ours, "of all modules", seen)
    try:
        simple_loop(both.ours, both.optimizer, batches(device))
    finally:
        handle.remove()
    assert len(seen) >= STEPS * 5
    assert any("hook on all modules" in note for note in both.optimizer.report.notes)
    before = both.captured
    simple_loop(both.ours, both.optimizer, batches(device, 2))
    assert both.captured == before + 2


def test_hooks_on_outputs(device: torch.device) -> None:
    def loop(model: nn.Module, optimizer: Optimizer, data: list[Batch]) -> list[torch.Tensor]:
        seen: list[torch.Tensor] = []
        for x, y in data:
            optimizer.zero_grad()
            output = model(x)
            output.register_hook(lambda gradient: seen.append(gradient.clone()) or gradient * 2)
            criterion(output, y).backward()
            optimizer.step()
        return seen

    assert check(device, loop).captured == STEPS - WARM


# What a graph would freeze


def test_dropout_is_random_from_step_to_step(device: torch.device) -> None:
    class Dropped(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.dropout(super().forward(x), 0.5)

    both = pair(device, Dropped)
    data = batches(device, 1) * STEPS
    for batch in data:
        simple_loop(both.ours, both.optimizer, [batch])
    assert both.captured == STEPS - WARM
    both.optimizer.param_groups[0]["lr"] = 0.0
    masks = {tuple((both.ours(data[0][0]) == 0).flatten().tolist()) for _ in range(4)}
    assert len(masks) == 4
    if device.type == "cpu":  # the stream of random numbers itself stays
        check(device, simple_loop, make_model=Dropped)


def test_random_numbers_of_the_host(device: torch.device) -> None:
    class LayerDrop(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x if random.random() < 0.5 else x * 2)

    both = check(device, simple_loop, make_model=LayerDrop)
    assert both.captured == 0
    assert "random numbers on the host" in both.optimizer.report.declined["capture"]


def test_buffers_that_the_forward_replaces(device: torch.device) -> None:
    class Counts(Net):
        calls: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls = self.calls + 1
            return super().forward(x) / self.calls

    both = check(device, simple_loop, make_model=Counts)
    assert both.captured == 0
    assert "the step sets" in both.optimizer.report.declined["capture"]


def test_transforms_and_modes_see_the_operations(device: torch.device) -> None:
    class Smooth(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(torch.tanh(self.first(x)))

    both = check(device, simple_loop, make_model=Smooth)
    before = both.captured
    x, _ = batches(device, 1)[0]
    parameters = {name: parameter.detach() for name, parameter in both.ours.named_parameters()}

    def total(parameters: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.func.functional_call(both.ours, parameters, (x,)).square().sum()

    gradients = torch.func.grad(total)(parameters)
    assert gradients["head.weight"].abs().max() > 0
    with FlopCounterMode(display=False) as flops:
        both.ours(x)
    assert flops.get_total_flops() > 0
    compiled = torch.compile(lambda x: both.ours(x) * 2, backend="eager", fullgraph=True)
    assert_same(compiled(x).detach(), both.plain(x).detach() * 2)
    assert both.captured == before
    train_both(both, simple_loop, batches(device))


# Which model, and whose


def test_two_models_and_two_optimizers(device: torch.device) -> None:
    """A GAN: each optimizer finds its own model; the discriminator sees inputs with and without gradients."""

    def train(wrap: Any) -> list[torch.Tensor]:
        seed()
        generator = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 6)).to(device)
        critic = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1)).to(device)
        make, judge = wrap(adamw(generator.parameters())), wrap(adamw(critic.parameters()))
        results = []
        for x, _ in batches(device, 20):
            fake = generator(x[:, :4])
            judge.zero_grad()
            loss = critic(fake.detach()).mean() - critic(x).mean()
            loss.backward()
            judge.step()
            make.zero_grad()
            wish = -critic(fake).mean()
            wish.backward()
            make.step()
            results += [loss.detach(), wish.detach()]
        made.append((make, judge))
        return results + [parameter.detach() for net in (generator, critic) for parameter in net.parameters()]

    made: list[Any] = []
    assert_same(train(KitsuneOptimizer), train(lambda optimizer: optimizer))
    make, judge = made[0]
    assert make.counts["captured"] == 20 - WARM
    assert judge.counts["captured"] > 8
    assert judge.counts["in_flight"] > 8
    assert judge.counts["differentiable"] > 8


def test_an_optimizer_of_two_models_stays_plain(device: torch.device) -> None:
    def train(wrap: Any) -> list[torch.Tensor]:
        seed()
        encoder, decoder = nn.Linear(6, 16).to(device), nn.Linear(16, 3).to(device)
        optimizer = wrap(adamw([*encoder.parameters(), *decoder.parameters()]))
        losses = []
        for x, y in batches(device):
            optimizer.zero_grad()
            loss = criterion(decoder(torch.relu(encoder(x))), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        made.append(optimizer)
        return losses

    made: list[Any] = []
    assert_same(train(KitsuneOptimizer), train(lambda optimizer: optimizer))
    assert f"before step {PATIENCE_STEPS}" in made[0].report.declined["capture"]
    assert not made[0]._attachment.is_looking


def test_two_optimizers_of_one_model(device: torch.device) -> None:
    def train(wrap: Any) -> list[torch.Tensor]:
        seed()
        model = Net().to(device)
        body = wrap(adamw([*model.first.parameters(), *model.norm.parameters(), *model.second.parameters()]))
        head = wrap(fused_adamw(model.head.parameters()))
        losses = []
        for x, y in batches(device):
            body.zero_grad()
            head.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            body.step()
            head.step()
            losses.append(loss.detach())
        made.append((body, head))
        return [*losses, *(parameter.detach() for parameter in model.parameters())]

    made: list[Any] = []
    assert_same(train(KitsuneOptimizer), train(lambda optimizer: optimizer))
    body, head = made[0]
    assert body.counts["captured"] == STEPS - WARM
    assert head.report.declined == {"capture": "another KitsuneOptimizer runs this model's forwards"}


def test_the_newest_optimizer_takes_a_model_over(device: torch.device) -> None:
    """As when the cell of a notebook is run again."""
    both = check(device, simple_loop, plan=Plan.by_hand(capture="segments", update="fused"), exact=False)
    first = both.optimizer
    both.optimizer = KitsuneOptimizer(adamw(both.ours.parameters()))
    both.plain_optimizer = adamw(both.plain.parameters())
    both.ours.load_state_dict(both.plain.state_dict())
    both.exact = True
    train_both(both, simple_loop, batches(device))
    assert both.captured == STEPS - WARM
    assert "a newer KitsuneOptimizer" in first.report.declined["capture"]
    assert first.report.applied == {}
    assert first.param_groups[0]["fused"] is None
    first.close()  # must not take the model from its new owner
    simple_loop(both.ours, both.optimizer, batches(device, 2))
    assert both.captured == STEPS - WARM + 2


def test_models_compiled_by_hand(device: torch.device) -> None:
    both = pair(device)
    both.ours.compile(backend="eager")
    train_both(both, simple_loop, batches(device, 3))
    assert "compiled by hand" in both.optimizer.report.declined["capture"]

    wrapped = pair(device)
    wrapped.ours = torch.compile(wrapped.ours, backend="eager")  # type: ignore[assignment]
    simple_loop(wrapped.ours, wrapped.optimizer, batches(device, 3))
    assert "compiled by hand" in wrapped.optimizer.report.declined["capture"]


# Plans


def fp16(**arguments: Any) -> Any:
    from kitsune.amp import AMPConfig

    return AMPConfig(dtype=torch.float16, **arguments)


@pytest.mark.parametrize("capture", [False, True])
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
    assert report.applied.keys() | report.declined.keys() == set(KNOBS) - {"compile"}
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
