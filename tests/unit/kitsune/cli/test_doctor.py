"""Answers of each check, forced."""

import os
import shutil
import sqlite3
import subprocess
import sys
import warnings
from types import SimpleNamespace

import pytest

from kitsune.cli import doctor
from kitsune.cli.doctor import Status
from kitsune.errors import SchemaError
from tuner.store import migrate
from tuner.store.engine import open_database
from tuner.store.tables import VERSION_TABLE


def torch_like(release: str, cuda: str | None = None, **gpu: object) -> SimpleNamespace:
    return SimpleNamespace(__version__=release, version=SimpleNamespace(cuda=cuda), cuda=SimpleNamespace(**gpu))


def load_only(monkeypatch, **modules: object) -> None:
    monkeypatch.setattr(doctor, "_load", modules.get)


def with_driver(monkeypatch, tmp_path) -> None:
    (tmp_path / "version").write_text("NVRM version")
    monkeypatch.setattr(doctor, "NVIDIA_SIGNS", [tmp_path / "none", tmp_path / "version"])


def without_driver(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(doctor, "NVIDIA_SIGNS", [tmp_path / "none"])


def test_a_newer_python_is_named_untested(monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 99, 0))
    assert doctor.check_python().status == Status.WARN


def test_the_off_switch_is_seen(monkeypatch):
    assert doctor.check_settings().status == Status.OK
    monkeypatch.setenv("KITSUNE_DISABLE", "1")
    check = doctor.check_settings()
    assert check.status == Status.WARN
    assert "KITSUNE_DISABLE" in check.detail


def test_a_setting_without_sense_is_named(monkeypatch):
    monkeypatch.setenv("KITSUNE_DISABLE", "perhaps")
    check = doctor.check_settings()
    assert check.status == Status.FAIL
    assert "KITSUNE_DISABLE" in check.detail
    assert doctor.check_home().status == Status.WARN
    assert doctor.check_database().status == Status.WARN


@pytest.mark.parametrize(
    ("release", "status"),
    [
        ("2.8.1", Status.FAIL),
        ("1.13.0+cu117", Status.FAIL),
        ("2.9.0", Status.OK),
        ("2.13.0+cpu", Status.OK),
        ("2.14.0.dev20270101", Status.WARN),
        ("3.0.0", Status.WARN),
        ("unknown", Status.FAIL),
    ],
)
def test_the_torch_version_is_judged(monkeypatch, release, status):
    load_only(monkeypatch, torch=torch_like(release))
    check = doctor.check_torch()
    assert check.status == status
    assert release in check.detail


def test_missing_torch_fails_and_the_gpu_is_not_guessed(monkeypatch):
    load_only(monkeypatch)
    assert doctor.check_torch().status == Status.FAIL
    assert doctor.check_gpu().status == Status.WARN


def test_a_package_whose_libraries_do_not_load_counts_as_missing(monkeypatch, tmp_path):
    (tmp_path / "broken_extra.py").write_text("raise OSError('libcuda.so.1: cannot open shared object file')")
    monkeypatch.syspath_prepend(tmp_path)
    assert doctor._load("broken_extra") is None
    assert doctor._load("no_such_package") is None


def test_no_gpu_is_a_warning(monkeypatch, tmp_path):
    without_driver(monkeypatch, tmp_path)
    load_only(monkeypatch, torch=torch_like("2.13.0", is_available=lambda: False))
    assert doctor.check_gpu().status == Status.WARN


def test_a_gpu_that_torch_cannot_see_is_a_failure_with_torchs_reason(monkeypatch, tmp_path):
    def is_available() -> bool:
        warnings.warn("CUDA initialization: the driver is too old", UserWarning, stacklevel=1)
        return False

    with_driver(monkeypatch, tmp_path)
    load_only(monkeypatch, torch=torch_like("2.13.0", "13.0", is_available=is_available))
    check = doctor.check_gpu()
    assert check.status == Status.FAIL
    assert "the driver is too old" in check.detail


