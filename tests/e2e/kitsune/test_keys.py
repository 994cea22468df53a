"""What one process keeps on disk is found by the next one: its keys do not depend on the seed of hashes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch import nn
from torch._dynamo.utils import counters

from kitsune.fusion import benefit
from kitsune.fusion.benefits import Benefits
from tests.unit.kitsune.fusion.fused import ROWS, Activated, Norm, engine, step
from tests.unit.kitsune.fusion.test_benefits import fused
from tests.unit.kitsune.launches.test_timing_cache import key

ROOT = Path(__file__).parents[3]


def hits_of_compiled_code() -> int:
    """How often AOTAutograd's cache was hit by a model with several calls of ours."""
    fusing, model = engine(compiler="inductor"), nn.Sequential(Norm(), Activated())
    with pytest.MonkeyPatch.context() as patch:  # it would compile every call by itself, twice
        patch.setattr(benefit, "measure", lambda *_: benefit.Benefit(2.0, 1.0))
        counters.clear()
        step(fusing.fuse(model), list(model.parameters()), ROWS)
    assert len(fusing.get_fusion_stats().matches) == 2
    return counters["aot_autograd"]["autograd_cache_hit"]


def key_of_a_norm(folder: str) -> str:
    """The name of the one file that measuring a layer norm leaves behind."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", folder)
        patch.setattr("torch.cuda.get_device_name", lambda *_: "H1")
        fused(patch, 2.0, 1.0)
        return next(Benefits.of_this_machine().files.folder.iterdir()).name


def told(folder: str) -> str:
    return json.dumps({"hits": hits_of_compiled_code(), "benefit": key_of_a_norm(folder), "timing": repr(key())})


@pytest.mark.minutes
def test_another_process_comes_to_the_same_keys(tmp_path):
    found = []
    for seed in ("1", "2"):
        program = f"from tests.e2e.kitsune.test_keys import told; print(told({str(tmp_path / seed)!r}))"
        environment = {**os.environ, "PYTHONHASHSEED": seed, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "compiled")}
        done = subprocess.run(
            [sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout.splitlines()[-1]))
    first, second = found
    assert (first.pop("hits"), second.pop("hits")) == (0, 1)
    assert first == second
