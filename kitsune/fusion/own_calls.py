"""Lets AOTAutograd's cache keep graphs that call kernels of ours, by a hash of their sources.

That cache does not take graphs with functions that it does not know: a BERT-base with kernels of ours was traced, and
split into forward and backward, anew in each process. On an H200, with all else cached, that was 7 of the 17 s of its
first steps.
"""

import hashlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch.fx import GraphModule

PACKAGE: Final = Path(__file__).parents[1]
#: What is traced for a call of ours, and how it was timed.
SOURCES: Final = ("engine/contest.py", "fusion/*.py", "kernels/*.py")
HOMES: Final = ("kitsune.fusion.", "kitsune.kernels.")
#: By which Triton interprets kernels, on a CPU too, where otherwise their references are traced.
INTERPRETED: Final = "TRITON_INTERPRET"


def hash_of(package: Path) -> str:
    """Of the sources in it; "" where there are none, as in an installation that has bytecode only."""
    paths = sorted(path for pattern in SOURCES for path in package.glob(pattern))
    if not paths:
        return ""
    found = hashlib.sha256(os.environ.get(INTERPRETED, "").encode())
    for path in paths:
        code = path.read_bytes()
        found.update(f"\n{path.relative_to(package)} {len(code)}\n".encode() + code)
    return found.hexdigest()


#: Computed as this is imported: a file that is edited later is not what this process has loaded.
CODE_KEY: Final = hash_of(PACKAGE)


def is_ours(function: Callable[..., Any]) -> bool:
    """Whether its source is part of CODE_KEY."""
    return bool(CODE_KEY) and (getattr(function, "__module__", None) or "").startswith(HOMES)


def marks_of(graph: GraphModule) -> dict[str, str]:
    """The calls of ours in it, with the key of their code: what `cache_options` takes."""
    called = [node.target for node in graph.graph.nodes if node.op == "call_function" and is_ours(node.target)]
    return {f"{function.__module__}.{function.__name__}": CODE_KEY for function in called}


def cache_options(marks: Mapping[str, str]) -> dict[str, Any]:
    """Inductor's options by which torch's caches take these functions, and have their values in each key.

    In order, as the key is of the dictionary as it is written.
    """
    if not marks:
        return {}
    config: Any = torch._inductor.config
    known = {**config.unsafe_marked_cacheable_functions, **marks}
    return {"unsafe_marked_cacheable_functions": dict(sorted(known.items()))}


def state_mark() -> dict[str, str]:
    """What torch's keys do not hold of the flags of the moment: the dtype of autocast (before torch 2.12), and which
    attention backends there are."""
    backends: Any = torch.backends.cuda
    autocasts = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")]
    attention = [getattr(backends, f"{name}_sdp_enabled")() for name in ("flash", "mem_efficient", "math", "cudnn")]
    return {f"{__name__}.state": repr((autocasts, attention))}
