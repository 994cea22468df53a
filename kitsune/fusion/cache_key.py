"""What torch's caches on disk must know of a graph besides its operations: what else decides the code made of it.

Given as an option of Inductor, it is part of each key, that of the backward too, which is compiled at its first call.
Decision 0090 tells what went wrong without.
"""

import hashlib
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import torch
import torch._functorch.config
from torch.fx import GraphModule
from torch.fx.node import map_arg

PACKAGE: Final = Path(__file__).parents[1]
#: What is traced for a call of ours, and how it was timed.
SOURCES: Final = ("launches/execution/graph_benchmark.py", "fusion/*.py", "kernels/*.py")
HOMES: Final = ("kitsune.fusion.", "kitsune.kernels.")
#: Functions in a graph that AOTAutograd's cache does not know, though the graph says all of what they do. Models of
#: Hugging Face have an autocast of their own in the forward.
AUTOCASTS: Final = ("torch.amp.autocast_mode._enter_autocast", "torch.amp.autocast_mode._exit_autocast")
ATTENTION: Final = ("flash", "mem_efficient", "math", "cudnn")
MARK: Final = "kitsune"
ADDRESS: Final = re.compile(" at 0x[0-9a-f]+")
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


def cache_options(graph: GraphModule, *, may_run_twice: bool = False) -> dict[str, Any]:
    """Inductor's options for this graph: the functions in it that AOTAutograd's cache may take, and our mark.

    `may_run_twice`: of the backward, which then writes over nothing that was saved for it. Sorted, as the key is of the
    dictionary as it is written.
    """
    config: Any = torch._inductor.config
    mark = hashlib.sha256(repr((may_run_twice, state(), list(structure_of(graph)))).encode()).hexdigest()
    known = {**config.unsafe_marked_cacheable_functions, **dict(cacheable(graph)), MARK: mark}
    return {"unsafe_marked_cacheable_functions": dict(sorted(known.items()))}


def cacheable(graph: GraphModule) -> Iterator[tuple[str, str]]:
    """Functions that the graph calls, each with what tells its code apart."""
    called = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    for function in called:
        name = f"{getattr(function, '__module__', '')}.{getattr(function, '__name__', '')}"
        if is_ours(function):
            yield name, CODE_KEY
        elif name in AUTOCASTS:
            yield name, torch.__version__


def state() -> tuple[object, ...]:
    """Flags of the moment that torch's keys do not hold: the dtype of autocast (before torch 2.12), attention backends,
    the precision of convolutions, and whether a backward may write over what was saved for it."""
    backends: Any = torch.backends
    autocasts = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")]
    attention = [getattr(backends.cuda, f"{name}_sdp_enabled")() for name in ATTENTION]
    config: Any = torch._functorch.config
    return autocasts, attention, backends.cudnn.conv.fp32_precision, config.donated_buffer


def structure_of(graph: GraphModule) -> Iterator[str]:
    """Each operation and what goes into it, nodes by number: the same in every process, whatever things are called.

    A backward may be the same graph where the forward is not: whether it may write over an activation is up to what
    else the forward gives back, and torch's key of the backward does not hold it.
    """
    for module in graph.modules():
        if not isinstance(module, GraphModule):
            continue
        numbers = {node: f"%{number}" for number, node in enumerate(module.graph.nodes)}
        for node in module.graph.nodes:
            what = "" if node.op in ("placeholder", "output") else named(node.target)
            told = repr((node.op, what, map_arg((node.args, node.kwargs), numbers.__getitem__)))
            yield ADDRESS.sub("", told)


def named(target: Any) -> str:
    """A method's name, or that of an operator or a function with its home, which is the same in every process."""
    if isinstance(target, (str, torch._ops.OpOverload)):
        return str(target)
    owner = getattr(target, "__self__", None)  # of `apply` of an autograd function, say
    return f"{torch.typename(owner)}.{target.__name__}" if isinstance(owner, type) else torch.typename(target)
