"""When the optimizer's update is captured, replayed, captured anew, or run eagerly."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR

from kitsune.device.cuda_graph import WARM_RUNS, Graph, Recorder
from kitsune.errors import CaptureError
from kitsune.update.optimizer_update import HOOKED, Update
from kitsune.update.update_graph import FOREIGN, PATIENCE_UPDATES, UpdateGraph


class Counting(Recorder):
    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.captures = 0
        self.fails = False

    def capture(self, function: Callable[[], Any]) -> tuple[Graph, Any]:
        if self.fails:
            raise CaptureError("not today")
        self.captures += 1
        return super().capture(function)


class Case:
    """A parameter trained by UpdateGraph, and another that is trained plainly."""

    def __init__(self, kind: Any = torch.optim.AdamW, **arguments: Any) -> None:
        arguments = {"lr": 0.1, "fused": True, **arguments}
        self.parameters = [nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))]
        self.optimizer, self.plain = (kind([parameter], **arguments) for parameter in self.parameters)
        self.recorder = Counting()
        self.graph = UpdateGraph(Update(self.optimizer), self.recorder)
        self.gradients = [torch.zeros(4), torch.zeros(4)]

    def step(self, count: int = 1, owner: object = "owner") -> "Case":
        for _ in range(count):
            for parameter, gradient in zip(self.parameters, self.gradients, strict=True):
                gradient.add_(torch.tensor([1.0, -2.0, 0.5, 3.0]))
                parameter.grad = gradient
            self.graph(owner)
            self.plain.step()
            assert torch.equal(*self.parameters)
        return self

    @property
    def issued(self) -> tuple[int, int]:
        return self.recorder.captures, self.graph.replays


READY = WARM_RUNS + 2  # one eager step for this owner, and the one that is captured


def test_a_few_eager_steps_then_replays() -> None:
    case = Case()
    assert case.step(READY - 1).issued == (0, 0)
    assert case.step().issued == (1, 0)
    assert case.step(5).issued == (1, 5)


def test_gradients_of_anybody_are_stepped_eagerly() -> None:
    assert Case().step(10, owner=None).issued == (0, 0)


def test_each_owner_has_a_graph() -> None:
    case = Case().step(WARM_RUNS)
    for _ in range(5):
        case.step(owner="one").step(owner="two")
    assert case.issued == (2, 6)


def load_own_checkpoint(case: Case) -> None:
    for optimizer in (case.optimizer, case.plain):
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def load_empty_checkpoint(case: Case) -> None:
    for optimizer in (case.optimizer, case.plain):
        optimizer.load_state_dict({**optimizer.state_dict(), "state": {}})


def clear_state(case: Case) -> None:
    for optimizer in (case.optimizer, case.plain):
        optimizer.state.clear()


def move_parameters(case: Case) -> None:
    for parameter in case.parameters:
        parameter.data = parameter.data.clone()


@pytest.mark.parametrize("change", [load_own_checkpoint, load_empty_checkpoint, clear_state, move_parameters])
def test_what_is_baked_in_has_moved(change: Callable[[Case], None]) -> None:
    """First an eager step, so that no state is made under capture; then a new graph."""
    case = Case().step(READY)
    change(case)
    assert case.step().issued == (1, 0)
    assert case.step().issued == (2, 0)
    assert case.step(3).issued == (2, 3)


def test_a_new_group_of_parameters() -> None:
    case = Case().step(READY)
    extra = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))]
    for optimizer, parameter in zip((case.optimizer, case.plain), extra, strict=True):
        optimizer.add_param_group({"params": [parameter], "lr": 0.5})
        parameter.grad = torch.ones(2)
    case.step(4)
    assert case.issued == (2, 2)
    assert torch.equal(*extra)
    assert not torch.equal(extra[0], torch.ones(2))


def test_learning_rates_are_honoured_at_every_step() -> None:
    case = Case().step(READY)
    schedulers = [ExponentialLR(optimizer, 0.5) for optimizer in (case.optimizer, case.plain)]
    for _ in range(4):
        case.step()
        for scheduler in schedulers:
            scheduler.step()
    assert case.issued == (1, 4)


def test_each_graph_gets_the_learning_rate() -> None:
    case = Case().step(WARM_RUNS)
    for index in range(8):
        for optimizer in (case.optimizer, case.plain):
            optimizer.param_groups[0]["lr"] = 0.1 / (1 + index)
        case.step(owner=index % 2)
    assert case.issued == (2, 4)


def test_what_keeps_an_update_from_being_captured_is_told_until_it_ends() -> None:
    case = Case().step(PATIENCE_UPDATES - 1, owner=None)
    assert case.graph.refusal is None
    assert case.step(owner=None).graph.refusal == FOREIGN
    hook = case.optimizer.register_step_post_hook(lambda *_: None)
    assert case.step().graph.refusal == HOOKED
    hook.remove()
    assert case.step(READY - WARM_RUNS + 1).graph.refusal is None
    assert case.step(PATIENCE_UPDATES, owner=None).issued == (1, 1)
    assert case.graph.refusal is None, "it was captured, and will be replayed when its gradients come back"


def test_other_hyperparameters_are_not_captured_once_they_change() -> None:
    case = Case().step(READY)
    for optimizer in (case.optimizer, case.plain):
        optimizer.param_groups[0]["weight_decay"] = 0.5
    assert case.step(3).issued == (1, 0)
    assert case.graph.refusal == "a hyperparameter other than the learning rate changes between steps"


@pytest.mark.parametrize(
    ("kind", "arguments", "reason"),
    [
        (torch.optim.SGD, {"fused": False}, "SGD takes its learning rate from a tensor only when it is fused"),
        (torch.optim.RMSprop, {"fused": None}, "RMSprop cannot take its learning rate from a tensor"),
    ],
)
def test_updates_that_cannot_be_captured(kind: Any, arguments: dict[str, Any], reason: str) -> None:
    if arguments["fused"] is None:
        case = Case(lambda parameters, lr, fused: kind(parameters, lr=lr))
    else:
        case = Case(kind, **arguments)
    assert case.step(10).issued == (0, 0)
    assert case.graph.refusal == reason


def test_a_capture_that_fails_is_an_eager_step() -> None:
    case = Case()
    case.recorder.fails = True
    assert case.step(10).issued == (0, 0)
    assert case.graph.refusal == "not today"
    assert case.optimizer.param_groups[0]["lr"] == 0.1


def test_hooks_see_every_step() -> None:
    case = Case().step(READY + 2)
    seen: list[Any] = []
    handle = case.optimizer.register_step_post_hook(lambda *_: seen.append("step"))
    assert case.step(3).issued == (1, 2)
    assert len(seen) == 3
    handle.remove()
    assert case.step(2).issued == (1, 4)
