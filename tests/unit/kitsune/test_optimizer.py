"""The drop-in on the CPU: its semantics on the CPU twin of captured graphs, and what no device changes."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import kitsune
from kitsune.amp import AMPConfig
from kitsune.device.backend import environment
from kitsune.errors import DeclinedError, SettingsError
from kitsune.fusion import FusionConfig
from kitsune.optimizer import KitsuneOptimizer
from kitsune.plan import Plan
from kitsune.runtime.step_profile import CALIBRATION_STEPS
from kitsune.streams import StreamConfig
from tests.step_cases import capturing_cpu
from tests.training_pairs import STEPS, check

WARM = 4


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    return capturing_cpu(monkeypatch)


@pytest.fixture
def no_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch.compile captures runs as it is: tests/e2e/test_manual shows that Inductor's code trains as well."""
    monkeypatch.setattr("torch._inductor.compile", lambda graph, inputs, options: graph.forward)


class ConvNet(nn.Module):
    """The network of the documented example, smaller."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, 3, 1)
        self.conv2 = nn.Conv2d(4, 8, 3, 1)
        self.fc1 = nn.Linear(8 * 4 * 4, 16)
        self.fc2 = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.conv1(x))
        x = torch.relu(self.conv2(x))
        x = torch.max_pool2d(x, 2)
        x = torch.flatten(x, 1)
        return self.fc2(torch.relu(self.fc1(x)))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 6) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(steps):
        images = torch.randn(4, 1, 12, 12, generator=generator)
        labels = torch.randint(10, (4,), generator=generator)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def conv_net() -> ConvNet:
    torch.manual_seed(0)
    return ConvNet()


# Both documented forms, as printed, on a machine without a GPU


def test_the_form_with_a_class() -> None:
    model = conv_net()
    optimizer = kitsune.KitsuneOptimizer(torch.optim.Adam, model.parameters(), lr=1e-3)
    losses = train(model, optimizer)
    plain = conv_net()
    assert losses == train(plain, torch.optim.Adam(plain.parameters(), lr=1e-3))
    assert optimizer.report.declined == {"capture": "CUDA graphs need a GPU"}
    assert model._compiled_call_impl is None


def test_the_form_with_a_class_and_every_option(no_compiling: None) -> None:
    model = conv_net()
    optimizer = kitsune.KitsuneOptimizer(
        torch.optim.AdamW,
        model.parameters(),
        lr=1e-3,
        num_streams=8,
        enable_fusion=True,
        enable_amp=True,
        memory_pool_size="2GB",
        profile=True,
    )
    losses = train(model, optimizer, CALIBRATION_STEPS + 3)
    assert all(torch.isfinite(loss) for loss in losses)
    assert optimizer.report.applied == {"precision": "bf16", "compile": "default"}
    assert optimizer.report.declined.keys() == {"capture", "streams", "pool_bytes"}


def test_the_form_with_an_optimizer() -> None:
    model = conv_net()
    base_optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    optimizer = KitsuneOptimizer(base_optimizer, enable_amp=True, num_streams=4)
    assert all(torch.isfinite(loss) for loss in train(model, optimizer))
    assert optimizer.base_optimizer is base_optimizer
    assert optimizer.base_optimizer.param_groups[0]["lr"] == 1e-3
    assert optimizer.report.applied == {"precision": "bf16"}


def test_the_form_with_an_optimizer_and_configurations(no_compiling: None) -> None:
    model = conv_net()
    optimizer = KitsuneOptimizer(
        torch.optim.Adam(model.parameters(), lr=1e-3),
        enable_amp=True,
        amp_config=AMPConfig(dtype=torch.float16, growth_interval=2000, backoff_factor=0.5),
        enable_fusion=True,
        fusion_config=FusionConfig(enable_elementwise=True, enable_reduction=True, max_fusion_size=8),
        stream_config=StreamConfig(num_streams=6, priority_streams=[0]),  # type: ignore[arg-type]
        num_streams=6,
        profile=True,
        memory_pool_size=512 * 1024 * 1024,
        capture_graph=True,
    )
    assert all(torch.isfinite(loss) for loss in train(model, optimizer, CALIBRATION_STEPS + 3))
    assert optimizer.report.applied == {"precision": "fp16", "compile": "default"}


def test_the_drop_in_is_an_optimizer() -> None:
    model = conv_net()
    optimizer = KitsuneOptimizer(torch.optim.SGD, model.parameters(), lr=0.1)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.param_groups is optimizer.base_optimizer.param_groups
    assert optimizer.state is optimizer.base_optimizer.state
    assert optimizer.defaults is optimizer.base_optimizer.defaults
    assert repr(optimizer) == f"KitsuneOptimizer({optimizer.base_optimizer!r})"
    optimizer.close()


def test_what_the_wrapped_optimizer_has_beyond_is_there() -> None:
    class Scheduled(torch.optim.SGD):
        mode = "train"

        def eval(self) -> None:
            self.mode = "eval"

    optimizer = KitsuneOptimizer(Scheduled(conv_net().parameters(), lr=0.1))
    optimizer.eval()
    assert optimizer.mode == "eval"
    assert not hasattr(optimizer, "found_inf")
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = optimizer.no_such_thing
    optimizer.close()


class Twice(torch.optim.SGD):
    """As SAM does: two gradients a step, by calling the closure itself; and a result of its own."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        with torch.enable_grad():
            closure()
        first = [parameter.grad.clone() for group in self.param_groups for parameter in group["params"]]
        with torch.enable_grad():
            closure()
        for group in self.param_groups:
            for parameter, gradient in zip(group["params"], first, strict=True):
                parameter.grad.add_(gradient)
        super().step()
        return "stepped"


