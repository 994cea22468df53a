"""The wheel holds the four packages and nothing else, and what it asks for is what our scripts install."""

import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
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


def build(folder: Path, source: Path, kind: str) -> Path:
    """A "wheel" or "sdist" of a source tree, without network: setuptools is here since torch requires it."""
    code = f"import setuptools.build_meta as b, sys; b.build_{kind}(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)], cwd=source, capture_output=True, text=True, check=False, timeout=150
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return next(folder.glob("*.whl" if kind == "wheel" else "*.tar.gz"))


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A copy of what is packed, with a test beside it that must not be."""
    copy = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for name in PACKAGES:
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "tests").mkdir()
    (copy / "tests" / "test_a.py").touch()
    return copy


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory) -> zipfile.ZipFile:
    return zipfile.ZipFile(build(tmp_path_factory.mktemp("wheel"), source, "wheel"))


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


def test_the_wheel_of_the_sdist_is_the_wheel(wheel, source, tmp_path):
    sdist = build(tmp_path, source, "sdist")
    with tarfile.open(sdist) as packed:
        packed.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    again = zipfile.ZipFile(build(tmp_path, unpacked, "wheel"))
    assert sorted(again.namelist()) == sorted(wheel.namelist())


def test_the_wheel_runs_in_an_empty_environment(wheel, tmp_path):
    """Its requirements are those of this environment, whose own Kitsune is out of sight."""
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv" / "bin" / "python"
    install = ["install", "--quiet", "--no-deps", "--no-index", wheel.filename]
    subprocess.run([sys.executable, "-m", "pip", "--python", python, *install], check=True, timeout=120)
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    here, there = (Path(run(each, "-c", code)) for each in (sys.executable, python))
    (there / "requirements.pth").write_text(f"{here}\n")
    assert Path(run(python, "-c", "import server.app; print(server.app.__file__)")).is_relative_to(there)
    kitsune_command = python.with_name("kitsune")
    assert run(kitsune_command, "--version").startswith(f"kitsune {kitsune.__version__}\n")
    assert {"tune", "serve", "worker"} <= set(run(kitsune_command, "--help").split())


def run(*command: object) -> str:
    """What it prints, in another folder than ours."""
    words = list(map(str, command))
    done = subprocess.run(words, cwd="/", capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()