def test_every_gpu_is_described(monkeypatch):
    load_only(monkeypatch, torch=torch_like("2.13.0", "13.0", is_available=lambda: True, device_count=lambda: 2))
    monkeypatch.setattr(doctor, "_describe_gpu", lambda index: f"GPU {index}")
    check = doctor.check_gpu()
    assert check.status == Status.OK
    assert check.detail == "GPU 0; GPU 1"


class Nvml:
    """The part of nvidia-ml-py that the doctor uses, for one GPU."""

    NVMLError = type("NVMLError", (Exception,), {})

    def __init__(self, *pids: int, error: str = "") -> None:
        self.pids = pids
        self.error = error
        self.is_open = False

    def nvmlInit(self) -> None:
        if self.error:
            raise self.NVMLError(self.error)
        self.is_open = True

    def nvmlShutdown(self) -> None:
        self.is_open = False

    def nvmlDeviceGetCount(self) -> int:
        return 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetComputeRunningProcesses(self, gpu: int) -> list[SimpleNamespace]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=512 * 1024**2) for pid in self.pids]


def test_others_on_the_gpu_are_named(monkeypatch, tmp_path):
    with_driver(monkeypatch, tmp_path)
    nvml = Nvml(os.getpid(), 999_999_999)
    load_only(monkeypatch, pynvml=nvml)
    check = doctor.check_gpu_processes()
    assert check.status == Status.WARN
    assert check.detail == "in use by others: GPU 0 process 999999999 (512 MiB)"
    assert not nvml.is_open


def test_our_own_process_does_not_count(monkeypatch, tmp_path):
    with_driver(monkeypatch, tmp_path)
    load_only(monkeypatch, pynvml=Nvml(os.getpid()))
    assert doctor.check_gpu_processes().status == Status.OK


def test_gpu_processes_that_cannot_be_seen_are_said_to_be_so(monkeypatch, tmp_path):
    with_driver(monkeypatch, tmp_path)
    load_only(monkeypatch)
    assert "nvidia-ml-py" in doctor.check_gpu_processes().fix
    load_only(monkeypatch, pynvml=Nvml(error="Insufficient Permissions"))
    check = doctor.check_gpu_processes()
    assert check.status == Status.WARN
    assert "Insufficient Permissions" in check.detail
    without_driver(monkeypatch, tmp_path)
    assert doctor.check_gpu_processes().status == Status.OK


@pytest.mark.parametrize(
    ("requirements", "installed", "status"),
    [
        (["filelock"], "", Status.OK),
        (["filelock"], "3.7.1", Status.OK),
        (['triton==3.7.1; platform_system == "Linux"'], "3.7.1", Status.OK),
        (['triton==3.7.1; platform_system == "Linux"'], "3.7.0", Status.OK),
        (['triton==3.7.1; platform_system == "Linux"'], "3.9.0", Status.WARN),
        (['triton==3.7.1; platform_system == "Linux"'], "", Status.FAIL),
    ],
)
def test_triton_is_the_pair_that_torch_names(monkeypatch, requirements, installed, status):
    monkeypatch.setattr(doctor, "_requirements_of_torch", lambda: requirements)
    monkeypatch.setattr(doctor, "installed_version", {"triton": installed}.__getitem__)
    check = doctor.check_triton()
    assert check.status == status
    assert status == Status.OK or check.fix == "pip install triton==3.7.1"


@pytest.mark.parametrize(
    ("there", "missing"),
    [
        ({}, ["C++ compiler", "C compiler"]),
        ({"g++": "/usr/bin/g++"}, ["C compiler"]),
        ({"clang": "/usr/bin/clang"}, ["C++ compiler"]),
        ({"clang": "/usr/bin/clang", "g++": "/usr/bin/g++"}, []),
    ],
)
def test_missing_compilers_are_named(monkeypatch, tmp_path, there, missing):
    (tmp_path / "Python.h").touch()
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(shutil, "which", there.get)
    monkeypatch.setattr(doctor.sysconfig, "get_path", {"include": str(tmp_path)}.__getitem__)
    check = doctor.check_compiler()
    assert check.status == (Status.WARN if missing else Status.OK)
    assert [what for what in ("C++ compiler", "C compiler") if f"a {what} (" in check.detail] == missing


