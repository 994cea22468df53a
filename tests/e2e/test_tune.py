"""Live models tuned by real children on the CPU; which configuration wins is not asked."""

import copy
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import kitsune
from kitsune.errors import BaselineError
from kitsune.plan import Plan
from tests.processes import children
from tuner.api import tune_workload
from tuner.records import RunStatus, Source
from tuner.statistics.block_statistics import samples_digest
from tuner.statistics.process_statistics import PROCESSES
from tuner.store.engine import open_database
from tuner.store.queries import runs, trials
from tuner.tuning.events import Inspected

Live = tuple[nn.Module, Callable[..., torch.Tensor], torch.optim.Optimizer, tuple[Any, Any]]


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which this process makes temporary files."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def left_in(folder: Path) -> list[str]:
    """What of ours lies there; torch makes a folder of its own the first time that it exports."""
    return [path.name for path in folder.iterdir() if not path.name.startswith("torchinductor")]


def cnn() -> Live:
    """BatchNorm in train mode, but for one that is frozen; SGD with momentum."""
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.Flatten()
    )
    model.append(nn.Linear(8 * 4 * 4, 5))
    model[4].eval().requires_grad_(False)
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.01, momentum=0.9)
    return model, nn.functional.cross_entropy, optimizer, (torch.randn(8, 3, 8, 8), torch.randint(5, (8,)))


class Transformer(nn.Module):
    """Two layers with dropout, which return their loss themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(16, 20, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.layers(self.embedding(ids)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def transformer() -> Live:
    model = Transformer()
    ids = torch.randint(20, (4, 8))
    batch = {"ids": ids, "labels": ids.roll(-1, 1)}, None
    return model, None, torch.optim.AdamW(model.parameters(), lr=1e-3), batch


def everything(live: Live) -> dict[str, Any]:
    """What tuning must leave as it was."""
    model, _, optimizer, batch = live
    return copy.deepcopy(
        {
            "state": model.state_dict(),
            "gradients": {name: parameter.grad for name, parameter in model.named_parameters()},
            "modes": [module.training for module in model.modules()],
            "trained": [parameter.requires_grad for parameter in model.parameters()],
            "optimizer": optimizer.state_dict(),
            "batch": batch,
            "torch": torch.get_rng_state(),
            "python": random.getstate(),
            "numpy": np.random.get_state(),
            "threads": torch.get_num_threads(),
            "matmul": torch.get_float32_matmul_precision(),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "dtype": torch.get_default_dtype(),
            "grad": torch.is_grad_enabled(),
        }
    )


def differences(one: Any, other: Any) -> list[str]:
    """Where two trees are not equal to the bit."""
    (leaves, tree), (others, other_tree) = (pytree.tree_flatten_with_path(value) for value in (one, other))
    if tree != other_tree:
        return ["structure"]
    return [pytree.keystr(path) for (path, a), (_, b) in zip(leaves, others, strict=True) if not is_same(a, b)]


def is_same(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return np.array_equal(one, other) if isinstance(one, np.ndarray) else one == other


def test_differences_are_found():
    live = cnn()
    before = everything(live)
    assert differences(everything(live), before) == []
    live[0][1].running_mean += 1e-7
    live[0][4].train()
    torch.rand(1)
    assert differences(everything(live), before) == ["['state']['1.running_mean']", "['modes'][5]", "['torch']"]


@pytest.mark.timeout(400)
@pytest.mark.minutes
@pytest.mark.parametrize("make", [cnn, transformer])
def test_a_live_model_is_tuned_and_stays_as_it_was(make, tmp_path, temporary, monkeypatch):
    """The transformer without a C++ compiler: where its winner compiles, five processes and the proof take minutes."""
    if make is transformer:
        monkeypatch.setenv("CXX", "/no/compiler")
    check_tuned(make, tmp_path, temporary)


@pytest.mark.minutes
@pytest.mark.timeout(600)
def test_a_live_transformer_is_compiled_tuned_and_stays_as_it_was(tmp_path, temporary):
    check_tuned(transformer, tmp_path, temporary)


def check_tuned(make: Callable[[], Live], tmp_path: Path, temporary: Path) -> None:
    torch.manual_seed(0)
    live = make()
    model, loss_fn, optimizer, (x, y) = live
    (model(**x) if loss_fn is None else loss_fn(model(x), y)).backward()
    optimizer.step()
    before, running = everything(live), children()

    url = f"sqlite:///{tmp_path}/k.db"
    plan = kitsune.tune(model, loss_fn, optimizer, (x, y), trials=2, database=url)

    assert differences(everything(live), before) == []
    assert children() == running
    assert left_in(temporary) == []
    assert Plan.from_json(plan.to_json()) == plan
    with open_database(url) as database, database.read() as connection:
        (run,) = runs.page(connection).runs
        tried = trials.list_of(connection, run.id)
    assert (run.status, run.plan_id, run.workload) == (RunStatus.FINISHED, plan.plan_id, runs.LIVE)
    assert [trial.source for trial in tried[:2]] == [Source.BASELINE, Source.STOCK]
    confirmed = [trial for trial in tried if trial.source is Source.CONFIRM]
    of_plan = [trial.measurement for trial in confirmed if trial.knobs == confirmed[-1].knobs]
    assert len(of_plan) == PROCESSES
    assert plan.evidence.samples_sha256 == samples_digest(of_plan)
    assert not run.fingerprint.startswith("local-")

    step = kitsune.TrainStep(model, loss_fn, optimizer, plan)
    assert torch.isfinite(step(x, y))


RAISES = """
import torch
from kitsune import Workload


def make_workload():
    class Model(torch.nn.Linear):
        def forward(self, x):
            raise ValueError("no such luck")

    model = Model(4, 2)
    batch = torch.randn(8, 4), torch.randn(8, 2)
    return Workload(model, torch.nn.functional.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1), batch)
"""


@pytest.mark.minutes  # test_cli.py has it by the command line
def test_a_workload_that_fails_as_given_is_stored_with_its_reason(tmp_path):
    file = tmp_path / "train.py"
    file.write_text(RAISES)
    url = f"sqlite:///{tmp_path}/k.db"
    with pytest.raises(BaselineError, match="ValueError: no such luck"):
        tune_workload(f"{file}:make_workload", device="cpu", trials=2, database=url)
    with open_database(url) as database, database.read() as connection:
        (run,) = runs.page(connection).runs
    assert run.status is RunStatus.FAILED
    assert "no such luck" in str(run.error)


def test_an_error_in_the_middle_leaves_no_child_behind(tmp_path):
    running = children()

    def tell(event: object) -> None:
        if isinstance(event, Inspected):
            raise BrokenPipeError("nobody listens")

    with pytest.raises(BrokenPipeError):
        tune_workload("zoo:mlp?size=tiny", device="cpu", database=f"sqlite:///{tmp_path}/k.db", tell=tell)
    assert children() == running
