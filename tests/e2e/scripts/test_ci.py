"""What `.ci/run` makes of tests that fail: in a folder with tests of its own, and nothing else to check."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
#: Passes from its second run on.
FLAKY = """
from pathlib import Path
import pytest

@pytest.mark.parametrize("number", range({count}))
def test_flaky(number):
    seen = Path(f"seen{{number}}")
    was_there = seen.exists()
    seen.touch()
    assert was_there
"""


@pytest.fixture
def checkout(tmp_path):
    """`.ci/run` with a `scripts/test` that is pytest alone."""
    (tmp_path / "scripts").mkdir()
    for name, text in (
        ("browser", ""),
        ("check", ""),
        ("test", f'exec {sys.executable} -m pytest -q -p xdist -n 2 --dist loadfile "$@"'),
    ):
        script = tmp_path / "scripts" / name
        script.write_text(f"#!/usr/bin/env bash\n{text}\n")
        script.chmod(0o755)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci")
    (tmp_path / "test_fine.py").write_text("def test_fine():\n    assert True\n")
    return tmp_path


def ci(checkout: Path) -> tuple[int, str]:
    command, quick = checkout / ".ci" / "run", {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run([command], env=quick, capture_output=True, text=True, check=False, timeout=150)
    return done.returncode, done.stdout


def test_without_its_browser_it_fails_before_the_tests(checkout):
    (checkout / "scripts" / "browser").write_text("#!/usr/bin/env bash\nsleep 0.2; exit 7\n")
    code, said = ci(checkout)
    assert (code, said) == (7, "")


def test_what_passes_is_run_once(checkout):
    code, said = ci(checkout)
    assert code == 0
    assert "alone" not in said


def test_what_fails_once_is_named(checkout):
    (checkout / "test_flaky.py").write_text(FLAKY.format(count=2))
    code, said = ci(checkout)
    assert code == 0
    assert "2 failed, 1 passed" in said
    assert "2 passed" in said
    assert said.splitlines()[-2:] == ["test_flaky.py::test_flaky[0]", "test_flaky.py::test_flaky[1]"]


def test_what_fails_twice_fails(checkout):
    (checkout / "test_flaky.py").write_text(FLAKY.format(count=1))
    (checkout / "test_broken.py").write_text("def test_broken():\n    assert not 'the reason'\n")
    code, said = ci(checkout)
    assert code == 1
    assert "2 failed, 1 passed" in said
    assert "1 failed, 1 passed" in said
    assert "passed alone" not in said


def test_many_that_fail_are_no_accident(checkout):
    (checkout / "test_flaky.py").write_text(FLAKY.format(count=6))
    code, said = ci(checkout)
    assert code == 1
    assert "6 failed" in said
    assert "6 passed" not in said


def test_what_is_no_failed_test_fails_at_once(checkout):
    (checkout / "test_broken.py").write_text("import nowhere_to_be_found\n")
    code, said = ci(checkout)
    assert code != 0
    assert "passed alone" not in said