def test_the_compilers_that_the_user_chose_are_asked_for(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    check = doctor.check_compiler()
    assert check.status == Status.WARN
    assert "C++ compiler" in check.detail


def test_missing_python_headers_are_named(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor.sysconfig, "get_path", {"include": str(tmp_path)}.__getitem__)
    check = doctor.check_compiler()
    assert check.status == Status.WARN
    assert str(tmp_path / "Python.h") in check.detail


def test_a_home_that_is_not_there_yet_is_fine_and_not_made(kitsune_home):
    check = doctor.check_home()
    assert check.status == Status.OK
    assert str(kitsune_home) in check.detail
    assert not kitsune_home.exists()


def test_a_home_inside_a_file_cannot_be_written(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("KITSUNE_HOME", str(tmp_path / "file" / "home"))
    check = doctor.check_home()
    assert check.status == Status.FAIL
    assert "KITSUNE_HOME" in check.fix


def test_a_read_only_home_cannot_be_written(monkeypatch, tmp_path):
    def refuse(**options: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(doctor.tempfile, "TemporaryFile", refuse)  # root may write anywhere, so it is acted
    check = doctor.check_home()
    assert check.status == Status.FAIL
    assert "Permission denied" in check.detail


def test_a_nearly_full_disk_is_a_warning(monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1024**3))
    check = doctor.check_home()
    assert check.status == Status.WARN
    assert "1.0 GiB free" in check.detail


@pytest.mark.parametrize(
    ("found", "status"),
    [((3, 40, 1), Status.WARN), ((3, 51, 2), Status.WARN), ((3, 51, 3), Status.OK), ((3, 53, 0), Status.OK)],
)
def test_sqlite_with_the_wal_reset_bug_is_a_warning(monkeypatch, found, status):
    monkeypatch.setattr(sqlite3, "sqlite_version_info", found)
    assert doctor.check_sqlite().status == status


def test_missing_extras_are_named(monkeypatch):
    monkeypatch.setattr(doctor, "TUNER_PACKAGES", ("sqlalchemy", "no_such_package"))
    check = doctor.check_tuner()
    assert check.status == Status.WARN
    assert check.detail.endswith("missing: no_such_package")
    assert "kitsune-torch[tuner]" in check.fix


def test_a_database_that_answers(monkeypatch, tmp_path):
    sqlite3.connect(tmp_path / "runs.db").close()
    monkeypatch.setenv("KITSUNE_DATABASE_URL", f"sqlite:///{tmp_path}/runs.db")
    check = doctor.check_database()
    assert check.status == Status.OK
    assert check.detail.endswith("answers, and is empty")


def test_a_database_of_this_version_answers(monkeypatch, tmp_path):
    url = f"sqlite:///{tmp_path}/runs.db"
    monkeypatch.setenv("KITSUNE_DATABASE_URL", url)
    open_database(url).engine.dispose()
    check = doctor.check_database()
    assert check.status == Status.OK
    assert check.detail.endswith("answers")


def test_a_database_of_another_version_is_said_to_be_so(monkeypatch, tmp_path):
    url = f"sqlite:///{tmp_path}/runs.db"
    monkeypatch.setenv("KITSUNE_DATABASE_URL", url)
    open_database(url).engine.dispose()
    with sqlite3.connect(tmp_path / "runs.db") as connection:
        connection.execute(f"UPDATE {VERSION_TABLE} SET version_num = '9999'")
    connection.close()
    with pytest.raises(SchemaError) as refused:  # as every command does
        open_database(url)
    check = doctor.check_database()
    assert (check.status, check.detail) == (Status.FAIL, str(refused.value))


def test_an_older_database_is_no_failure(monkeypatch, tmp_path):
    url = f"sqlite:///{tmp_path}/runs.db"
    monkeypatch.setenv("KITSUNE_DATABASE_URL", url)
    open_database(url).engine.dispose()
    monkeypatch.setattr(migrate, "SCHEMA_REVISION", "the next one")
    check = doctor.check_database()
    assert check.status == Status.WARN
    assert "this version writes the next one" in check.detail


def test_a_database_whose_tables_are_another_s_is_a_failure(monkeypatch, tmp_path):
    with sqlite3.connect(tmp_path / "runs.db") as connection:
        connection.execute("CREATE TABLE kitsune_runs (distance REAL)")
    connection.close()
    monkeypatch.setenv("KITSUNE_DATABASE_URL", f"sqlite:///{tmp_path}/runs.db")
    check = doctor.check_database()
    assert check.status == Status.FAIL
    assert "something else made them" in check.detail


def test_a_database_that_cannot_be_made_where_it_would_be(monkeypatch):
    monkeypatch.setenv("KITSUNE_HOME", "/proc/foo")
    check = doctor.check_database()
    assert check.status == Status.FAIL
    assert "/proc cannot be written" in check.detail


def test_a_database_file_that_is_not_there_yet_is_not_made(monkeypatch, tmp_path):
    monkeypatch.setenv("KITSUNE_DATABASE_URL", f"sqlite:///{tmp_path}/runs.db")
    assert doctor.check_database().status == Status.OK
    assert not (tmp_path / "runs.db").exists()


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("postgresql://someone:hunter2@127.0.0.1:1/runs", "postgresql+psycopg://127.0.0.1:1/runs"),
        ("nodatabase://someone:hunter2@127.0.0.1/runs", "cannot begin with nodatabase"),
        ("someone:hunter2", "cannot be read"),
    ],
)
def test_a_database_that_does_not_answer(monkeypatch, url, reason):
    monkeypatch.setenv("KITSUNE_DATABASE_URL", url)
    check = doctor.check_database()
    assert reason in check.detail
    assert "hunter2" not in check.canonical_json()
    assert check.status == Status.FAIL


