"""What the keys of torch's disk caches must contain besides the operations of a graph: what else affects its code.

It is passed as an option of Inductor, which makes it part of each key, also of that of the backward, which is compiled
at its first call. Decision 0090 describes the failures without it.
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
#: Sources of the kernels and their calls, and of their timing.
SOURCES: Final = ("launches/execution/graph_benchmark.py", "fusion/*.py", "kernels/*.py")
HOMES: Final = ("kitsune.fusion.", "kitsune.kernels.")
#: Functions that AOTAutograd's cache does not accept by itself, though the graph fully describes what they do. Hugging
#: Face models use autocast in their forward.
AUTOCASTS: Final = ("torch.amp.autocast_mode._enter_autocast", "torch.amp.autocast_mode._exit_autocast")
ATTENTION: Final = ("flash", "mem_efficient", "math", "cudnn")
MARK: Final = "kitsune"
#: Of operators that a graph may call by themselves.
NAMESPACE: Final = "kitsune"
ADDRESS: Final = re.compile(" at 0x[0-9a-f]+")
#: With it Triton interprets kernels, also on a CPU, where otherwise their references are traced.
INTERPRETED: Final = "TRITON_INTERPRET"


def hash_of(package: Path) -> str:
    """The hash of the sources in a package; "" when there are none, as in a bytecode-only installation."""
    paths = sorted(path for pattern in SOURCES for path in package.glob(pattern))
    if not paths:
        return ""
    found = hashlib.sha256(os.environ.get(INTERPRETED, "").encode())
    for path in paths:
        code = path.read_bytes()
        found.update(f"\n{path.relative_to(package)} {len(code)}\n".encode() + code)
    return found.hexdigest()


#: Computed at import: a file edited later is not the code that this process has loaded.
CODE_KEY: Final = hash_of(PACKAGE)


def is_ours(function: Callable[..., Any]) -> bool:
    """Whether its source is part of CODE_KEY."""
    return bool(CODE_KEY) and (getattr(function, "__module__", None) or "").startswith(HOMES)


def cache_options(graph: GraphModule, *, may_run_twice: bool = False) -> dict[str, Any]:
    """Inductor's options for this graph: the functions that AOTAutograd's cache may accept, and a hash of the graph.

    `may_run_twice`: whether the backward may run twice; it then must not overwrite saved tensors. The entries are
    sorted, since the key depends on the order of the dictionary.
    """
    config: Any = torch._inductor.config
    mark = hashlib.sha256(repr((may_run_twice, state(), list(structure_of(graph)))).encode()).hexdigest()
    known = {**config.unsafe_marked_cacheable_functions, **dict(cacheable(graph)), MARK: mark}
    return {"unsafe_marked_cacheable_functions": dict(sorted(known.items()))}


def cacheable(graph: GraphModule) -> Iterator[tuple[str, str]]:
    """Functions that the graph calls, each with an identifier of its code."""
    called = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    for function in called:
        name = f"{getattr(function, '__module__', '')}.{getattr(function, '__name__', '')}"
        if is_ours(function):
            yield name, CODE_KEY
        elif isinstance(function, torch._ops.OpOverload) and function.namespace == NAMESPACE:
            yield str(function), CODE_KEY
        elif name in AUTOCASTS:
            yield name, torch.__version__


def state() -> tuple[object, ...]:
    """Current flags that are not in torch's keys: the autocast dtype (before torch 2.12), attention backends, the
    precision of convolutions, and whether a backward may overwrite saved tensors."""
    backends: Any = torch.backends
    autocasts = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")]
    attention = [getattr(backends.cuda, f"{name}_sdp_enabled")() for name in ATTENTION]
    config: Any = torch._functorch.config
    return autocasts, attention, backends.cudnn.conv.fp32_precision, config.donated_buffer


def structure_of(graph: GraphModule) -> Iterator[str]:
    """Each operation and its inputs, with nodes numbered: the same in every process, independent of names.

    Different forwards may have equal backward graphs: whether the backward may overwrite an activation depends on the
    other outputs of the forward, which are not in torch's key of the backward.
    """
    for module in graph.modules():
        if not isinstance(module, GraphModule):
            continue
        numbers = {node: f"%{number}" for number, node in enumerate(module.graph.nodes)}
        for node in module.graph.nodes:
            what = "" if node.op in ("placeholder", "output") else named(node.target)
            text = repr((node.op, what, map_arg((node.args, node.kwargs), numbers.__getitem__)))
            yield ADDRESS.sub("", text)


def named(target: Any) -> str:
    """A name of a target that is the same in every process: of a method, an operator, or a function with its module."""
    if isinstance(target, (str, torch._ops.OpOverload)):
        return str(target)
    owner = getattr(target, "__self__", None)  # such as the class of an autograd.Function's `apply`
    return f"{torch.typename(owner)}.{target.__name__}" if isinstance(owner, type) else torch.typename(target)
