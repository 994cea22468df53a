"""Decides what a measuring process may access: environment variables, network and memory (docs/decisions/0014).

A user's own script sees all variables but Kitsune's secrets, and keeps the network. An archive or a zoo model has no
code that needs more, so it sees only an allowlist of variables (for Python, compilers and GPU libraries) and has no
network. Then a hostile archive that runs code after all can neither read cloud keys in a worker's environment nor send
them anywhere.
"""

import json
import logging
import os
import re
import resource
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Final

from kitsune.base.environment import PREFIX, is_on
from tuner.sandbox.lockdown import lower

#: Secret variables that SECRET_WORDS does not match: a database URL may hold a password.
SECRETS: Final = frozenset({"KITSUNE_DATABASE_URL"})
#: Words in the name of a variable that mark its value as a secret.
SECRET_WORDS: Final = re.compile("TOKEN|KEY|SECRET|PASSW|PASSPHRASE|CREDENTIAL")
#: Variables that every measuring process may see: paths, and settings for building and running kernels.
KEPT: Final = frozenset(
    {
        *("PATH", "HOME", "USER", "LOGNAME", "LANG", "TZ", "TMPDIR", "TEMP", "TMP", "VIRTUAL_ENV", "XDG_CACHE_HOME"),
        *(
            "CC",
            "CXX",
            "CPATH",
            "C_INCLUDE_PATH",
            "CPLUS_INCLUDE_PATH",
            "LIBRARY_PATH",
            "LD_LIBRARY_PATH",
            "LD_PRELOAD",
        ),
        *(f"{PREFIX}{name}" for name in ("HOME", "DISABLE", "CONFINE", "LOG_FORMAT")),
    }
)
#: Prefixes of allowed variables: OpenMP, MKL, CUDA, cuDNN, cuBLAS, NCCL, torch, Inductor, Triton and Python.
PREFIXES: Final = (
    *("LC_", "OMP_", "MKL_", "KMP_", "GOMP_", "OPENBLAS_"),
    *("CUDA_", "CUDNN_", "CUBLAS_", "NVIDIA_", "NV_", "NCCL_", "NVSHMEM_"),
    *("TORCH", "PYTORCH_", "TRITON_", "PYTHON"),
)
#: Scripts, run without importing Kitsune: LOCKDOWN starts every confined measuring process.
LOCKDOWN: Final = Path(__file__).with_name("lockdown.py")
SELF_TEST: Final = Path(__file__).with_name("self_test.py")
#: Share of the machine's memory that a confined process may allocate. The rest is for the worker and other programs.
MEMORY_SHARE: Final = 0.75
CONTAINER_MEMORY: Final = Path("/sys/fs/cgroup/memory.max")
#: Time limit. The first CUDA call takes seconds on a host of eight GPUs.
SELF_TEST_S: Final = 60.0

log = logging.getLogger("kitsune")


class Means(StrEnum):
    """How a measuring process is cut off from the network, the best first. All but NOTHING also set resource limits."""

    NAMESPACES = "namespaces"  #: an empty network namespace
    FILTER = "filter"  #: a seccomp filter refuses network sockets
    BOUNDS = "bounds"  #: resource limits only; the network stays reachable
    NOTHING = "nothing"  #: no limits at all


@dataclass(frozen=True, slots=True)
class Confinement:
    """How measuring processes without user code are confined. `refused`: why better means do not work here."""

    means: Means
    refused: tuple[str, ...] = ()

    @property
    def has_network(self) -> bool:
        return self.means in (Means.BOUNDS, Means.NOTHING)

    def command(self, given: Sequence[str]) -> list[str]:
        """The command that starts the given one confined."""
        if self.means is Means.NOTHING:
            return list(given)
        return [sys.executable, "-I", "-S", str(LOCKDOWN), self.means, *given]

    def __str__(self) -> str:
        if self.has_network:
            return f"archives and models of the zoo are measured with the network: {'; '.join(self.refused)}"
        how = {Means.NAMESPACES: "in a namespace without one", Means.FILTER: "the kernel refuses them sockets"}
        return f"archives and models of the zoo are measured without a network ({how[self.means]})"


