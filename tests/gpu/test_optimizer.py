"""The drop-in on a GPU: its semantics on real CUDA graphs, and what only a GPU can show."""

import gc
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from kitsune.amp import AMPConfig
from kitsune.optimizer import KitsuneOptimizer
from kitsune.plan import Plan
from tests.training_pairs import (
    Batch,
    Net,
    adamw,
    batches,
    check,
    criterion,
    fused_adamw,
    pair,
    simple_loop,
    train_both,
)

STEPS, WARM = 12, 4
KERNEL = Plan.by_hand(capture="segments", update="kitsune")


@pytest.mark.parametrize("by_kernel", [False, True])
def test_no_step_waits_for_the_device(device: torch.device, by_kernel: bool) -> None:
    """fp16 with a fused update: forward, backward, overflow check and update are all launches."""
    config = AMPConfig(dtype=torch.float16, init_scale=1024.0)
    make, plan = (adamw, KERNEL) if by_kernel else (fused_adamw, None)
    both = pair(device, make_optimizer=make, plan=plan, enable_amp=True, amp_config=config)
    data = batches(device, 16)
    simple_loop(both.ours, both.optimizer, data[:12])
    before = both.captured, both.optimizer.counts["update"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        simple_loop(both.ours, both.optimizer, data[12:])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert (both.captured, both.optimizer.counts["update"]) == (before[0] + 4, before[1] + 4)


class TwoTerms(Net):
    """The second term of its loss lies in a list of its own, or of nobody's."""

    ELSEWHERE: ClassVar[list[torch.Tensor]] = []

    def __init__(self, own: bool) -> None:
        super().__init__()
        self.own, self.terms = own, []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.norm(self.first(x)))
        if self.own:
            self.terms = [hidden.square().mean()]
        else:
            self.ELSEWHERE[:] = [hidden.square().mean()]
        return self.head(torch.relu(self.second(hidden)))

    def term(self) -> torch.Tensor:
        return (self.terms if self.own else self.ELSEWHERE)[0]


def two_terms_loop(model: Any, optimizer: Optimizer, data: list[Batch]) -> list[torch.Tensor]:
    losses = []
    for x, y in data:
        optimizer.zero_grad()
        loss = criterion(model(x), y) + model.term()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("options", [{}, {"num_streams": 3}])
def test_a_term_of_the_loss_that_the_forward_keeps(device: torch.device, own: bool, options: dict[str, Any]) -> None:
    both = check(device, two_terms_loop, make_model=lambda: TwoTerms(own), **options)
    assert both.captured == 0
    told = "the step sets terms" if own else "keeps a tensor with its autograd graph"
    assert told in both.optimizer.report.declined["capture"]


def test_a_forward_that_waits_for_the_device_is_not_captured(device: torch.device) -> None:
    class Waits(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * (2.0 if x.sum().item() > 0 else 1.0)

    both = check(device, simple_loop, make_model=Waits)
    assert both.captured == 0
    assert "waits for the device" in both.optimizer.report.declined["capture"]
    assert "test_optimizer.py" in both.optimizer.report.declined["capture"]


def test_random_numbers_of_the_host_by_torch(device: torch.device) -> None:
    class LayerDrop(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x if torch.rand(()) < 0.5 else x * 2)

    both = check(device, simple_loop, make_model=LayerDrop)
    assert "random numbers on the host" in both.optimizer.report.declined["capture"]


@pytest.mark.filterwarnings("ignore")  # torch.compile's own
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_forwards_in_the_users_loop(device: torch.device, mode: str) -> None:
    """Outputs are kept, two forwards share a step, and the eager last batch is in between."""

    def loop(model: nn.Module, optimizer: Optimizer, data: list[Batch]) -> list[torch.Tensor]:
        kept = []
        for x, y in data:
            optimizer.zero_grad()
            one, two = model(x), model(x * 0.5)
            (criterion(one, y) + criterion(two, y)).backward()
            optimizer.step()
            kept += [one.detach(), two.detach()]
        return kept

    capture = "segments" if mode == "default" else "none"
    both = pair(device, make_optimizer=fused_adamw, plan=Plan.by_hand(compile=mode, capture=capture))
    train_both(both, loop, batches(device))
    assert both.optimizer.report.applied["compile"] == mode
    assert bool(both.captured) == (capture == "segments")


@pytest.mark.filterwarnings("ignore")  # torch.compile's own
def test_compiled_segments(device: torch.device) -> None:
    plan = Plan.by_hand(compile="default", capture="segments", update="fused")
    both = check(device, simple_loop, plan=plan, exact=False)
    assert both.captured == STEPS - WARM
    assert both.optimizer.counts["update"] > 0
    assert both.optimizer.report.declined == {}


def test_capturable_updates(device: torch.device) -> None:
    """AdamW as given (foreach) reads its learning rate from a tensor once captured."""
    both = check(device, simple_loop, exact=False)
    assert both.optimizer.counts["update"] > 0
    assert both.optimizer.base_optimizer.param_groups[0]["capturable"]
    assert not both.optimizer.state_dict()["param_groups"][0]["capturable"]
    both.optimizer.close()
    assert not both.optimizer.base_optimizer.param_groups[0]["capturable"]
    train_both(both, simple_loop, batches(device))


def test_tf32_holds_for_forward_and_backward_only(device: torch.device) -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.head = nn.Linear(6, 1024), nn.Linear(1024, 1024)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.first(x))

    def run(**options: Any) -> torch.Tensor:
        torch.manual_seed(0)
        model = Wide().to(device)
        optimizer = KitsuneOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), **options)
        for x, _ in batches(device, 8, size=1024):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        assert optimizer.counts.get("captured", 0) == 4
        assert model.head.weight.grad is not None
        return model.head.weight.grad

    exact = run()
    rounded = run(plan=Plan.by_hand(precision="tf32", capture="segments"))
    assert not torch.backends.cuda.matmul.allow_tf32
    error = (rounded - exact).norm() / exact.norm()
    assert 1e-5 < error < 1e-2


def test_memory_is_given_back(device: torch.device) -> None:
    """The pool of the graphs goes with the model, once the optimizer is closed."""

    def train() -> None:
        model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4))).to(device)
        optimizer = KitsuneOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True))
        for _ in range(10):
            optimizer.zero_grad()
            model(torch.randn(256, 1024, device=device)).square().mean().backward()
            optimizer.step()
        assert optimizer.counts["captured"] == 6
        optimizer.close()

    def reserved_after_training() -> int:
        train()
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved(device)

    assert reserved_after_training() >= reserved_after_training()
