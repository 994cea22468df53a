"""Bytecode for measuring processes where the installed packages have none."""

import importlib.util
import sys
from pathlib import Path

import pytest

from tuner.measuring import bytecode
from tuner.measuring.bytecode import bytecode_variables, lacks_bytecode, module_of


@pytest.fixture(autouse=True)
def no_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.pycache_prefix", None)


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package without bytecode, in place of torch, on a disk with room."""
    module = tmp_path / "site" / "bare_package" / "__init__.py"
    module.parent.mkdir(parents=True)
    module.write_text("ANSWER = 42\n")
    monkeypatch.setattr(bytecode, "PACKAGE", "bare_package")
    monkeypatch.setattr(bytecode, "MIN_FREE_BYTES", 0)
    monkeypatch.syspath_prepend(tmp_path / "site")
    return module


def test_a_module_without_loading_it() -> None:
    assert module_of("not_installed_anywhere") is None
    found = module_of("this")
    assert found is not None
    assert found.name == "this.py"
    assert "this" not in sys.modules


def test_what_comes_with_bytecode_is_left_alone(bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    cached = Path(importlib.util.cache_from_source(bare))
    cached.parent.mkdir()
    cached.touch()
    assert not bytecode_variables(tmp_path, is_confined=False)


def test_python_may_write_it_beside_the_modules(bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.dont_write_bytecode", False)
    assert not bytecode_variables(tmp_path, is_confined=False)
    monkeypatch.setattr("os.access", lambda *_: False)
    assert bytecode_variables(tmp_path, is_confined=False)


def test_a_cache_prefix_set_by_the_user_is_kept(bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    monkeypatch.setattr("sys.pycache_prefix", str(tmp_path))
    assert not bytecode_variables(tmp_path, is_confined=False)


def test_confined_processes_have_a_folder_of_their_own(
    bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    found = {bytecode_variables(tmp_path, is_confined=given)["PYTHONPYCACHEPREFIX"] for given in (False, True)}
    assert len(found) == 2


def test_a_folder_that_is_not_there_yet_is_made_by_python(
    bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    assert bytecode_variables(tmp_path / "not" / "yet", is_confined=False)


def test_no_bytecode_is_written_when_disk_space_is_short(
    bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    monkeypatch.setattr(bytecode, "MIN_FREE_BYTES", 2**60)
    assert lacks_bytecode(bare)
    assert not bytecode_variables(tmp_path, is_confined=False)
