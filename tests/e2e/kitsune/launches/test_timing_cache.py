"""The key of a step is the same in another process."""

import os
import subprocess
import sys
from pathlib import Path


def test_another_process_comes_to_the_same_key():
    program = "from tests.unit.kitsune.launches.test_timing_cache import key; print(key())"
    keys = set()
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        root = Path(__file__).parents[4]
        done = subprocess.run(
            [sys.executable, "-c", program], cwd=root, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        keys.add(done.stdout.strip())
    assert len(keys) == 1
