"""What a freeze of the garbage collector hides, in a process of its own."""

import subprocess
import sys

FREEZES = """
import gc, torch
from kitsune.launches.recording.copy_on_write import are_hidden
old = torch.zeros(2)
print(are_hidden([old]))
gc.freeze()
print(are_hidden([old]), are_hidden([torch.zeros(2)]))
"""


def test_a_freeze_hides_what_was_made_before_it():
    done = subprocess.run([sys.executable, "-c", FREEZES], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True", "False"]
