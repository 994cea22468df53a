"""The wheel holds the four packages and nothing else, and what it asks for is what our scripts install."""

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from email.parser import Parser
from importlib.metadata import version
from pathlib import Path

import pytest

import kitsune

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
CONSTRAINTS = dict(
    line.split("==") for line in (ROOT / "constraints.txt").read_text("utf-8").splitlines() if line and line[0] != "#"
)
PACKAGES = ("kitsune", "tuner", "server", "migrations")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> zipfile.ZipFile:
    """Built from a copy, without network: setuptools is here since torch requires it."""
    folder = tmp_path_factory.mktemp("wheel")
    copy = folder / "source"
    copy.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for name in PACKAGES:
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "tests").mkdir()
    (copy / "tests" / "test_a.py").touch()
    build = "import setuptools.build_meta as b, sys; b.build_wheel(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", build, str(folder)], cwd=copy, capture_output=True, text=True, check=False, timeout=150
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return zipfile.ZipFile(next(folder.glob("*.whl")))


def test_the_wheel_holds_every_source_file_and_nothing_else(wheel):
    ours = {
        path.relative_to(ROOT).as_posix()
        for name in PACKAGES
        for path in (ROOT / name).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    packed = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert packed == ours
    assert {"kitsune/py.typed", "tuner/py.typed", "migrations/env.py", "migrations/script.py.mako"} <= packed


def test_the_wheel_says_who_it_is(wheel):
    name = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = Parser().parsestr(wheel.read(name).decode())
    assert metadata["Name"] == "kitsune-torch"
    assert metadata["Version"] == kitsune.__version__ == version("kitsune-torch")
    assert metadata["License-Expression"] == "MIT"
    entries = wheel.read(name.replace("METADATA", "entry_points.txt")).decode()
    assert "kitsune = kitsune.__main__:main" in entries
    assert "server = server.cli:register" in entries
    assert "tuner = tuner.cli:register" in entries


def requirements() -> list[str]:
    extras = PROJECT["optional-dependencies"]
    return [*PROJECT["dependencies"], *(line for lines in extras.values() for line in lines)]


@pytest.mark.parametrize("line", sorted({line for line in requirements() if not line.startswith("kitsune-torch")}))
def test_every_requirement_is_pinned_for_our_scripts(line):
    name = re.split(r"[\[<>=;]", line)[0].strip()
    pinned = {key.lower().replace("_", "-"): value for key, value in CONSTRAINTS.items()}
    assert name in pinned


def test_torch_is_not_bounded_from_above_and_triton_is_left_to_it():
    base = PROJECT["dependencies"]
    assert "torch>=2.9" in base
    assert not [line for line in base if line.startswith("triton")]


def test_pins_hold_no_build_and_no_place():
    assert all(re.fullmatch(r"[0-9][\w.]*", value) for value in CONSTRAINTS.values())
    assert (CONSTRAINTS["torch"], CONSTRAINTS["triton"]) == ("2.13.0", "3.7.1")
