"""What is told apart where the winner of a race is kept, and where that is."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from kitsune.compile_cache import compiled_folder, usual_folder
from kitsune.engine.body import Body
from kitsune.engine.cudagraph import StepGraph
from kitsune.engine.dispatch import SegmentedForward
from kitsune.engine.update import Update
from kitsune.engine.winners import FOLDER, Winners, in_words, key_of
from kitsune.graphs import Recorder
from kitsune.tf32 import tf32_products
from tests.unit.engine.steps import CPU, even_us, recorded

IMAGES, KERNELS = torch.randn(2, 4, 8, 8), torch.randn(4, 4, 3, 3)
QUERIES = torch.randn(2, 2, 8, 4)
MATRIX = torch.randn(8, 8)
ALIKE = {
    "shape": (lambda: MATRIX[:4] @ MATRIX, lambda: MATRIX @ MATRIX[:, :4]),
    "dtype": (lambda: MATRIX.half().sin(), lambda: MATRIX.bfloat16().sin()),
    "memory format": (
        lambda: torch.sin(IMAGES).contiguous(),
        lambda: torch.sin(IMAGES.contiguous(memory_format=torch.channels_last)).contiguous(),
    ),
    "number": (lambda: MATRIX * 2.0, lambda: MATRIX * 3.0),
    "dilation": (
        lambda: F.conv2d(IMAGES, KERNELS, padding=1),
        lambda: F.conv2d(IMAGES, KERNELS, padding=2, dilation=2),
    ),
    "mask": (
        lambda: F.scaled_dot_product_attention(QUERIES, QUERIES, QUERIES),
        lambda: F.scaled_dot_product_attention(QUERIES, QUERIES, QUERIES, is_causal=True),
    ),
}


def product():
    return (MATRIX @ MATRIX).relu()


def key(step=product, streams=4, pool_bytes=None):
    return key_of(recorded(step), streams, pool_bytes)


@pytest.mark.parametrize("what", ALIKE)
def test_steps_of_other_launches_have_other_keys(what):
    one, other = ALIKE[what]
    assert key(one) == key(one) != key(other)


def test_so_have_other_limits():
    assert len({key(), key(streams=2), key(pool_bytes=2**24), key(pool_bytes=2**25)}) == 4


def test_another_torch_other_rules_and_another_precision_are_another_race(monkeypatch):
    found = [key()]
    for name, value in (("torch.__version__", "1.0"), ("kitsune.engine.winners.RULES", 0)):
        with monkeypatch.context() as patch:
            patch.setattr(name, value)
            found.append(key())
    with tf32_products():
        found.append(key())
    assert len(set(found)) == 4
    assert key() == found[0]


def test_another_process_comes_to_the_same_key():
    program = "from tests.unit.engine.test_winners import key; print(key())"
    keys = set()
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        root = Path(__file__).parents[3]
        done = subprocess.run(
            [sys.executable, "-c", program], cwd=root, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        keys.add(done.stdout.strip())
    assert len(keys) == 1


def test_what_has_no_lasting_text_is_told_by_its_type():
    assert in_words([torch.Generator(), {"a": (1, None)}]) == "(Generator, (('a', (1, None))))"


def test_it_is_kept_beside_what_torch_has_compiled(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    assert compiled_folder() == tmp_path
    assert Winners.of_this_machine().files.folder == tmp_path / FOLDER
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    assert compiled_folder() == usual_folder()
    assert usual_folder().parent == Path(tempfile.gettempdir())


def planners(monkeypatch, where):
    made = []

    def planner(*arguments):
        made.append(arguments)
        raise RuntimeError("that is all")

    monkeypatch.setattr(f"kitsune.engine.{where}.Planner", planner)
    return made


@pytest.mark.parametrize("where", ["cudagraph", "dispatch"])
def test_a_training_asks_for_it(monkeypatch, where):
    monkeypatch.setattr("kitsune.engine.planned.measured_us", even_us)
    made = planners(monkeypatch, where)
    model = torch.nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    body = Body(model, lambda x, y: F.mse_loss(model(x), y), Update(optimizer))
    step = StepGraph(body, Recorder(CPU), CPU, None, 3)
    forward = SegmentedForward(model, optimizer, model, model, CPU, capture=True, streams=3)

    def train():
        for _ in range(6):
            x, y = torch.randn(2, 8), torch.randn(2, 4)
            if where == "cudagraph":
                step((x, y))
            else:
                optimizer.zero_grad()
                F.mse_loss(forward(x), y).backward()
                optimizer.step()

    with pytest.raises(RuntimeError, match="that is all"):
        train()
    assert made[0][3] == Winners.of_this_machine()
