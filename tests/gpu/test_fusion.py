"""The knob fusion on a GPU: small models of both kinds train as without it, alone and beside Inductor, captured."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters

from kitsune.fusion import FusionConfig, FusionEngine
from kitsune.launches.execution.kernel_trace import kernels_of
from kitsune.plan import Plan
from kitsune.step import TrainStep
from tests.unit.kitsune.submission.layers import Llama

STEPS = 5
VOCABULARY, WIDTH, SEQ, BATCH = 1000, 128, 64, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(self.norms[0](x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(attended)
        return x + self.down(F.gelu(self.up(self.norms[1](x)), approximate="tanh"))


class Gpt(nn.Module):
    """As GPT-2, without dropout, so that losses can be compared."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.Sequential(Block(), Block(), nn.LayerNorm(WIDTH))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids):
        return self.head(self.blocks(self.tokens(ids)))


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList([nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2)])
        self.norms = nn.ModuleList([nn.BatchNorm2d(width) for _ in range(2)])
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        y = self.relu(self.norms[0](self.convolutions[0](x)))
        y = self.norms[1](self.convolutions[1](y))
        y += x
        return self.relu(y)


class Resnet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        convolution = nn.Conv2d(3, 32, 3, padding=1, bias=False)
        self.stem = nn.Sequential(convolution, nn.BatchNorm2d(32), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1))
        self.blocks = nn.Sequential(Residual(32), Residual(32))
        self.head = nn.Linear(32, 10)

    def forward(self, x):
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


class LongLlama(Llama):
    """With the loss's own vocabulary, as wide as GPT-2 above."""

    def __init__(self) -> None:
        super().__init__(WIDTH)
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)


def language_loss(logits, target):
    return F.cross_entropy(logits.view(-1, VOCABULARY), target.view(-1))


def text(device):
    return tuple(torch.randint(VOCABULARY, (BATCH, SEQ), device=device) for _ in range(2))


def images(device):
    return torch.randn(BATCH, 3, 32, 32, device=device), torch.randint(10, (BATCH,), device=device)


#: model, loss, batch, the patterns that are to be found in it in half precision.
CASES = {
    "GPT-2": (Gpt, language_loss, text, {"linear_cross_entropy", "add_layer_norm", "layer_norm", "mlp", "attention"}),
    "Llama": (
        LongLlama,
        language_loss,
        text,
        {"linear_cross_entropy", "rms_norm", "add_rms_norm", "rope", "gated_mlp"},
    ),
    "ResNet": (Resnet, F.cross_entropy, images, {"batch_norm_relu", "max_pool", "linear_cross_entropy"}),
}
#: What is found in fp32 in place of a pattern that is for half precision only.
IN_FP32 = {"linear_cross_entropy": "cross_entropy", "mlp": "linear_activation", "attention": None, "gated_mlp": None}


@pytest.fixture
def always_faster(monkeypatch):
    """Both are run once, so that what cannot run shows, and the kernel wins."""

    def clock(original, fused):
        original()
        fused()
        return 2.0, 1.0

    monkeypatch.setattr("kitsune.fusion.engine.side_by_side_ms", clock)


def trained(model, loss_fn, batches, **knobs):
    """(the step, its losses)."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    step = TrainStep(model, loss_fn, optimizer, plan=Plan.by_hand(**knobs) if knobs else None)
    return step, [step(*batch).item() for batch in batches]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("compiler", ["off", "default"])
@pytest.mark.parametrize("name", CASES)
def test_a_fused_step_trains_as_the_plain_one(device, always_faster, name, compiler, precision):
    make, loss_fn, draw, patterns = CASES[name]
    if precision == "fp32":
        patterns = {IN_FP32.get(pattern, pattern) for pattern in patterns} - {None}
    torch.manual_seed(0)
    plain = make().to(device)
    model = copy.deepcopy(plain)
    batches = [draw(device) for _ in range(STEPS)]
    knobs = {"precision": precision, "compile": compiler, "capture": "step", "fusion": "kitsune"}
    _, wanted = trained(plain, loss_fn, batches, precision=precision)
    step, losses = trained(model, loss_fn, batches, **knobs)
    assert not step.report.declined
    assert step.report.applied["fusion"] == "kitsune"
    found = step.report.fusion
    assert patterns <= found.matches.keys(), str(found.refused)
    assert losses == pytest.approx(wanted, rel=1e-3 if precision == "fp32" else 2e-2)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", CASES)
def test_the_next_process_finds_it_compiled(device, always_faster, monkeypatch, tmp_path, name):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    make, loss_fn, draw, _ = CASES[name]
    batches = [draw(device)]
    knobs = {"precision": "bf16", "compile": "default", "capture": "step", "fusion": "kitsune"}
    hits, losses = [], []
    for _ in range(2):
        torch.manual_seed(0)
        torch.compiler.reset()
        counters.clear()
        losses.append(trained(make().to(device), loss_fn, batches, **knobs)[1])
        hits.append(counters["aot_autograd"]["autograd_cache_hit"])
    assert hits == [0, 1], dict(counters["aot_autograd"])
    assert losses[0] == losses[1]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_what_is_measured_decides(device, compiler):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(approximate="tanh"), nn.LayerNorm(4096)).to(device)
    x = torch.randn(4096, 1024, device=device)
    for least in (0.0, 1e9):
        torch._dynamo.reset()
        engine = FusionEngine(FusionConfig(min_fusion_benefit=least), compiler=compiler)
        y = engine.fuse(model)(x)
        y.sum().backward()
        torch.testing.assert_close(y, model(x), rtol=1e-2, atol=1e-2)
        stats = engine.get_fusion_stats()
        if least:
            assert not stats.matches
            assert all("min_fusion_benefit" in one.reason for one in stats.refused), str(stats.refused)
        else:
            assert stats.matches == {"linear_activation": 1, "layer_norm": 1}, str(stats.refused)
            assert all(0.01 < one.benefit.ratio < 100 for one in stats.kept)
            assert stats.launches_before > 0 and stats.launches_after > 0


@pytest.mark.timeout(300)
def test_launches_are_those_of_the_models_themselves(device):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.LayerNorm(128), nn.LayerNorm(128)).to(device)
    x, slopes = torch.randn(32, 64, device=device), torch.ones(32, 128, device=device)
    torch._dynamo.reset()
    engine = FusionEngine(FusionConfig(min_fusion_benefit=0.0))
    launched = [launches_of(function, model, x, slopes) for function in (model, engine.fuse(model))]
    stats = engine.get_fusion_stats()
    assert [stats.launches_before, stats.launches_after] == launched, stats.notes
    assert stats.matches == {"linear_activation": 1, "layer_norm": 2}


def launches_of(function, model, x, slopes):
    def run():
        return torch.autograd.grad(function(x), list(model.parameters()), slopes)

    run()
    return kernels_of(run).total()


@pytest.mark.timeout(300)
def test_a_plan_with_fusion_trains_where_nothing_is_decided_for_it(device):
    make, loss_fn, draw, _ = CASES["GPT-2"]
    torch.manual_seed(0)
    plain = make().to(device)
    model = copy.deepcopy(plain)
    batches = [draw(device) for _ in range(STEPS)]
    _, wanted = trained(plain, loss_fn, batches)
    step, losses = trained(model, loss_fn, batches, fusion="kitsune", compile="default", capture="step")
    assert not step.report.declined
    assert losses == pytest.approx(wanted, rel=1e-3)
    stats = step.report.fusion
    assert stats.kept or stats.refused
    assert all(one.benefit.ratio >= 1 for one in stats.kept)
