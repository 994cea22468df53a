"""What a plan asks for and this model, optimizer or loop cannot do: declined with its reason, and trained as plain."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kitsune import KitsuneOptimizer, Plan, TrainStep
from kitsune.errors import WorkloadError

Make = Callable[[nn.Module], torch.optim.Optimizer]


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8, sparse=True)
        self.last = nn.Linear(8, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.last(self.embedding(ids))


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def rate_in_a_tensor(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-3))


def data(*, words: bool) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    inputs = [
        torch.randint(20, (16,), generator=generator) if words else torch.randn(16, 8, generator=generator)
        for _ in range(10)
    ]
    return [(x, torch.randint(4, (16,), generator=generator)) for x in inputs]


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach() for parameter in model.parameters()]


def twins(make: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    one = make()
    two = make()
    two.load_state_dict(one.state_dict())
    return one, two


@pytest.mark.parametrize(
    ("make", "make_optimizer", "knobs", "reason"),
    [
        (net, rate_in_a_tensor, {"update": "foreach"}, "does not take a learning rate in a tensor"),
        (Words, sgd, {"update": "fused"}, "does not take sparse gradients"),
        (Words, sgd, {"precision": "fp16"}, "sparse gradients cannot be scaled back"),
    ],
)
def test_a_whole_step(make: Callable[[], nn.Module], make_optimizer: Make, knobs: dict[str, Any], reason: str) -> None:
    ours, plain = twins(make)
    step = TrainStep(ours, F.cross_entropy, make_optimizer(ours), plan=Plan.by_hand(**knobs))
    own = TrainStep(plain, F.cross_entropy, make_optimizer(plain))
    for x, y in data(words=make is Words):
        assert torch.equal(step(x, y), own(x, y))
    assert step.report.applied == {}
    assert reason in step.report.declined[next(iter(knobs))]


def test_an_update_that_fails_for_whatever_reason_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("no kernel today")

    monkeypatch.setattr(sys.modules["torch.optim.sgd"], "_multi_tensor_sgd", broken)
    ours, plain = twins(net)
    step = TrainStep(ours, F.cross_entropy, sgd(ours), plan=Plan.by_hand(update="foreach"))
    own = TrainStep(plain, F.cross_entropy, torch.optim.SGD(plain.parameters(), lr=0.1, foreach=False))
    for x, y in data(words=False):
        assert torch.equal(step(x, y), own(x, y))
    assert step.report.applied == {}
    assert step.report.declined == {"update": "no kernel today"}


def test_a_second_optimizer_of_the_model_keeps_fp16_away() -> None:
    def train(knobs: dict[str, Any]) -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        model = net()
        body: Any = torch.optim.AdamW(model[0].parameters(), lr=1e-3)
        head = torch.optim.SGD(model[2].parameters(), lr=1e-2)
        if knobs:
            body = KitsuneOptimizer(body, plan=Plan.by_hand(**knobs))
        for x, y in data(words=False):
            body.zero_grad()
            head.zero_grad()
            F.cross_entropy(model(x), y, reduction="sum").backward()
            body.step()
            head.step()
        return model, body

    plain, _ = train({})
    ours, optimizer = train({"precision": "fp16"})
    assert all(map(torch.equal, weights(ours), weights(plain)))
    assert "2 parameters that train are not in this optimizer" in optimizer.report.declined["precision"]
    optimizer.close()


@pytest.mark.parametrize("fused", [False, True])
def test_a_grad_scaler_of_the_loops_own_keeps_fp16_away(fused: bool) -> None:
    def train(wrapped: bool) -> tuple[list[torch.Tensor], float, Any]:
        torch.manual_seed(0)
        model = net()
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
        if wrapped:
            optimizer = KitsuneOptimizer(optimizer, plan=Plan.by_hand(precision="fp16"))
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4)
        changed = 0
        for x, y in data(words=False):
            before = [weight.clone() for weight in weights(model)]
            optimizer.zero_grad()
            scaler.scale(F.cross_entropy(model(x), y)).backward()
            scaler.step(optimizer)
            scaler.update()
            changed += not all(map(torch.equal, before, weights(model)))
        return weights(model), scaler.get_scale() if changed >= 9 else float("nan"), optimizer

    expected, scale, _ = train(wrapped=False)
    found, ours, optimizer = train(wrapped=True)
    assert "a GradScaler steps this optimizer" in optimizer.report.declined["precision"]
    assert all(torch.allclose(one, two, atol=1e-2) for one, two in zip(found, expected, strict=True))
    assert ours >= scale / 4  # the first step may overflow, before anybody can know of the scaler
    optimizer.close()


def test_a_train_step_of_a_distributed_module_is_plain() -> None:
    ours, plain = twins(lambda: nn.DataParallel(net()))
    step = TrainStep(ours, F.cross_entropy, sgd(ours), plan=Plan.by_hand(precision="bf16", update="foreach"))
    own = TrainStep(plain, F.cross_entropy, sgd(plain))
    for x, y in data(words=False):
        assert torch.equal(step(x, y), own(x, y))
    assert step.report.applied == {}
    assert set(step.report.declined.values()) == {"distributed modules are not supported"}


def test_a_train_step_does_not_take_a_drop_in() -> None:
    model = net()
    optimizer = KitsuneOptimizer(sgd(model))
    with pytest.raises(WorkloadError, match="base_optimizer"):
        TrainStep(model, F.cross_entropy, optimizer)
    optimizer.close()


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("twice", [(True,) * 4, (False, False, True, True)], ids=["always", "later"])
def test_a_compiled_forward_may_have_a_second_backward(
    twice: tuple[bool, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In whatever order, since torch compiles a backward when it first runs, and caches it on disk."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    ours, plain = twins(net)
    optimizer = KitsuneOptimizer(sgd(ours), plan=Plan.by_hand(compile="default"))
    own = sgd(plain)
    for again, (x, y) in zip(twice, data(words=False), strict=False):
        for model, each in ((ours, optimizer), (plain, own)):
            each.zero_grad()
            loss = F.cross_entropy(model(x), y)
            if again:
                loss.backward(retain_graph=True)
            loss.backward()
            each.step()
    assert optimizer.report.applied == {"compile": "default"}
    assert all(torch.allclose(one, two, atol=1e-5) for one, two in zip(weights(ours), weights(plain), strict=True))
    optimizer.close()


class Viewing(nn.Module):
    """Takes for granted how the convolution lays out what it gives."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.last = nn.Conv2d(3, 4, 3), nn.Linear(4 * 36, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.convolution(x).view(len(x), -1))


