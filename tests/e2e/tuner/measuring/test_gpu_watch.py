"""Which processes belong to the family of a measuring process."""

import subprocess
import sys

NIECE = """
import os, subprocess, sys
from tuner.measuring.gpu_watch import family
aunt = subprocess.Popen(["sh", "-c", "sleep 60 & echo $!; wait"], stdout=subprocess.PIPE, text=True)
niece = int(aunt.stdout.readline())
script = "import sys; from tuner.measuring.gpu_watch import family; print(*family())"
found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
print({os.getpid(), aunt.pid, niece} <= set(map(int, found)), os.getppid() in map(int, found))
os.kill(niece, 9)
aunt.wait()
"""


def test_descendants_of_other_children_belong_to_the_family():
    done = subprocess.run([sys.executable, "-c", NIECE], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == ["True", "False"], "and what started the parent is none of them"
