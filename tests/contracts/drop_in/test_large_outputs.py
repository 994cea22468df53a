"""The drop-in: large logits stay in half precision, and in the memory of the graph, until a loop reads them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kitsune import KitsuneOptimizer, Plan
from kitsune.autograd import fused_loss, half_outputs, sole_outputs
from kitsune.errors import CaptureError
from kitsune.fusion.padded_outputs import padded_linear
from tests.training_pairs import adamw

CLASSES = 42  # rows of as many in bf16 do not begin at multiples of 16 bytes
STEPS = 10

pytestmark = pytest.mark.filterwarnings("ignore:.*Online softmax")


def plan_for(device: torch.device) -> Plan:
    """Compiled on a GPU only: on a CPU, what the compiler makes cannot be captured."""
    half: dict[str, Any] = {"capture": "segments", "precision": "bf16"}
    return Plan.by_hand(**half, **({"compile": "default"} if device.type == "cuda" else {}))


@pytest.fixture(autouse=True, params=["dense", "padded"])
def rows(request: pytest.FixtureRequest, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """How the rows of the logits lie in memory."""
    if request.param == "padded" and device.type == "cuda":
        pytest.skip("the compiler pads them")
    if request.param == "padded":
        monkeypatch.setattr(Model, "logits_of", padded_logits)


def padded_logits(model: "Model", hidden: torch.Tensor) -> torch.Tensor:
    given = (hidden, model.head.weight, model.head.bias)
    return padded_linear(*(each.to(torch.bfloat16) for each in given))


class Model(nn.Module):
    """Returns logits, or its loss and the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(CLASSES, 16), nn.Linear(16, CLASSES)

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> Any:
        logits = self.logits_of(torch.tanh(self.embedding(x)))
        return logits if y is None else (F.cross_entropy(logits.view(-1, CLASSES), y.view(-1)), logits)

    def logits_of(self, hidden: torch.Tensor) -> torch.Tensor:
        given: torch.Tensor = self.head(hidden)
        return given


def batches(device: torch.device) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """No token twice: the compiled gradient of the embedding adds up by atomics, whose order is chance."""
    chance = torch.Generator().manual_seed(7)
    drawn = [torch.stack([torch.randperm(CLASSES, generator=chance)[:32] for _ in "xy"]) for _ in range(STEPS)]
    return [(x.view(4, 8).to(device), y.view(4, 8).to(device)) for x, y in drawn]


