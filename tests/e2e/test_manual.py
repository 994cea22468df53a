"""Every code block and every command of the product's manual runs as it is printed there, on a real model.

What differs from the print is listed with each block: `.cuda()` where there is no GPU, and what a block leaves open.

Commands of the manual that run elsewhere: `pytest tests/ -v` and `pytest tests/unit/ -v` are this suite (scripts/test),
`mypy kitsune/` is scripts/check, the examples have test_examples.py, all models of the baseline are timed with
`-m minutes` here. Commands that cannot run, and what there is instead:

- `git clone`, `cd`, `pip install ...`: a network; a wheel is made and installed by tests/test_packaging.py
- `pip install -e ".[triton]"`, `".[dev]"`, `kitsune-torch[all]`: the same; these extras exist
- `pytest tests/integration/`: tests/e2e, tests/store and tests/browser are these tests
- `pytest --cov=kitsune --cov-report=html tests/`: pytest-cov is not among our tools
- `black`, `isort`, `flake8`: ruff does all three
- `./run_docs.sh`: ./scripts/docs
- `examples/week3_stream_parallelism.py`, `week5_kernel_fusion.py`, `week6_amp_integration.py`: without the weeks
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

from kitsune import KitsuneOptimizer
from kitsune.runtime.step_profile import CALIBRATION_STEPS

ROOT = Path(__file__).parents[2]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STEPS = CALIBRATION_STEPS + 14
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch, of torch
NO_GPU = (".cuda()", f'.to("{DEVICE}")')
NO_LOSS = "the print calls the model's output a loss"


@dataclass(frozen=True)
class Block:
    """`changes`: what the print has, and what it must be to run."""

    text: str
    changes: tuple[tuple[str, str], ...] = ()

    def run(self, **given):
        text = self.text
        for old, new in (*self.changes, NO_GPU):
            assert old in text or old == NO_GPU[0], old
            text = text.replace(old, new)
        names = {"torch": torch, "nn": nn, **given}
        exec(compile(text, "<manual>", "exec"), names)
        return names


class Pairs:
    """Batches of one shape, as a loader gives them; labels by a rule, so that there is something to learn."""

    def __init__(self, shape, classes=10, steps=STEPS):
        self.shape, self.classes, self.steps = shape, classes, steps

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for _ in range(self.steps):
            x = torch.randn(self.shape)
            yield x, x.flatten(1)[:, : self.classes].argmax(1)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


QUICK_START = Block(
    """
import torch
import torch.nn as nn
from kitsune import KitsuneOptimizer

# Create your model and optimizer as usual
model = nn.Sequential(
    nn.Linear(1024, 512),
    nn.ReLU(),
    nn.Linear(512, 10)
).cuda()

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

# Wrap with Kitsune - that's it!
kitsune_optimizer = KitsuneOptimizer(
    optimizer,
    enable_amp=True,
    enable_fusion=True,
    num_streams=4
)

# Train as normal - Kitsune optimizes automatically
for data, target in dataloader:
    data, target = data.cuda(), target.cuda()

    loss = model(data)
    loss.backward()
    kitsune_optimizer.step()
    kitsune_optimizer.zero_grad()
""",
    (("loss = model(data)", "loss = nn.functional.cross_entropy(model(data), target)"),),  # NO_LOSS
)


def test_the_quick_start():
    found = QUICK_START.run(dataloader=Pairs((8, 1024)))
    assert found["loss"].isfinite()
    assert found["kitsune_optimizer"].report.applied.items() >= {"precision": "bf16", "compile": "default"}.items()


MINIMAL = Block(
    """
import torch
import kitsune

# Your existing model and data
model = YourModel().cuda()
dataloader = YourDataLoader()

# Single-line optimization
optimizer = kitsune.KitsuneOptimizer(
    torch.optim.Adam,
    model.parameters(),
    lr=1e-3
)

# Training loop remains completely unchanged!
for batch in dataloader:
    optimizer.zero_grad()
    loss = model(batch)
    loss.backward()
    optimizer.step()
"""
)


class ReturnsItsLoss(nn.Module):
    """The one kind of model of which `loss = model(batch)` is true."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 10))

    def forward(self, batch):
        x, y = (tensor.to(DEVICE) for tensor in batch)
        return nn.functional.cross_entropy(self.layers(x), y)


