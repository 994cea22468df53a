"""The fingerprint of a step is the same in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

from tests.unit.kitsune.submission.steps import archive_of

PRINTING = """
import sys
from kitsune.submission.exporting.export import to_archive
from tests.unit.kitsune.submission.hf_steps import TRACED_OTHERWISE, bert
from tests.unit.kitsune.submission.steps import FIXED, STEPS, archive_of, lenet, llama, make, mlp, resnet
for name in sys.argv[2:]:
    print(name, to_archive(make(name, seed=int(sys.argv[1]))).fingerprint)
"""


def test_fingerprint_is_the_same_in_another_process_with_other_weights_and_hash_seed():
    names = ["mlp", "llama", "mixed"]
    root = Path(__file__).parents[5]
    done = subprocess.run(
        [sys.executable, "-c", PRINTING, "7", *names], capture_output=True, text=True, check=True, cwd=root,
        env={**os.environ, "PYTHONHASHSEED": "77", "PYTHONPATH": str(root)},
    )  # fmt: skip
    found = dict(line.split() for line in done.stdout.splitlines())
    assert found == {name: archive_of(name).fingerprint for name in names}
