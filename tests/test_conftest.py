"""The rules of tests/conftest.py, on a small folder of tests of its own."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).parent / "conftest.py"
FILES = {
    "test_skips.py": "import pytest\ndef test_a():\n    pytest.skip('no database')\n",
    "test_lacks.py": "import pytest\npytest.importorskip('no_such_package')\ndef test_b():\n    pass\n",
    "test_known.py": "import pytest\n@pytest.mark.xfail\ndef test_c():\n    assert False\n",
    "gpu/test_gpu.py": "import pytest\ndef test_d():\n    pytest.skip('no GPU')\n",
    "test_home.py": (
        "import os\n"
        "def test_e():\n"
        "    assert os.environ['KITSUNE_HOME'] != 'mine'\n"
        "    assert 'KITSUNE_DISABLE' not in os.environ\n"
    ),
}


@pytest.fixture
def results(tmp_path):
    """Runs the folder with or without CI and returns pytest's summary lines."""
    tests = tmp_path / "tests"
    for name, text in FILES.items():
        (tests / name).parent.mkdir(parents=True, exist_ok=True)
        (tests / name).write_text(text)
    shutil.copy(CONFTEST, tests)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu\naddopts = -ra -p no:cacheprovider\n")

    def run(ci: str) -> str:
        environment = {**os.environ, "CI": ci, "KITSUNE_HOME": "mine", "KITSUNE_DISABLE": "1"}
        command = [sys.executable, "-m", "pytest", "--continue-on-collection-errors", "tests"]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=150
        )
        return done.stdout

    return run


def test_in_ci_only_gpu_tests_may_be_skipped(results):
    said = results("true")
    assert "FAILED tests/test_skips.py" in said
    assert "ERROR tests/test_lacks.py" in said
    assert "no database" in said
    assert "SKIPPED [1] tests/gpu/test_gpu.py" in said or "SKIPPED [1] tests/conftest.py" in said
    assert "XFAIL tests/test_known.py" in said


@pytest.mark.parametrize("ci", ["", "false"])
def test_elsewhere_a_test_may_skip_itself(results, ci):
    said = results(ci)
    assert "FAILED" not in said
    assert "ERROR" not in said
    assert "1 passed, 3 skipped, 1 xfailed" in said
