"""The checks of `kitsune doctor`: whether this machine can run Kitsune, and what to do if not.

Packages are imported only inside the checks: a missing or broken package is a finding, not an error.
"""

import importlib
import os
import platform
import re
import shutil
import sqlite3
import subprocess
import sys
import sysconfig
import tempfile
import warnings
from collections.abc import Callable
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, requires
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from kitsune.base.base_record import Record
from kitsune.base.environment import is_disabled
from kitsune.base.optional_imports import installed_version
from kitsune.errors import SettingsError, StoreError

NEWEST_PYTHON_TESTED: Final = (3, 12)  # older than 3.11 cannot load this file
OLDEST_TORCH: Final = (2, 9)
NEWEST_TORCH_TESTED: Final = (2, 13)
# Two connections that write and checkpoint can corrupt a WAL database before this version (sqlite.org, 2026-03-13).
FIRST_SAFE_SQLITE: Final = (3, 51, 3)
ENOUGH_DISK_BYTES: Final = 2 * 1024**3  # compiled kernels and a database of many runs
SPAWN_TIMEOUT_S: Final = 30
TUNER_PACKAGES: Final = ("optuna", "sqlalchemy", "alembic")
NVIDIA_SIGNS: Final = ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/dxg")  # the last on WSL


class Status(StrEnum):
    """The result of a check."""

    OK = "ok"
    WARN = "warn"  #: Kitsune works with limitations, which the detail names
    FAIL = "fail"  #: a main function does not work here


class Check(Record):
    """A check of this machine and its result."""

    name: str
    status: Status
    detail: str
    fix: str = ""


def checks() -> list[Check]:
    """The results of all checks, in order. Takes a few seconds, most of it to import torch. Leaves no files behind."""
    return [check() for check in CHECKS]


def check_python() -> Check:
    detail = f"{platform.python_version()} at {sys.executable}"
    if sys.version_info[:2] > NEWEST_PYTHON_TESTED:
        newest = _dotted(NEWEST_PYTHON_TESTED)
        return _warn("python", f"{detail}; newer than {newest}, the newest tested", f"use Python {newest} if it fails")
    return _ok("python", detail)


def check_settings() -> Check:
    try:
        settings, disabled = _settings(), is_disabled()
    except SettingsError as error:
        return _fail("settings", str(error), "correct the variable, or unset it")
    if disabled:
        return _warn("settings", "KITSUNE_DISABLE is on: plans are not applied", "unset KITSUNE_DISABLE")
    return _ok("settings", f"home {settings.home}")


def _settings() -> Any:
    """The tuner's settings, imported at run time since `kitsune` must not depend on the tuner. Raises SettingsError."""
    return importlib.import_module("tuner.settings").Settings.from_environment()


def check_torch() -> Check:
    torch = _load("torch")
    if torch is None:
        return _fail("torch", "cannot be imported", "install the build for your CUDA, see https://pytorch.org")
    found = _release(torch.__version__)
    detail = f"{torch.__version__}, CUDA {torch.version.cuda or 'not built in'}"
    if found < OLDEST_TORCH:
        return _fail("torch", f"{detail}; {_dotted(OLDEST_TORCH)} is the oldest that works", "upgrade torch")
    if found[:2] > NEWEST_TORCH_TESTED:
        newest = _dotted(NEWEST_TORCH_TESTED)
        return _warn(
            "torch", f"{detail}; newer than {newest}, the newest tested", f"use torch {newest} if plans decline"
        )
    return _ok("torch", detail)


def check_gpu() -> Check:
    torch = _load("torch")
    if torch is None:
        return _warn("gpu", "cannot be asked for without torch", "install torch first")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        there = torch.cuda.is_available()
    if there:
        return _ok("gpu", "; ".join(map(_describe_gpu, range(torch.cuda.device_count()))))
    if not _has_driver():
        return _warn("gpu", "no CUDA GPU: plans are measured on the CPU and hold for it", "run on a machine with a GPU")
    why = str(said[0].message).splitlines()[0] if said else f"CUDA in torch: {torch.version.cuda or 'not built in'}"
    return _fail(
        "gpu",
        f"an NVIDIA driver is loaded, but torch sees no GPU ({why})",
        "install a CUDA build of torch that this driver supports; check CUDA_VISIBLE_DEVICES",
    )


def _describe_gpu(index: int) -> str:
    device = _load("torch").device("cuda", index)
    here = importlib.import_module("kitsune.device.backend").environment(device)
    gib = here.memory_bytes / 1024**3
    return f"{here.gpu}, {gib:.0f} GiB, compute capability {here.compute_capability}, driver {here.driver}"


