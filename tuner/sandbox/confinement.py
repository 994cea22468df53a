"""What a measuring process is denied: secrets, and for others' models the rest of the environment and the network.

A script of the user's own may read whatever variables it likes, but no secret of Kitsune's, and keeps the network. An
archive or a model of the zoo holds no code that could need either: it gets what Python, compilers and the GPU's
libraries look at, and no way out, so that a cloud's keys in a worker's environment are out of reach, and so is whoever
would want them, whatever a hostile archive should bring about (docs/decisions/0014).
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

#: What is read from no name: an address may hold a password.
SECRETS: Final = frozenset({"KITSUNE_DATABASE_URL"})
#: In the name of a variable whose value is nobody's business.
SECRET_WORDS: Final = re.compile("TOKEN|KEY|SECRET|PASSW|PASSPHRASE|CREDENTIAL")
#: Variables that a measuring process may see whatever it measures: where things are, and how to build and run kernels.
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
#: Of OpenMP, MKL, CUDA, cuDNN, cuBLAS, NCCL, torch, Inductor, Triton and Python.
PREFIXES: Final = (
    *("LC_", "OMP_", "MKL_", "KMP_", "GOMP_", "OPENBLAS_"),
    *("CUDA_", "CUDNN_", "CUBLAS_", "NVIDIA_", "NV_", "NCCL_", "NVSHMEM_"),
    *("TORCH", "PYTORCH_", "TRITON_", "PYTHON"),
)
#: Scripts, which load nothing of ours: they begin every measuring process of a stranger's.
LOCKDOWN: Final = Path(__file__).with_name("lockdown.py")
SELF_TEST: Final = Path(__file__).with_name("self_test.py")
#: Of the machine's. The rest is for the worker, and for what else runs there.
MEMORY_SHARE: Final = 0.75
CONTAINER_MEMORY: Final = Path("/sys/fs/cgroup/memory.max")
#: The first look at a GPU takes seconds on a host of eight.
SELF_TEST_S: Final = 60.0

log = logging.getLogger("kitsune")


class Means(StrEnum):
    """By what a measuring process is kept from the network, the best first. What it may use up is bounded by all."""

    NAMESPACES = "namespaces"  #: a network of its own, with nothing in it
    FILTER = "filter"  #: the kernel refuses it sockets of the network
    BOUNDS = "bounds"  #: nothing keeps it
    NOTHING = "nothing"  #: nor is anything bounded


@dataclass(frozen=True, slots=True)
class Confinement:
    """How measuring processes are confined that run no code of the user's; `refused`: why not by better means."""

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


FREE: Final = Confinement(Means.NOTHING)


def confinement_of(workload: str, device: str) -> Confinement:
    """For a process that measures this workload. Raises SettingsError for a KITSUNE_CONFINE that makes no sense."""
    return FREE if runs_code(workload) else confinement_here(device)


def confinement_here(device: str) -> Confinement:
    """Raises SettingsError."""
    if not is_on("confine", default=True):
        return Confinement(Means.NOTHING, ("KITSUNE_CONFINE is off",))
    return _tested(device)


@cache
def _tested(device: str) -> Confinement:
    """The best means by which a process loses the network here and still works; tried once, in 0.2 s on a CPU."""
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
    """Why a process that is confined so would not be kept from the network, or could not measure on the device."""
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
        return f"{', '.join(told['open'])} can be reached all the same"
    return None


def environment_of(given: Mapping[str, str], workload: str) -> dict[str, str]:
    """What of the variables a process that measures this workload may see."""
    if runs_code(workload):
        return {name: value for name, value in given.items() if not (name.startswith(PREFIX) and is_secret(name))}
    return {name: value for name, value in given.items() if is_harmless(name)}


def runs_code(workload: str) -> bool:
    """Whether a workload is a script of the user's."""
    return not (workload.startswith("zoo:") or workload.endswith(".ksn"))


def is_harmless(name: str) -> bool:
    return (name in KEPT or name.startswith(PREFIXES)) and not is_secret(name)


def is_secret(name: str) -> bool:
    """By its name, which is all that is known of a variable."""
    return name in SECRETS or SECRET_WORDS.search(name.upper()) is not None


def bound_memory() -> None:
    """What a process may have in memory of its own, by which torch tells of a step that is too large for the CPU.

    Beside a GPU there is no such bound: what its driver maps counts as well.
    """
    lower(resource.RLIMIT_DATA, int(MEMORY_SHARE * memory_bytes()))


def memory_bytes() -> int:
    """Of this machine, or of the container that this is."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(machine, int(CONTAINER_MEMORY.read_text()))
    except (OSError, ValueError):  # there is none, or it has no limit, which is a word
        return machine


def leave_no_core() -> None:
    """A process that crashes must not leave its memory, with others' models in it, as a file."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