UNCONFINED: Final = Confinement(Means.NOTHING)


def confinement_of(workload: str, device: str) -> Confinement:
    """How a process that measures this workload is confined. Raises SettingsError for an invalid KITSUNE_CONFINE."""
    return UNCONFINED if runs_code(workload) else confinement_here(device)


def confinement_here(device: str) -> Confinement:
    """The confinement of archives and zoo models here. Raises SettingsError for an invalid KITSUNE_CONFINE."""
    if not is_on("confine", default=True):
        return Confinement(Means.NOTHING, ("KITSUNE_CONFINE is off",))
    return _tested(device)


@cache
def _tested(device: str) -> Confinement:
    """The best means that cut off the network here while measuring works. Tested once; takes 0.2 s on a CPU."""
    refused: list[str] = []
    for means in (Means.NAMESPACES, Means.FILTER, Means.BOUNDS):
        found = Confinement(means, tuple(refused))
        problem = problem_of(found, device)
        if problem is None:
            log.log(logging.WARNING if found.has_network else logging.INFO, "%s", found)
            return found
        refused.append(f"{means}: {problem}")
    found = Confinement(Means.NOTHING, tuple(refused))
    log.warning("%s", found)
    return found


def problem_of(confinement: Confinement, device: str) -> str | None:
    """Why this confinement does not cut off the network, or breaks measuring on the device; None where it works."""
    command = confinement.command([sys.executable, "-I", str(SELF_TEST), device])
    environment = {name: value for name, value in os.environ.items() if is_harmless(name)}
    try:
        done = subprocess.run(
            command,
            check=False,
            capture_output=True,
            text=True,
            timeout=SELF_TEST_S,
            env=environment,
            start_new_session=True,
        )
        told = json.loads(done.stdout) if done.returncode == 0 else None
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        return f"the self-test did not run: {' '.join(str(error).split())[:300]}"
    if told is None:
        return (done.stderr.strip().splitlines() or [f"the self-test ended with code {done.returncode}"])[-1][:300]
    if told["broken"]:
        return f"measuring would fail: {'; '.join(told['broken'])}"
    if told["open"] and not confinement.has_network:
        return f"{', '.join(told['open'])} can still be reached"
    return None


def environment_of(given: Mapping[str, str], workload: str) -> dict[str, str]:
    """The part of the given variables that a process which measures this workload may see."""
    if runs_code(workload):
        return {name: value for name, value in given.items() if not (name.startswith(PREFIX) and is_secret(name))}
    return {name: value for name, value in given.items() if is_harmless(name)}


def runs_code(workload: str) -> bool:
    """Whether the workload is a user's own script."""
    return not (workload.startswith("zoo:") or workload.endswith(".ksn"))


def is_harmless(name: str) -> bool:
    return (name in KEPT or name.startswith(PREFIXES)) and not is_secret(name)


def is_secret(name: str) -> bool:
    """Whether the variable's name marks it as a secret."""
    return name in SECRETS or SECRET_WORDS.search(name.upper()) is not None


def bound_memory() -> None:
    """Limits the memory of this process, so that torch raises an error for a step that is too large for a CPU.

    Not for GPU measurements: memory mapped by the driver would count, too.
    """
    lower(resource.RLIMIT_DATA, int(MEMORY_SHARE * memory_bytes()))


def memory_bytes() -> int:
    """Memory of this machine, or the limit of this container if that is lower."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(machine, int(CONTAINER_MEMORY.read_text()))
    except (OSError, ValueError):  # no such file, or no limit: then it holds the word "max"
        return machine


def leave_no_core() -> None:
    """Disables core dumps: a crash must not write memory with other people's models in it to disk."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