def check_gpu_processes() -> Check:
    """Other processes on the GPU disturb measurements. Runs before torch creates a context of its own."""
    name = "gpu processes"
    if not _has_driver():
        return _ok(name, "no NVIDIA driver, so nothing to share")
    nvml = _load("pynvml")
    if nvml is None:
        return _warn(name, "cannot be seen without nvidia-ml-py", "pip install nvidia-ml-py")
    try:
        others = _gpu_processes(nvml)
    except nvml.NVMLError as error:
        return _warn(name, f"the driver does not list them: {error}", "look with nvidia-smi")
    if others:
        return _warn(name, f"in use by others: {', '.join(others)}", "wait for them, or choose another GPU")
    return _ok(name, "no other processes")


def _has_driver() -> bool:
    return any(Path(sign).exists() for sign in NVIDIA_SIGNS)


def _gpu_processes(nvml: Any) -> list[str]:
    nvml.nvmlInit()
    try:
        gpus = [(index, nvml.nvmlDeviceGetHandleByIndex(index)) for index in range(nvml.nvmlDeviceGetCount())]
        return [
            f"GPU {index} process {process.pid} ({(process.usedGpuMemory or 0) // 1024**2} MiB)"
            for index, gpu in gpus
            for process in nvml.nvmlDeviceGetComputeRunningProcesses(gpu)
            if process.pid != os.getpid()
        ]
    finally:
        nvml.nvmlShutdown()


def check_triton() -> Check:
    """Checks triton against the version that torch's metadata requires; a CPU build of torch requires none."""
    there = installed_version("triton")
    pinned = re.search(r"triton==(\d[\w.]*)", " ".join(_requirements_of_torch()))
    if pinned is None:
        return _ok("triton", f"this torch needs none; installed: {there or 'none'}")
    wanted, fix = pinned[1], f"pip install triton=={pinned[1]}"
    if not there:
        return _fail("triton", f"missing; this torch compiles GPU kernels with triton {wanted}", fix)
    if _release(there)[:2] != _release(wanted)[:2]:
        return _warn("triton", f"{there}, but this torch was built with {wanted}", fix)
    return _ok("triton", f"{there}, as this torch was built with")


def check_compiler() -> Check:
    """Checks what torch.compile calls: CXX (else g++) on a CPU, CC (else gcc or clang) for Triton's launchers."""
    cxx = shutil.which(os.environ.get("CXX", "g++"))
    cc = shutil.which(os.environ["CC"]) if "CC" in os.environ else shutil.which("gcc") or shutil.which("clang")
    header = Path(sysconfig.get_path("include")) / "Python.h"
    missing = [
        what
        for what, there in (
            ("a C++ compiler (CXX or g++)", cxx),
            ("a C compiler (CC, gcc or clang)", cc),
            (f"Python's headers ({header})", header.exists()),
        )
        if not there
    ]
    if missing:
        fix = "install a compiler and Python's headers (Debian and Ubuntu: apt-get install g++ python3-dev)"
        return _warn("compiler", f"missing: {', '.join(missing)}; the knob 'compile' will be declined", fix)
    return _ok("compiler", f"{cxx}, {cc}")


def check_home() -> Check:
    """Checks that KITSUNE_HOME can be written, and its free space."""
    try:
        home = _settings().home
    except SettingsError:
        return _warn("home", "cannot be found", "correct the settings first")
    standing = _standing(home)
    try:
        with tempfile.TemporaryFile(dir=standing):
            free = shutil.disk_usage(standing).free
    except OSError as error:
        return _fail("home", f"{home} cannot be written: {error.strerror}", "point KITSUNE_HOME to a folder of yours")
    detail = f"{home}, {free / 1024**3:.1f} GiB free"
    if free < ENOUGH_DISK_BYTES:
        return _warn(
            "home", f"{detail}; compiled kernels and runs may fill it", "free some space, or move KITSUNE_HOME"
        )
    return _ok("home", detail)


def check_sqlite() -> Check:
    found = sqlite3.sqlite_version
    if sqlite3.sqlite_version_info < FIRST_SAFE_SQLITE:
        safe = _dotted(FIRST_SAFE_SQLITE)
        return _warn(
            "sqlite",
            f"{found}: versions before {safe} can corrupt a database that several processes write at once (WAL reset)",
            f"for one tuning run at a time nothing; for several, a Python with SQLite {safe}, or PostgreSQL",
        )
    return _ok("sqlite", found)


def check_tuner() -> Check:
    missing = [package for package in TUNER_PACKAGES if find_spec(package) is None]
    if missing:
        fix = "pip install 'kitsune-torch[tuner]' (a machine that only trains by plans needs none of it)"
        return _warn("tuner", f"cannot tune here; missing: {', '.join(missing)}", fix)
    return _ok("tuner", ", ".join(f"{package} {installed_version(package)}" for package in TUNER_PACKAGES))


