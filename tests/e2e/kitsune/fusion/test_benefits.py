"""The key of what was measured of a kernel is the same in another process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kitsune.fusion.benefits import Benefits
from tests.unit.kitsune.fusion.test_benefits import fused


def key_of_a_norm() -> str:
    """The name of the one file that fusing a layer norm leaves behind."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.cuda.get_device_name", lambda *_: "H1")
        fused(patch, 2.0, 1.0)
    return next(Benefits.of_this_machine().files.folder.iterdir()).name


def test_another_process_comes_to_the_same_key(tmp_path):
    program = "from tests.e2e.kitsune.fusion.test_benefits import key_of_a_norm; print(key_of_a_norm())"
    keys = set()
    for seed in ("1", "2"):
        cache = tmp_path / seed
        environment = {**os.environ, "PYTHONHASHSEED": seed, "TORCHINDUCTOR_CACHE_DIR": str(cache)}
        done = subprocess.run(
            [sys.executable, "-c", program],
            cwd=Path(__file__).parents[4],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        keys.add(done.stdout.strip())
    assert len(keys) == 1
