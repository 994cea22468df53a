"""Bytecode that a measuring process writes where the installed packages have none."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.tuner.measuring.test_bytecode import bare, no_prefix  # noqa: F401
from tuner.measuring.bytecode import FOLDER, bytecode_variables


def test_processes_find_bytecode_where_python_may_not_write_it(
    bare: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    variables = bytecode_variables(tmp_path, is_confined=False)
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(bare.parents[1]), **variables}
    subprocess.run([sys.executable, "-P", "-c", "import bare_package"], env=environment, check=True)
    written = list((tmp_path / FOLDER).rglob("__init__*.pyc"))
    assert any("bare_package" in str(path) for path in written)
    assert not list(bare.parent.rglob("*.pyc"))