def test_a_file_that_is_no_database_does_not_answer(monkeypatch, tmp_path):
    (tmp_path / "runs.db").write_text("not a database, but long enough to have a header of one hundred bytes " * 4)
    monkeypatch.setenv("KITSUNE_DATABASE_URL", f"sqlite:///{tmp_path}/runs.db")
    check = doctor.check_database()
    assert check.status == Status.FAIL


def test_a_database_cannot_be_asked_without_sqlalchemy(monkeypatch):
    monkeypatch.setenv("KITSUNE_DATABASE_URL", "sqlite:///runs.db")
    load_only(monkeypatch)
    assert doctor.check_database().status == Status.WARN


@pytest.mark.parametrize(
    "error",
    [
        PermissionError(1, "Operation not permitted"),
        subprocess.TimeoutExpired("python", doctor.SPAWN_TIMEOUT_S),
        subprocess.CalledProcessError(-9, "python"),
    ],
)
def test_children_that_do_not_start_are_a_failure(monkeypatch, error):
    def run(*args: object, **options: object) -> None:
        raise error

    monkeypatch.setattr(subprocess, "run", run)
    check = doctor.check_spawn()
    assert check.status == Status.FAIL
    assert "did not start" in check.detail


def test_a_confinement_that_is_switched_off_or_makes_no_sense_is_seen(monkeypatch):
    monkeypatch.setenv("KITSUNE_CONFINE", "off")
    check = doctor.check_confinement()
    assert check.status == Status.WARN
    assert "KITSUNE_CONFINE is off" in check.detail and "unset KITSUNE_CONFINE" in check.fix
    monkeypatch.setenv("KITSUNE_CONFINE", "perhaps")
    check = doctor.check_confinement()
    assert check.status == Status.FAIL
    assert "KITSUNE_CONFINE is 'perhaps'" in check.detail
