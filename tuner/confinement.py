"""Our environment in, that of a measuring process out: without secrets, and for others' models without anything else.

A script of the user's own may read whatever variables it likes, but no secret of Kitsune's. An archive or a model of
the zoo holds no code that could need one: it gets what Python, compilers and the GPU's libraries look at, so that a
cloud's keys in a worker's environment are out of reach whatever a hostile archive should bring about.
"""

import resource
from collections.abc import Mapping
from typing import Final

SECRETS: Final = frozenset({"KITSUNE_DATABASE_URL", "KITSUNE_TOKEN"})
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
    }
)
#: Of OpenMP, MKL, CUDA, cuDNN, cuBLAS, NCCL, torch, Inductor, Triton, Python and ourselves.
PREFIXES: Final = (
    *("LC_", "OMP_", "MKL_", "KMP_", "GOMP_", "OPENBLAS_"),
    *("CUDA_", "CUDNN_", "CUBLAS_", "NVIDIA_", "NV_", "NCCL_", "NVSHMEM_"),
    *("TORCH", "PYTORCH_", "TRITON_", "PYTHON", "KITSUNE_"),
)


def environment_of(given: Mapping[str, str], workload: str) -> dict[str, str]:
    """What of the variables a process that measures this workload may see."""
    if runs_code(workload):
        return {name: value for name, value in given.items() if name not in SECRETS}
    return {name: value for name, value in given.items() if is_harmless(name)}


def runs_code(workload: str) -> bool:
    """Whether a workload is a script of the user's."""
    return not (workload.startswith("zoo:") or workload.endswith(".ksn"))


def is_harmless(name: str) -> bool:
    return name not in SECRETS and (name in KEPT or name.startswith(PREFIXES))


def leave_no_core() -> None:
    """A process that crashes must not leave its memory, with others' models in it, as a file."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