def test_the_minimal_example():
    found = MINIMAL.run(YourModel=ReturnsItsLoss, YourDataLoader=lambda: Pairs((16, 20), steps=60))
    assert found["loss"] < 2.3  # ln 10 is where it begins


ADVANCED = Block(
    """
import kitsune

# Fine-tune for your workload
optimizer = kitsune.KitsuneOptimizer(
    torch.optim.AdamW,
    model.parameters(),
    lr=1e-3,
    # Kitsune-specific options
    num_streams=8,              # More streams for complex models
    enable_fusion=True,         # Kernel fusion (requires Triton)
    enable_amp=True,           # Mixed precision training
    memory_pool_size='2GB',    # Preallocate memory pool
    profile=True               # Enable detailed profiling
)
"""
)
STATS = Block(
    """
# Access profiling data
stats = optimizer.get_stats()
print(f"Speedup: {stats.speedup:.2f}x")
print(f"Memory saved: {stats.memory_saved_mb:.1f} MB")
"""
)


def train(model, optimizer, shape, steps=STEPS):
    for x, y in Pairs(shape, steps=steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x.to(DEVICE)), y.to(DEVICE)).backward()
        optimizer.step()


def test_the_advanced_configuration_and_its_statistics(capsys):
    model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 10)).to(DEVICE)
    optimizer = ADVANCED.run(model=model)["optimizer"]
    train(model, optimizer, (16, 20))
    stats = STATS.run(optimizer=optimizer)["stats"]
    assert stats.speedup == pytest.approx(stats.given_ms / stats.planned_ms)
    assert f"Speedup: {stats.speedup:.2f}x" in capsys.readouterr().out


IMAGES = Block(
    """
import torch
import torch.nn as nn
from torchvision import datasets, transforms
import kitsune

# Define model
class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, 1)
        self.conv2 = nn.Conv2d(32, 64, 3, 1)
        self.fc1 = nn.Linear(9216, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x):
        x = torch.relu(self.conv1(x))
        x = torch.relu(self.conv2(x))
        x = torch.max_pool2d(x, 2)
        x = torch.flatten(x, 1)
        x = torch.relu(self.fc1(x))
        return self.fc2(x)

# Setup
model = ConvNet().cuda()
criterion = nn.CrossEntropyLoss()

# Use Kitsune optimizer
optimizer = kitsune.KitsuneOptimizer(
    torch.optim.Adam,
    model.parameters(),
    lr=0.001
)

# Training loop
for epoch in range(10):
    for images, labels in train_loader:
        images, labels = images.cuda(), labels.cuda()

        optimizer.zero_grad()
        outputs = model(images)
        loss = criterion(outputs, labels)
        loss.backward()
        optimizer.step()
""",
    # torchvision is no dependency of ours, and the block makes nothing of what it imports of it.
    (("from torchvision import datasets, transforms\n", ""), ("range(10)", "range(2)")),
)


def test_image_classification():
    found = IMAGES.run(train_loader=Pairs((4, 1, 28, 28), steps=6))
    assert found["loss"].isfinite()