def test_optimizers_from_elsewhere_call_their_closure_themselves(device: torch.device) -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, data: list[Any]) -> list[torch.Tensor]:
        losses: list[torch.Tensor] = []
        for x, y in data:

            def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(x), y)
                loss.backward()
                losses.append(loss.detach())
                return loss

            assert optimizer.step(closure) == "stepped"  # type: ignore[comparison-overlap]
        return losses

    both = check(device, loop, make_optimizer=lambda parameters: Twice(parameters, lr=0.1))
    assert both.captured == 2 * STEPS - WARM


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((torch.optim.AdamW,), {}, "needs the model's parameters"),
        (("adamw", []), {}, "neither an optimizer nor a class"),
        ((nn.Linear, []), {}, "neither an optimizer nor a class"),
        ((torch.optim.SGD,), {"params": [nn.Parameter(torch.ones(1))], "learning_rate": 1}, "learning_rate"),
        ((torch.optim.SGD([nn.Parameter(torch.ones(1))]),), {"lr": 1}, "lr: the optimizer is built already"),
        ((torch.optim.SGD([nn.Parameter(torch.ones(1))]), []), {}, "built already"),
        ((torch.optim.SGD([nn.Parameter(torch.ones(1))]),), {"on_decline": "never"}, "on_decline"),
        ((torch.optim.SGD([nn.Parameter(torch.ones(1))]),), {"num_streams": 0}, "num_streams"),
        ((torch.optim.SGD([nn.Parameter(torch.ones(1))]),), {"plan": "auto.json"}, "plan"),
    ],
)
def test_arguments_that_make_no_sense(arguments: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        KitsuneOptimizer(*arguments, **options)


def test_wrapping_twice_makes_no_sense() -> None:
    optimizer = KitsuneOptimizer(torch.optim.SGD, conv_net().parameters(), lr=0.1)
    with pytest.raises(SettingsError, match="base_optimizer"):
        KitsuneOptimizer(optimizer)
    optimizer.close()


def test_options_that_cannot_be_honoured_raise_when_asked_to() -> None:
    with pytest.raises(DeclinedError, match="num_streams"):
        KitsuneOptimizer(torch.optim.SGD, conv_net().parameters(), lr=0.1, num_streams=9, on_decline="raise")


def test_before_the_first_forward_the_report_says_so() -> None:
    optimizer = KitsuneOptimizer(torch.optim.SGD, conv_net().parameters(), lr=0.1, num_streams=9)
    assert optimizer.report.applied == {}
    assert optimizer.report.declined.keys() == {"num_streams"}
    assert "before the first training forward" in str(optimizer.report)
    optimizer.close()


def test_a_plan_of_another_machine_is_refused_but_not_what_was_chosen_by_hand() -> None:
    here = environment(torch.device("cpu"))
    plan = Plan.by_hand(update="fused", layout="channels_last").model_copy(
        update={"environment": here.model_copy(update={"gpu": "NVIDIA B200", "device": "cuda"})}
    )
    model = conv_net()
    optimizer = KitsuneOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), plan=plan, enable_amp=True)
    train(model, optimizer, 2)
    assert optimizer.report.applied == {"precision": "bf16"}
    assert optimizer.report.declined.keys() == {"update", "layout"}
    assert "NVIDIA B200" in optimizer.report.declined["update"]
    optimizer.close()


def test_a_plan_that_nearly_fits_is_applied_with_a_note() -> None:
    here = environment(torch.device("cpu"))
    plan = Plan.by_hand(update="fused").model_copy(update={"environment": here.model_copy(update={"torch": "2.9.0"})})
    model = conv_net()
    optimizer = KitsuneOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), plan=plan)
    train(model, optimizer, 2)
    assert optimizer.report.applied == {"update": "fused"}
    assert any("tuned with torch 2.9.0" in note for note in optimizer.report.notes)
    optimizer.close()


@pytest.mark.minutes
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch, of torch
def test_fusion_trains_as_torch_compile_does() -> None:
    model, plain = conv_net(), conv_net()
    optimizer = KitsuneOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), enable_fusion=True, capture_graph=False)
    losses = torch.stack(train(model, optimizer))
    expected = torch.stack(train(plain, torch.optim.SGD(plain.parameters(), lr=0.1)))
    # of equal maxima in a pool, Inductor gives the gradient to another
    torch.testing.assert_close(losses, expected, rtol=1e-2, atol=0.0)
    assert optimizer.report.declined == {}
    assert optimizer.report.applied == {"compile": "default"}
    assert optimizer.counts == {"eager": 5}
    seen: list[str] = []
    model.conv1.register_forward_hook(lambda *_: seen.append("hook"))
    train(model, optimizer, 2)
    assert len(seen) == 2


def test_nothing_is_kept_alive() -> None:
    model = conv_net()
    optimizer = KitsuneOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), enable_amp=True)
    train(model, optimizer, 2)
    gone = weakref.ref(model), weakref.ref(optimizer)
    del model, optimizer
    gc.collect()
    assert [reference() for reference in gone] == [None, None]
