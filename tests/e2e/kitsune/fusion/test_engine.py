"""Fusion in a process that has no Triton."""

import subprocess
import sys


def test_without_triton_the_error_says_what_to_install():
    code = """
import sys
sys.modules["triton"] = None
import kitsune.fusion
from kitsune.errors import UnfitError
kitsune.fusion.FusionConfig()
try:
    kitsune.fusion.FusionEngine
except UnfitError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=150, check=True)
    assert done.stdout == "this needs triton, which is not installed; pip install 'kitsune-torch[triton]'\n"
