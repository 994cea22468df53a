"""Hooks the launchers of Triton kernels, which bypass the dispatcher.

All of torch's internals that this depends on are used here. Inductor's kernels go through CachingAutotuner.run with
arguments named in_ptr0, arg_A, out_ptr0, in_out_ptr0. A kernel of the user's goes through JITFunction.run, or through
CachingAutotuner.run if it is compiled with the model. It is assumed to read and write everything that it gets a pointer
to.
"""

import contextlib
import importlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch


@dataclass(frozen=True, slots=True)
class TritonLaunch:
    """A kernel with its arguments. `function(*arguments, **named)` launches it on the current stream.

    `reads` and `writes` are positions in `arguments`.
    """

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    named: Mapping[str, Any]
    reads: tuple[int, ...]
    writes: tuple[int, ...]


#: Name prefixes of the inputs of Inductor's own kernels, and of its templates of matrix products.
READ_ONLY: Final = ("in_ptr", "arg_")

#: (major, minor) of torch: the first and the last version whose internals were checked.
KNOWN_TORCH: Final = ((2, 11), (2, 13))

Saw = Callable[[TritonLaunch], None]


def why_unknown(torch_version: str) -> str | None:
    """The reason why launches cannot be followed in this version of torch, or None."""
    major, minor, *_ = torch_version.split(".")
    if KNOWN_TORCH[0] <= (int(major), int(minor)) <= KNOWN_TORCH[1]:
        return None
    first, last = (".".join(map(str, known)) for known in KNOWN_TORCH)
    return f"launches are followed in torch {first} to {last}; this is {torch_version}"


@contextlib.contextmanager
def triton_launches(device: torch.device, saw: Saw) -> Iterator[None]:
    """Calls `saw` right before every launch of a Triton kernel in the block, in all threads. No effect on a CPU."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        yield
        return
    heuristics: Any = importlib.import_module("torch._inductor.runtime.triton_heuristics")
    jit: Any = importlib.import_module("triton.runtime.jit")
    with _wrapped(heuristics.CachingAutotuner, _inductors, saw), _wrapped(jit.JITFunction, _users, saw):
        yield


@contextlib.contextmanager
def _wrapped(kind: Any, watched: Callable[..., Any], saw: Saw) -> Iterator[None]:
    run = kind.run

    def call(self: Any, *arguments: Any, **named: Any) -> Any:
        return watched(run, saw, self, *arguments, **named)

    kind.run = call
    try:
        yield
    finally:
        kind.run = run


def _inductors(run: Any, saw: Saw, tuner: Any, *arguments: Any, stream: Any, **named: Any) -> Any:
    names, mutated = list(tuner.fn.arg_names), set(getattr(tuner, "mutated_arg_names", None) or ())
    called = enumerate(zip(names, arguments, strict=False))
    pointers = [(at, name) for at, (name, value) in called if torch.is_tensor(value)]
    is_anything = getattr(getattr(tuner, "heuristic_type", None), "name", "") == "USER_AUTOTUNE"
    reads = tuple(at for at, name in pointers if is_anything or name in mutated or not name.startswith("out_ptr"))
    writes = tuple(at for at, name in pointers if is_anything or name in mutated or not name.startswith(READ_ONLY))
    launch = partial(_on_current_stream, run, tuner)
    saw(TritonLaunch(tuner.fn.__name__, launch, arguments, named, reads, writes))
    return run(tuner, *arguments, stream=stream, **named)


def _on_current_stream(run: Any, tuner: Any, *arguments: Any, **named: Any) -> Any:
    stream = torch._C._cuda_getCurrentRawStream(torch.cuda.current_device())
    return run(tuner, *arguments, stream=stream, **named)


def _users(run: Any, saw: Saw, kernel: Any, *arguments: Any, **named: Any) -> Any:
    if named.get("warmup"):
        return run(kernel, *arguments, **named)
    by_name = {name: value for name, value in named.items() if torch.is_tensor(value)}
    everything = (*arguments, *by_name.values())
    rest = {name: value for name, value in named.items() if name not in by_name}
    pointers = tuple(at for at, value in enumerate(everything) if torch.is_tensor(value))
    launch = partial(_with_names, run, kernel, tuple(by_name))
    saw(TritonLaunch(kernel.__name__, launch, everything, rest, pointers, pointers))
    return run(kernel, *arguments, **named)


def _with_names(run: Any, kernel: Any, names: tuple[str, ...], *everything: Any, **rest: Any) -> Any:
    at = len(everything) - len(names)
    return run(kernel, *everything[:at], **dict(zip(names, everything[at:], strict=True)), **rest)
