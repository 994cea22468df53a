"""activations: a compiled bf16 step with rounded activations trains as without, and says where it cannot work."""

import pytest
import torch
from torch import nn
from torch._dynamo.backends.debugging import aot_eager
from torch.nn import functional as F

from kitsune import KitsuneOptimizer, Plan, TrainStep
from kitsune.fusion.half_activations import round_activations
from kitsune.knobs import clashes
from kitsune.techniques import activations
from kitsune.techniques.facts import facts_of
from tests.step_cases import adamw

BF16 = {"precision": "bf16", "compile": "default"}
ROUNDED = {**BF16, "activations": "bf16"}
WIDTH = 32

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # Inductor, at its first import


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.norm = nn.Embedding(50, WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 50, bias=False)

    def forward(self, x):
        hidden = self.embedding(x)
        return self.head(self.norm(hidden + self.down(F.gelu(self.up(hidden)))))


def loss_of(output, y):
    return F.cross_entropy(output.flatten(0, 1), y.flatten())


def batches(steps=4):
    chance = torch.Generator().manual_seed(1)
    return [torch.randint(0, 50, (2, 8, 16), generator=chance).unbind() for _ in range(steps)]


def made():
    torch.manual_seed(0)
    model = Net()
    return model, adamw(model.parameters())


@pytest.fixture
def rounded(monkeypatch):
    """How many activations were rounded, for each compiled graph."""
    counts, given = [], round_activations

    def counted(graph, dtype):
        counts.append(given(graph, dtype))
        return counts[-1]

    monkeypatch.setattr("kitsune.techniques.compile.round_activations", counted)
    return counts


def in_step(knobs):
    model, optimizer = made()
    with TrainStep(model, loss_of, optimizer, Plan.by_hand(**knobs)) as step:
        losses = [step(*batch).item() for batch in batches()]
        assert step.report.declined == {}
    return losses, list(model.parameters())


def in_loop(knobs):
    model, optimizer = made()
    optimizer = KitsuneOptimizer(optimizer, plan=Plan.by_hand(**knobs))
    losses = []
    for x, y in batches():
        optimizer.zero_grad()
        output = model(x)
        assert output.dtype == torch.float32
        loss = loss_of(output, y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert optimizer.report.declined == {}
    optimizer.close()
    return losses, list(model.parameters())


@pytest.fixture
def without_code(monkeypatch):
    """Graphs are traced as for Inductor, which makes no code of them: that takes seconds for each."""
    monkeypatch.setattr("torch._inductor.compile", lambda graph, inputs, **_: aot_eager(graph, inputs))


@pytest.mark.usefixtures("without_code")
@pytest.mark.parametrize("trained", [in_step, in_loop])
def test_a_step_trains_as_without(rounded, trained):
    losses, parameters = trained(ROUNDED)
    assert rounded == [1]
    plain, plain_parameters = trained(BF16)
    assert rounded == [1]
    assert losses == pytest.approx(plain, rel=2e-2)
    for own, other in zip(parameters, plain_parameters, strict=True):
        assert own.dtype == own.grad.dtype == torch.float32
        torch.testing.assert_close(own, other, rtol=5e-2, atol=5e-2)


def test_what_it_cannot_be_combined_with():
    for other in ({"precision": "fp16"}, {"precision": "fp32"}, {"compile": "off"}):
        assert "activations" in [knob.name for knob, _ in clashes({**ROUNDED, **other})]
    for other in ({}, {"weights": "bf16_copies"}, {"compile": "max-autotune"}):
        assert list(clashes({**ROUNDED, **other})) == []


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Net(), None),
        (nn.Sequential(nn.Linear(2, 2), nn.RMSNorm(2)), None),
        (torch.export.export(Net(), batches(1)[0][:1]).module(), None),
        (nn.Sequential(nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2)), "no embedding and no norm"),
        (Net().bfloat16(), "no parameter is in fp32"),
    ],
    ids=["embedding", "norm", "graph", "batch norm", "half"],
)
def test_it_needs_an_embedding_or_a_norm_in_fp32(model, reason):
    facts = facts_of(model, adamw(model.parameters()), torch.device("cpu"))
    found = activations.TECHNIQUE.why_not("bf16", facts)
    assert found is None if reason is None else found.startswith(reason)
