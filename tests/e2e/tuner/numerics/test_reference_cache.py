"""A process that is killed while it computes a reference does not block another."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.processes import is_gone

HOLDING = """
import sys, time
from pathlib import Path
from types import SimpleNamespace
from tuner.numerics.reference_cache import ReferenceCache
def make():
    print("computing", flush=True)
    time.sleep(60)
ReferenceCache(Path(sys.argv[1]), "d").errors("y", make)
"""


@pytest.mark.minutes
def test_a_process_killed_while_computing_does_not_block_others(tmp_path):
    command = [sys.executable, "-c", HOLDING, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "computing\n"
        waiting = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        time.sleep(1)
        first.kill()
        assert waiting.stdout is not None
        assert waiting.stdout.readline() == "computing\n"
        waiting.kill()
        waiting.communicate()
    assert is_gone(waiting.pid)
    assert not list(Path(tmp_path).glob("*.json"))
