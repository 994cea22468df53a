"""A graph in, which of its calls are ours out, with the key of their code: what they compute may be kept by that.

AOTAutograd keeps what it made of a graph on disk, but not of one with functions that it does not know: a BERT-base with
kernels of ours was traced and split into forward and backward anew in each process, 7 of the 17 s of its first steps on
an H200 with all else cached.
"""

import functools
import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch.fx import GraphModule

PACKAGE: Final = Path(__file__).parents[1]
FOLDERS: Final = ("fusion", "kernels")


def is_ours(function: Callable[..., Any]) -> bool:
    """Whether `code_key` tells its code apart from any other."""
    module = getattr(function, "__module__", None) or ""
    return bool(code_key()) and module.startswith(tuple(f"kitsune.{folder}." for folder in FOLDERS))


@functools.cache
def code_key() -> str:
    """The same for the same sources of our kernels and of the calls that graphs have of them; "" where there are none.

    An installation may have bytecode only.
    """
    sources = sorted(path for folder in FOLDERS for path in (PACKAGE / folder).glob("*.py"))
    if not sources:
        return ""
    found = hashlib.sha256()
    for path in sources:
        code = path.read_bytes()
        found.update(f"{path.relative_to(PACKAGE)} {len(code)}\n".encode() + code)
    return found.hexdigest()


def marks_of(graph: GraphModule) -> dict[str, str]:
    """The calls of ours in it, with the key of their code: what `cache_options` takes."""
    called = {node.target for node in graph.graph.nodes if node.op == "call_function" and is_ours(node.target)}
    return {f"{function.__module__}.{function.__name__}": code_key() for function in called}


def cache_options(marks: Mapping[str, str]) -> dict[str, Any]:
    """Inductor's options by which these names are known to torch's caches, and their values part of every key."""
    if not marks:
        return {}
    config: Any = torch._inductor.config
    return {"unsafe_marked_cacheable_functions": {**config.unsafe_marked_cacheable_functions, **marks}}