BASIC_USAGE = Block(
    """
import torch
from kitsune import KitsuneOptimizer

# Create base optimizer
base_optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

# Wrap with Kitsune
optimizer = KitsuneOptimizer(
    base_optimizer,
    enable_amp=True,
    enable_fusion=True,
    num_streams=4
)

# Use in training loop
for data, target in train_loader:
    output = model(data)
    loss = criterion(output, target)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
)
CONFIGURATIONS = Block(
    """
from kitsune import KitsuneOptimizer
from kitsune.amp import AMPConfig
from kitsune.fusion import FusionConfig

# Configure AMP
amp_config = AMPConfig(
    dtype=torch.float16,
    growth_interval=2000,
    backoff_factor=0.5
)

# Configure fusion
fusion_config = FusionConfig(
    enable_elementwise=True,
    enable_reduction=True,
    max_fusion_size=8
)

# Create optimizer with custom configs
optimizer = KitsuneOptimizer(
    base_optimizer,
    enable_amp=True,
    amp_config=amp_config,
    enable_fusion=True,
    fusion_config=fusion_config,
    num_streams=6,
    profile=True
)
"""
)
METHODS = Block(
    """
optimizer.step()
optimizer.zero_grad(set_to_none=True)
state = optimizer.state_dict()
optimizer.load_state_dict(state_dict)
optimizer.print_summary()
optimizer.save_profile(filepath='profile.json')
""",
    (("(state_dict)", "(state)"),),  # the print has two names for it
)
PROPERTIES = Block(
    """
base_opt = optimizer.base_optimizer
learning_rate = base_opt.param_groups[0]['lr']

if optimizer.profiler:
    metrics = optimizer.profiler.get_metrics()

scheduler = optimizer.scheduler
num_streams = scheduler.num_streams
"""
)


def test_the_optimizers_own_page(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    model = nn.Linear(20, 10).to(DEVICE)
    loader = [(x.to(DEVICE), y.to(DEVICE)) for x, y in Pairs((16, 20), steps=6)]
    found = BASIC_USAGE.run(model=model, train_loader=loader, criterion=nn.CrossEntropyLoss())
    assert found["optimizer"].report.applied["compile"] == "default"
    found["optimizer"].close()
    optimizer = CONFIGURATIONS.run(base_optimizer=found["base_optimizer"])["optimizer"]
    train(model, optimizer, (16, 20))
    assert optimizer.report.applied["precision"] == "fp16"
    METHODS.run(optimizer=optimizer)
    assert "precision = fp16" in capsys.readouterr().out
    assert (tmp_path / "profile.json").exists()
    found = PROPERTIES.run(optimizer=optimizer)
    assert found["learning_rate"] == 1e-3
    assert len(found["metrics"]["step_ms"]["by the plan"]) >= 5
    assert found["num_streams"] == (6 if DEVICE == "cuda" else 1)


def test_the_documented_arguments_have_the_documented_names():
    model = nn.Linear(2, 1)
    optimizer = KitsuneOptimizer(
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        enable_amp=False,
        enable_fusion=False,
        num_streams=4,
        profile=False,
        amp_config=None,
        fusion_config=None,
        stream_config=None,
        memory_pool_size=512 * 1024 * 1024,
        capture_graph=True,
    )
    optimizer.close()


# Commands


def run(*words: str, **variables: str) -> str:
    """What a command prints. `python` and `pytest` are those of this environment; a word may be a program of lines."""
    programs = {"python": [sys.executable], "pytest": [sys.executable, "-m", "pytest"]}
    done = subprocess.run(
        [*programs[words[0]], *words[1:]],
        cwd=ROOT,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    return done.stdout


CUSTOM_MODEL = """
from tests.benchmarks import run_baseline_benchmark, BenchmarkConfig
from tests.benchmarks.models import create_mlp

model = create_mlp()
config = BenchmarkConfig(batch_size=64, num_iterations=100)
result = run_baseline_benchmark(model, config)
print(result.summary())
"""


@pytest.mark.minutes
def test_custom_model_testing():
    shown = run("python", "-c", CUSTOM_MODEL)
    assert shown.startswith("MLP on ")
    assert "batch 64" in shown


@pytest.mark.minutes
def test_the_quick_benchmark_suite():
    """Changed: one of the three models, since ResNet-18 takes a minute on a CPU; the next test has them all."""
    assert run("python", "-m", "tests.benchmarks.baseline", "--models", "lenet5").startswith("LeNet5 on ")


@pytest.mark.minutes
@pytest.mark.timeout(300)
def test_the_quick_benchmark_suite_as_printed():
    shown = run("python", "-m", "tests.benchmarks.baseline")
    assert [line.split()[0] for line in shown.splitlines()] == ["MLP", "LeNet5", "ResNet"]


@pytest.mark.minutes
def test_benchmarks_only():
    """Changed: `--collect-only`, since the suite itself runs them."""
    shown = run("pytest", "tests/benchmarks/", "-m", "benchmark", "--collect-only", "-q")
    assert "tests/benchmarks/test_baseline.py::test_every_model_is_timed_and_trained[resnet18]" in shown


@pytest.mark.minutes
def test_memory_profiling():
    shown = run("python", "-m", "kitsune.profiler.memory_tracker", "examples/basic_usage.py")
    assert "step   30  loss" in shown
    assert "MiB" in shown.splitlines()[-1]


@pytest.mark.minutes
def test_cuda_debugging():
    """Changed: `your_script.py` is an example of ours."""
    assert "loss" in run("python", "examples/basic_usage.py", "--steps", "3", CUDA_LAUNCH_BLOCKING="1")