def test_a_layout_that_the_model_does_not_take_is_declined() -> None:
    ours, plain = twins(Viewing)
    step, own = TrainStep(ours, F.cross_entropy, sgd(ours), plan=Plan.by_hand(layout="channels_last")), sgd(plain)
    for seed in range(3):
        torch.manual_seed(seed)
        x, y = torch.randn(4, 3, 8, 8), torch.randint(4, (4,))
        own.zero_grad()
        F.cross_entropy(plain(x), y).backward()
        own.step()
        step(x, y)
    assert step.report.applied == {}
    assert "view size is not compatible" in step.report.declined["layout"]
    assert all(torch.equal(one, two) for one, two in zip(weights(ours), weights(plain), strict=True))


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("is_dropin", [False, True])
def test_a_bad_first_batch_costs_no_part_of_the_plan(is_dropin: bool) -> None:
    model, plan = net(), Plan.by_hand(compile="default")
    step = None if is_dropin else TrainStep(model, F.cross_entropy, sgd(model), plan=plan)
    optimizer = KitsuneOptimizer(sgd(model), plan=plan) if is_dropin else None
    call = step or (lambda x, y: F.cross_entropy(model(x), y))
    good = data(words=False)
    if is_dropin:  # the first forward only tells which model it is
        call(*good[0])
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        call(torch.randn(16, 9), good[0][1])
    for x, y in good:
        call(x, y)
    report = (step or optimizer).report  # type: ignore[union-attr]
    assert (report.applied, report.declined) == ({"compile": "default"}, {})
    assert step is None or step.is_settled


@pytest.mark.parametrize("plan", [None, Plan.by_hand(update="fused")])
def test_a_step_settles_on_the_batches_that_come(plan: Plan | None) -> None:
    """Also where one of another size came first, to see whether it runs."""
    model = net()
    step = TrainStep(model, F.cross_entropy, sgd(model), plan=plan)
    x, y = data(words=False)[0]
    step(x[:3], y[:3])
    assert not step.is_settled
    for _ in range(20):
        step(x, y)
    assert step.is_settled


def test_a_call_that_fails_is_not_waited_for() -> None:
    model = net()
    step = TrainStep(model, F.cross_entropy, sgd(model), plan=Plan.by_hand(update="fused"))
    x, y = data(words=False)[0]
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        step(torch.randn(16, 9), y)
    step(x, y)
    step(x, y)
    assert step.is_settled
