"""Copies of a workload: a copy trains like the original, or the workload is built anew."""

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

from kitsune.workload import Workload
from tuner.workloads.copies import Copies, copied, copies_here, copying
from tuner.workloads.loader import load_workload
from tuner.workloads.plain_step import plain_step
from tuner.zoo import ZOO
from tuner.zoo.recipe import Recipe

CPU = torch.device("cpu")


class Builder:
    """A user's function, which counts its calls."""

    def __init__(self, make: Callable[[], Workload]) -> None:
        self.make = make
        self.calls = 0

    def __call__(self) -> Workload:
        self.calls += 1
        torch.manual_seed(3)
        return self.make()


def a_workload(loss_of: Callable[[nn.Module], Callable[..., torch.Tensor]] = lambda _: nn.MSELoss()) -> Workload:
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return Workload(model, loss_of(model), optimizer, (torch.randn(16, 4), torch.randn(16, 2)))


def trained(workload: Workload, steps: int = 3) -> list[torch.Tensor]:
    torch.manual_seed(7)
    losses = [plain_step(workload, *workload.batch) for _ in range(steps)]
    return [*losses, *workload.model.parameters(), *workload.model.buffers()]


def handed_out(build: Builder, times: int = 3) -> list[Workload]:
    copies = Copies()
    return [copies.get("it", build, lambda workload: workload, CPU) for _ in range(times)]


def test_a_workload_is_built_once_and_its_copies_train_alike_and_apart():
    build = Builder(a_workload)
    want = trained(build())
    build.calls = 0
    first, second, third = handed_out(build)
    assert build.calls == 1
    for workload in (first, second, third):
        assert {id(p) for p in workload.model.parameters()} == {
            id(p) for group in workload.optimizer.param_groups for p in group["params"]
        }
        for got, expected in zip(trained(workload), want, strict=True):
            assert torch.equal(got, expected)
    assert not {id(p) for p in first.model.parameters()} & {id(p) for p in second.model.parameters()}


def test_the_random_state_is_left_as_it_was():
    torch.manual_seed(11)
    before = torch.get_rng_state()

    def build() -> Workload:
        state = torch.get_rng_state()
        workload = a_workload()
        torch.set_rng_state(state)
        return workload

    Copies().get("it", build, lambda workload: workload, CPU)
    assert torch.equal(torch.get_rng_state(), before)


def of_the_model(model: nn.Module) -> Callable[..., torch.Tensor]:
    """A loss that holds the model: its copy would look at the weights of the original."""

    def loss(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(out, y) + 0.01 * sum(p.square().sum() for p in model.parameters())

    return loss


def held_by_a_hook() -> Workload:
    workload = a_workload()
    linear = workload.model[0]
    linear.register_forward_hook(lambda _, args, out: out + nn.functional.linear(args[0], linear.weight))
    return workload


class Forgetful(nn.Linear):
    """Loses its bias when it is copied."""

    def __deepcopy__(self, memo: dict[int, object]) -> "Forgetful":
        twin = Forgetful(self.in_features, self.out_features)
        memo[id(self)] = twin
        twin.weight = copy.deepcopy(self.weight, memo)
        return twin


def forgetful() -> Workload:
    model = Forgetful(4, 2)
    return Workload(
        model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1), (torch.randn(8, 4), torch.randn(8, 2))
    )


class Uncopied(nn.Linear):
    def __deepcopy__(self, memo: dict[int, object]) -> "Uncopied":
        raise TypeError("holds a socket")


def uncopied() -> Workload:
    model = Uncopied(4, 2)
    return Workload(
        model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1), (torch.randn(8, 4), torch.randn(8, 2))
    )


def moody() -> Workload:
    """Draws from a generator of its own, of which a copy begins where the original stands... twice."""
    model = nn.Linear(4, 2)
    draws = iter([0.0, 1.0, 5.0, 9.0])
    model.register_forward_hook(lambda _, args, out: out * (1 + next(draws)))
    return Workload(
        model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1), (torch.randn(8, 4), torch.randn(8, 2))
    )


@pytest.mark.parametrize("make", [partial(a_workload, of_the_model), held_by_a_hook, forgetful, uncopied, moody])
def test_a_workload_whose_copies_differ_is_built_each_time(make):
    build = Builder(make)
    workloads = handed_out(build)
    assert build.calls == 1 + len(workloads)
    parameters = [id(p) for workload in workloads for p in workload.model.parameters()]
    assert len(set(parameters)) == len(parameters)


def test_a_failing_step_is_reported_when_it_is_run():
    def make() -> Workload:
        model = nn.Linear(4, 2)
        return Workload(
            model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1), (torch.randn(8, 3), torch.randn(8, 2))
        )

    workload = handed_out(Builder(make), times=1)[0]
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        plain_step(workload, *workload.batch)


def test_a_failing_build_is_reported_at_once():
    def make() -> Workload:
        raise ValueError("no data")

    with pytest.raises(ValueError, match="no data"):
        handed_out(Builder(make))


def test_a_copy_keeps_the_batches_of_its_original():
    batches = [(torch.randn(2, 4), torch.randn(2, 2))]
    original = a_workload()
    original = Workload(original.model, original.loss_fn, original.optimizer, original.batch, batches)
    assert copied(original).batches is batches


SOURCE = """
from pathlib import Path

import torch
from kitsune import Workload

def make_workload():
    with Path(__file__ + ".calls").open("a") as calls:
        print("built", file=calls)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Workload(model, torch.nn.MSELoss(), optimizer, (torch.randn(8, 4), torch.randn(8, 2)))
"""


def test_a_file_is_built_once_for_each_seed_while_copies_are_taken(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SOURCE)
    spec = f"{path}:make_workload"
    calls = tmp_path / "train.py.calls"
    plain = load_workload(spec, "cpu", seed=5)
    with copying():
        loaded = [load_workload(spec, "cpu", seed=5) for _ in range(3)]
        assert len(calls.read_text().split()) == 2
        load_workload(spec, "cpu", seed=6)
        assert len(calls.read_text().split()) == 3
    for workload in loaded:
        assert torch.equal(workload.model.weight, plain.model.weight)
        assert torch.equal(workload.batch[0], plain.batch[0])
    assert copies_here() is None
    load_workload(spec, "cpu", seed=5)
    assert len(calls.read_text().split()) == 4


@pytest.mark.parametrize("name", sorted(ZOO))
def test_a_model_of_the_zoo_is_built_once_and_its_copies_train_as_it_does(name, monkeypatch):
    spec = f"zoo:{name}?size=tiny"
    want = trained(load_workload(spec, "cpu", seed=5))
    calls = []
    build = Recipe.build
    monkeypatch.setattr(Recipe, "build", lambda self, *given: calls.append(self) or build(self, *given))
    with copying():
        found = [load_workload(spec, "cpu", seed=5) for _ in range(2)]
    assert len(calls) == 1
    for workload in found:
        for got, expected in zip(trained(workload), want, strict=True):
            assert torch.equal(got, expected)
