"""weights: a compiled bf16 step with copies of its weights takes the steps that it takes without them."""

import pytest
import torch
from torch import nn
from torch._dynamo.backends.debugging import aot_eager
from torch.nn import functional as F

from kitsune import KitsuneOptimizer, Plan, TrainStep
from kitsune.knobs import clashes
from kitsune.techniques import weights
from kitsune.techniques.facts import facts_of
from tests.step_cases import adamw

BF16 = {"precision": "bf16", "compile": "default"}
COPIES = {**BF16, "weights": "bf16_copies"}
WIDTH = 32

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # Inductor, at its first import


class Tied(nn.Module):
    """A weight that is tied, one that is frozen, and a norm."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.norm = nn.LayerNorm(2 * WIDTH)
        self.head = nn.Linear(WIDTH, 50, bias=False)
        self.head.weight = self.embedding.weight
        self.down.weight.requires_grad_(False)

    def forward(self, x):
        return self.head(self.down(F.gelu(self.norm(self.up(self.embedding(x))))))


def loss_of(output, y):
    return F.cross_entropy(output.flatten(0, 1), y.flatten())


def batches(steps):
    chance = torch.Generator().manual_seed(1)
    return [torch.randint(0, 50, (2, 8, 16), generator=chance).unbind() for _ in range(steps)]


def tied():
    torch.manual_seed(0)
    model = Tied()
    return model, adamw([parameter for parameter in model.parameters() if parameter.requires_grad])


def trained(knobs, steps=4, **options):
    model, optimizer = tied()
    with TrainStep(model, loss_of, optimizer, Plan.by_hand(**knobs), **options) as step:
        losses = [step(*batch).item() for batch in batches(steps)]
        assert step.report.declined == {}
        gradients = [parameter.grad for parameter in model.parameters()]
    return losses, gradients, list(model.parameters())


@pytest.fixture
def without_code(monkeypatch):
    """Graphs are traced as for Inductor, which makes no code of them: that takes seconds for each."""
    monkeypatch.setattr("torch._inductor.compile", lambda graph, inputs, **_: aot_eager(graph, inputs))


def test_inductor_compiles_it():
    (loss, *_), _, _ = trained(COPIES, steps=1)
    (plain, *_), _, _ = trained(BF16, steps=1)
    assert loss == plain


@pytest.mark.parametrize("options", [{}, {"clip_grad_norm": 0.1}, {"accumulation_steps": 2}], ids=str)
@pytest.mark.usefixtures("without_code")
def test_the_same_bits_as_without_copies(options):
    losses, gradients, parameters = trained(COPIES, **options)
    plain, plain_gradients, plain_parameters = trained(BF16, **options)
    assert losses == plain
    assert all(gradient is None or gradient.dtype == torch.float32 for gradient in gradients)
    pairs = [*zip(gradients, plain_gradients, strict=True), *zip(parameters, plain_parameters, strict=True)]
    assert all(own is other is None or torch.equal(own, other) for own, other in pairs)


@pytest.mark.usefixtures("without_code")
def test_a_loop_of_the_users_own():
    found = []
    for knobs in (COPIES, BF16):
        model, given = tied()
        optimizer = KitsuneOptimizer(given, plan=Plan.by_hand(**knobs))
        for x, y in batches(4):
            optimizer.zero_grad()
            loss_of(model(x), y).backward()
            assert model.up.weight.grad.dtype == torch.float32
            optimizer.step()
        assert optimizer.report.applied == knobs
        optimizer.close()
        found.append(list(model.parameters()))
    assert all(map(torch.equal, *found))


@pytest.mark.usefixtures("without_code")
def test_a_model_without_such_weights_trains_as_ever():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, WIDTH), nn.LayerNorm(WIDTH))
    step = TrainStep(model, lambda output, _: output.square().mean(), adamw(model.parameters()), Plan.by_hand(**COPIES))
    assert step(*batches(1)[0]).isfinite()
    assert step.report.declined == {}
    step.close()


@pytest.mark.usefixtures("without_code")
def test_gradients_stay_in_bf16_only_where_nothing_but_the_update_reads_them(monkeypatch):
    monkeypatch.setattr("kitsune.update.optimizer_update.is_updated_by_kernel", lambda _: True)
    for options, dtype in (
        ({}, torch.bfloat16),
        ({"accumulation_steps": 2}, torch.float32),
    ):
        model, optimizer = tied()
        step = TrainStep(model, loss_of, optimizer, Plan.by_hand(**COPIES), **options)
        seen = []
        optimizer.step = lambda model=model, seen=seen: seen.append(model.up.weight.grad)  # the kernel needs a GPU
        step(*batches(1)[0])
        assert seen[0].dtype == dtype
        assert model.embedding.weight.grad.dtype == torch.float32
        step.close()
        assert model.up.weight.grad.dtype == model.up.weight.grad_dtype == torch.float32


def test_what_it_cannot_be_combined_with():
    for other in ({"precision": "fp16"}, {"precision": "fp32"}, {"compile": "off"}, {"compile": "max-autotune"}):
        assert [knob.name for knob, _ in clashes({**COPIES, **other})] == ["weights"]
    assert list(clashes(COPIES)) == []


def test_a_model_in_half_precision_has_nothing_to_copy():
    model = nn.Linear(2, 2).bfloat16()
    facts = facts_of(model, adamw(model.parameters()), torch.device("cpu"))
    assert weights.TECHNIQUE.why_not("bf16_copies", facts) == "no parameter is in fp32"