def check_database() -> Check:
    """Checks that the database answers. A missing SQLite file is created by the first run."""
    try:
        url = _settings().database_url
    except SettingsError:
        return _warn("database", "cannot be found", "correct the settings first")
    if _load("sqlalchemy") is None:
        return _warn("database", "cannot be asked without sqlalchemy", "pip install 'kitsune-torch[tuner]'")
    file = Path(url.removeprefix("sqlite:///"))
    if url.startswith("sqlite:///") and not file.exists():
        return _judge_place(file)
    try:
        return _judge_schema(url)
    except StoreError as error:
        return _fail("database", str(error), "correct KITSUNE_DATABASE_URL, or do what the message says")


def _judge_place(file: Path) -> Check:
    """Whether a database can be created there."""
    standing = _standing(file.parent)
    try:
        with tempfile.TemporaryFile(dir=standing):
            return _ok("database", f"{file}, which the first run creates")
    except OSError as error:
        detail = f"{file} cannot be created: {standing} cannot be written: {error.strerror}"
        return _fail("database", detail, "point KITSUNE_HOME or KITSUNE_DATABASE_URL to a folder of yours")


def _standing(folder: Path) -> Path:
    """The folder, or its nearest parent that exists."""
    return next(one for one in (folder, *folder.absolute().parents) if one.exists())


def _judge_schema(url: str) -> Check:
    """Checks the schema. Raises StoreError when the database does not answer, or every command would refuse it."""
    migrate = importlib.import_module("tuner.store.migrate")
    engine = importlib.import_module("tuner.store.engine").create(url)
    try:
        with engine.connect() as connection:
            found = migrate.revisions(connection)
            migrate.refuse_strangers(connection, found)
    finally:
        engine.dispose()
    shown = importlib.import_module("tuner.store.error_translation").shown(engine.url)
    if found not in ((), (migrate.SCHEMA_REVISION,)):
        detail = f"{shown} holds schema {', '.join(found)}; this version writes {migrate.SCHEMA_REVISION}"
        return _warn("database", detail, "nothing: the next run migrates it")
    return _ok("database", f"{shown} answers{'' if found else ', and is empty'}")


def check_spawn() -> Check:
    """Checks that a child process starts, since every trial is one, in its own process group."""
    command = [sys.executable, "-c", "print('ready')"]
    fix = "allow this user to start processes (container limits, seccomp, ulimit -u)"
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=SPAWN_TIMEOUT_S, start_new_session=True, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        return _fail("spawn", f"a child process did not start: {_first_line(error)}", fix)
    if done.stdout.strip() != "ready":
        return _fail("spawn", "a child process started, but did not answer", fix)
    return _ok("spawn", "child processes start and answer")


def check_confinement() -> Check:
    """Checks that untrusted models are measured without network access here."""
    torch = _load("torch")
    device = "cuda:0" if torch is not None and torch.cuda.is_available() else "cpu"
    try:
        found = importlib.import_module("tuner.sandbox.confinement").confinement_here(device)
    except SettingsError as error:
        return _fail("confinement", str(error), "correct the variable, or unset it")
    if found.has_network:
        fix = "unset KITSUNE_CONFINE where it is off; else let this user make user namespaces or seccomp filters"
        return _warn("confinement", str(found), fix)
    return _ok("confinement", str(found))


CHECKS: Final[tuple[Callable[[], Check], ...]] = (
    check_python,
    check_settings,
    check_torch,
    check_gpu_processes,
    check_gpu,
    check_triton,
    check_compiler,
    check_home,
    check_sqlite,
    check_tuner,
    check_database,
    check_spawn,
    check_confinement,
)


def _ok(name: str, detail: str) -> Check:
    return Check(name=name, status=Status.OK, detail=detail)


def _warn(name: str, detail: str, fix: str) -> Check:
    return Check(name=name, status=Status.WARN, detail=detail, fix=fix)


def _fail(name: str, detail: str, fix: str) -> Check:
    return Check(name=name, status=Status.FAIL, detail=detail, fix=fix)


def _load(module: str) -> Any:
    """The module, or None when it is missing or its libraries do not load."""
    try:
        return importlib.import_module(module)
    except (ImportError, OSError):
        return None


def _requirements_of_torch() -> list[str]:
    try:
        return requires("torch") or []
    except PackageNotFoundError:
        return []


def _release(text: str) -> tuple[int, ...]:
    """(2, 13) of "2.13.0+cpu"."""
    match = re.match(r"(\d+)\.(\d+)", text)
    return tuple(map(int, match.groups())) if match else (0, 0)


def _dotted(release: tuple[int, ...]) -> str:
    return ".".join(map(str, release))


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