class Fused:
    """Counts the losses that read logits in half precision."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        given = fused_loss.FusedLoss.__call__

        def counted(*args: Any) -> torch.Tensor:
            self.count += 1
            return given(*args)

        monkeypatch.setattr(fused_loss.FusedLoss, "__call__", counted)


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> Fused:
    return Fused(monkeypatch)


def trained(
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    loop: Callable[..., Any],
    *,
    least_bytes: int,
    plan: Plan | None = None,
) -> list[torch.Tensor]:
    """What the loop returns, and the weights, with outputs of at least so many bytes left in half precision."""
    monkeypatch.setattr(half_outputs, "LEAST_BYTES", least_bytes)
    monkeypatch.setattr(sole_outputs, "LEAST_CLASSES", CLASSES)
    torch.manual_seed(0)
    model = Model().to(device)
    plan = plan or plan_for(device)
    optimizer = KitsuneOptimizer(adamw(model.parameters()), plan=plan)
    found = loop(model, optimizer, batches(device))
    assert (optimizer.report.applied, optimizer.report.declined) == (plan.knobs, {})
    assert optimizer.counts["captured"] >= STEPS - 5
    return [*found, *(parameter.detach() for parameter in model.parameters())]


def check(device: torch.device, monkeypatch: pytest.MonkeyPatch, loop: Callable[..., Any]) -> None:
    ours = trained(device, monkeypatch, loop, least_bytes=0)
    plain = trained(device, monkeypatch, loop, least_bytes=2**60)
    assert len(ours) == len(plain)
    for own, other in zip(ours, plain, strict=True):
        assert own.dtype == other.dtype
        torch.testing.assert_close(own, other, rtol=2e-2, atol=2e-3)


def test_a_loss_reads_them_as_they_are(device: torch.device, monkeypatch: pytest.MonkeyPatch, fused: Fused) -> None:
    def loop(model: nn.Module, optimizer: Any, data: Any) -> list[torch.Tensor]:
        losses = []
        for x, y in data:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x).view(-1, CLASSES), y.view(-1))
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return losses

    check(device, monkeypatch, loop)
    assert fused.count >= STEPS - 5


def test_they_are_right_whenever_they_are_read(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, fused: Fused
) -> None:
    """Before the loss, after the backward, after the update, and after later steps."""

    def loop(model: nn.Module, optimizer: Any, data: Any) -> list[torch.Tensor]:
        found, kept = [], []
        for step, (x, y) in enumerate(data):
            optimizer.zero_grad()
            logits = model(x)
            if step % 4 == 1:
                found.append(logits.detach().clone())
            loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())
            loss.backward()
            if step % 4 == 2:
                found.append(logits.max())
            optimizer.step()
            if step % 4 == 3:
                found.append(logits.softmax(-1).detach())
            kept.append(logits)
        return [*found, *(logits.detach() for logits in kept)]

    check(device, monkeypatch, loop)
    assert fused.count > 0


def test_a_model_that_returns_its_loss_beside_them(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    def loop(model: nn.Module, optimizer: Any, data: Any) -> list[torch.Tensor]:
        found = []
        for step, (x, y) in enumerate(data):
            optimizer.zero_grad()
            loss, logits = model(x, y)
            if step % 3 == 2:
                loss = loss + logits.square().mean()
            loss.backward()
            optimizer.step()
            found += [loss.detach(), logits.argmax(-1).float().mean()]
        return found

    check(device, monkeypatch, loop)


def test_gradients_of_logits_that_a_loop_keeps(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in steps in which nothing of them reaches the weights, and in those after it."""

    def loop(model: nn.Module, optimizer: Any, data: Any) -> list[torch.Tensor]:
        kept = []
        for step, (x, y) in enumerate(data):
            optimizer.zero_grad()
            logits = model(x)
            logits.retain_grad()
            loss = F.cross_entropy(logits.view(-1, CLASSES), y.view(-1))
            if step == STEPS - 2:
                kept.append(torch.autograd.grad(loss, logits)[0])
                loss = F.cross_entropy(logits.view(-1, CLASSES), x.view(-1)) + logits.square().mean()
            loss.backward()
            kept.append(logits.grad)
            optimizer.step()
        return [gradient.detach() + 0 for gradient in kept]

    check(device, monkeypatch, loop)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor", "ignore:.torch.jit.script_method. is deprecated")
def test_a_loss_that_the_user_has_compiled(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()

    @torch.compile(backend="inductor" if device.type == "cuda" else "aot_eager")
    def loss_of(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.view(-1, CLASSES), y.view(-1))

    def loop(model: nn.Module, optimizer: Any, data: Any) -> list[torch.Tensor]:
        losses = []
        for x, y in data:
            optimizer.zero_grad()
            loss = loss_of(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return losses

    check(device, monkeypatch, loop)


@pytest.mark.parametrize("least_bytes", [0, 2**60], ids=["half", "copied"])
def test_a_loop_that_asks_for_the_gradient_of_an_output_behind_the_loss_is_told(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, least_bytes: int
) -> None:
    """The loss is computed from the logits within the graph, so a replay cannot tell their whole gradient.

    Not compiled: torch.compile itself gives such a hook a part of the gradient.
    """

    def loop(model: nn.Module, optimizer: Any, data: Any) -> list[torch.Tensor]:
        for step, (x, y) in enumerate(data):
            optimizer.zero_grad()
            loss, logits = model(x, y)
            if step == STEPS - 1:
                logits.register_hook(lambda gradient: gradient)
            loss.backward()
            optimizer.step()
        return []

    not_compiled = Plan.by_hand(capture="segments", precision="bf16")
    with pytest.raises(CaptureError, match="asks for the gradient of an output"):
        trained(device, monkeypatch, loop, least_bytes=least_bytes, plan=not_compiled)
