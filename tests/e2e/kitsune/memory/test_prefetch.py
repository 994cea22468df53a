"""A process ends although its loader blocks."""

import subprocess
import sys

import pytest


@pytest.mark.minutes
def test_a_loader_that_blocks_does_not_hold_up_the_end_of_the_process():
    code = (
        "import threading\n"
        "from kitsune.memory import Prefetcher\n"
        "def loader():\n"
        "    yield 0\n"
        "    threading.Event().wait()\n"
        "batches = iter(Prefetcher('cpu').wrap(loader()))\n"
        "print(next(batches))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=150, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "0\n", "")
