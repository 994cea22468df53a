"""What a process loads that reads an archive."""

import os
import subprocess
import sys
from pathlib import Path

from tests.unit.kitsune.submission.hostile_archives import GOOD


def test_archives_are_read_without_torch():
    code = (
        "import sys; from pathlib import Path; from kitsune.submission.format.archive import Archive;"
        "a = Archive.from_bytes(Path(sys.argv[1]).read_bytes()); a.fingerprint;"
        "print(sorted(m for m in ('torch', 'numpy') if m in sys.modules))"
    )
    path = Path(os.environ["KITSUNE_HOME"])
    path.mkdir(parents=True)
    (path / "a.ksn").write_bytes(GOOD)
    done = subprocess.run([sys.executable, "-c", code, path / "a.ksn"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
