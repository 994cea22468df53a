"""Finds side effects of a run that a replay of its launches would not repeat. Asked once, before a capture."""

import gc
import random
import sys
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from types import NoneType
from typing import Any, Final

import torch
from torch._subclasses import FakeTensor

from kitsune.autograd.half_outputs import HalfOutput
from kitsune.autograd.hooks import named_modules
from kitsune.autograd.leaves import tensors_there, why_not_ours
from kitsune.capture.guards import MEMBERS
from kitsune.device.backend import Sync, watch_syncs
from kitsune.device.gc_control import live_tensors
from kitsune.device.static_batch import versions_of

PLAIN: Final = (bool, int, float, str, NoneType)
CONTAINERS: Final = (list, tuple, dict, deque)
DEEPEST: Final = 4  # containers within containers


class SideEffects:
    """Side effects of a step that a replay would not have: on the host, and in its arguments."""

    def __init__(self, model: torch.nn.Module, device: torch.device, loss_fn: Any = None, *, given: Any = None) -> None:
        self._model = model
        self._loss_fn = loss_fn
        # On a CPU a step draws from the generator of the host, and a replay does too.
        self._draws = device.type != "cpu"
        self._random = self._generators()
        self._held = self._look()
        self._given = given
        self._versions = versions_of(given)

    def writes_given(self) -> bool:
        return versions_of(self._given) != self._versions

    def change(self) -> str | None:
        """What has changed since, as text, or None."""
        if self._generators() != self._random:
            return "the step draws random numbers on the host"
        now = self._look()
        for place, value in self._held.items():
            if not same(value, now.get(place)):
                return f"the step sets {place}"
        return next((f"the step sets {place}" for place in now if place not in self._held), None)

    def _generators(self) -> tuple[Any, ...]:
        if not self._draws:
            return (random.getstate(),)
        modules = (module for _, module in named_modules(self._model, self._loss_fn))
        own = [value for module in modules for value in vars(module).values()]
        return random.getstate(), bytes(torch.get_rng_state().numpy()), numpy_state(), *map(generator_state, own)

    def _look(self) -> dict[str, Any]:
        """Attributes and buffers of all modules that are tensors or plain values, or lists or dicts, by name."""
        return {
            f"{name}.{attribute}".lstrip("."): contents(value)
            for name, module in named_modules(self._model, self._loss_fn)
            for attribute, value in (*vars(module).items(), *module._buffers.items())
            if is_looked_into(value) and attribute not in MEMBERS
        }


@dataclass(frozen=True, eq=False)
class Seen:
    """A tensor and its storage. Both are kept alive, so that no new tensor can have the same address."""

    tensor: torch.Tensor
    storage: torch.UntypedStorage | None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Seen) or self.tensor is not other.tensor:
            return False
        return address_of(self.storage) == address_of(other.storage)

    def __hash__(self) -> int:
        return id(self.tensor)


def seen(tensor: torch.Tensor) -> Seen:
    with torch._C.DisableTorchFunctionSubclass():
        return Seen(tensor, tensor.untyped_storage() if torch._C._has_storage(tensor) else None)


def address_of(storage: torch.UntypedStorage | None) -> int:
    return 0 if storage is None else int(storage._cdata)


def is_looked_into(value: Any) -> bool:
    return isinstance(value, (torch.Tensor, *PLAIN, *CONTAINERS)) or is_number_of_numpy(value)


def is_number_of_numpy(value: Any) -> bool:
    return type(value).__module__ == "numpy" and getattr(value, "shape", None) == ()


def contents(value: Any, depth: int = 0) -> Any:
    """The plain values and tensors of a value, also those in lists, tuples and dicts, in a form that compares."""
    if isinstance(value, torch.Tensor):
        return seen(value)
    if isinstance(value, PLAIN) or is_number_of_numpy(value):
        return value
    if not isinstance(value, CONTAINERS) or depth == DEEPEST:
        return type(value)
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    return [(key, contents(item, depth + 1)) for key, item in pairs]


def generator_state(value: Any) -> Any:
    """The state of a random number generator, on the host or a device; None for anything else."""
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, torch.Generator):
        return bytes(value.get_state().cpu().numpy())
    if type(value).__module__.startswith("numpy.random"):
        return repr(value.get_state(legacy=False) if hasattr(value, "get_state") else value.bit_generator.state)
    return None


def numpy_state() -> str:
    """The state of numpy's global generator, if numpy is loaded."""
    numpy = sys.modules.get("numpy")
    return repr(numpy.random.get_state(legacy=False)) if numpy is not None else ""


class WatchedRun:
    """The last run before a capture, in which what a replay would leave out is looked for. Make it before the run.

    `what`: the step, or the forward, in words. `syncs` is entered around the run. A capture that fails on a host sync
    costs a pool of memory, and breaks the generator.
    """

    def __init__(
        self, what: str, model: torch.nn.Module, device: torch.device, loss_fn: Any = None, *, given: Any
    ) -> None:
        self._what = what
        self._found: list[Sync] = []
        self._host = SideEffects(model, device, loss_fn, given=given)
        self._before = tensors_there()
        self.syncs = watch_syncs(device, self._found)

    def why_not_replayed(self) -> str | None:
        """Why a replay of the run would not do the same, or None."""
        if self._found:
            file, line = self._found[0]
            return f"{self._what} waits for the device at {file}:{line}"
        change = self._host.change()
        if change:
            return f"{change}, which a replayed graph would not"
        if self._host.writes_given():
            return f"{self._what} writes into its input, where a replayed graph would write into a copy"
        return None

    def why_not_ours(
        self, outputs: Iterable[torch.Tensor], parameters: Iterable[torch.Tensor], whose: str
    ) -> str | None:
        """Why a gradient of these outputs would be missing, or None: it flows to a leaf that is no parameter."""
        return why_not_ours(self._what, outputs, parameters, whose, self._before)


def newest_node() -> int:
    """The sequence number of an autograd node that is made now; they count up in each thread."""
    with torch.enable_grad():
        node: Any = torch.zeros((), requires_grad=True).clone().grad_fn
    return int(node._sequence_nr())


def why_not_joined_again(since: int) -> str | None:
    """Why a replay would lack a part of the autograd graph that was made after this node, or None."""
    if kept_of_graph(since) is None:
        return None
    gc.collect()
    kept = kept_of_graph(since)
    if kept is None:
        return None
    return f"the forward keeps a tensor with its autograd graph ({kept}), which a replayed graph would not make again"


def kept_of_graph(since: int) -> str | None:
    """Shape and node of a tensor that is still there and has a node made after this one; None without one."""
    with torch._C.DisableTorchFunctionSubclass():
        for each in live_tensors():
            if number_of(each) > since and (node := each.grad_fn) is not None:
                return f"{type(each).__name__} {tuple(each.shape)} by {node.name()}"
    return None


def number_of(tensor: torch.Tensor) -> int:
    """The sequence number of the tensor's node; -1 without one, or where torch has none (a view written in place).

    -1 for a fake tensor too: torch.compile may keep one, with a node that counts as newer than all others.
    """
    if isinstance(tensor, FakeTensor) or (isinstance(tensor, HalfOutput) and tensor.is_fake):
        return -1
    try:
        return -1 if tensor.grad_fn is None else int(tensor.grad_fn._sequence_nr())
    except RuntimeError:
        return -1


def why_not_filled(gradients: Iterable[torch.Tensor | None]) -> str | None:
    """Why a replay could not write these gradients, or None: the size of a sparse one depends on the batch."""
    is_sparse = any(each is not None and each.layout is not torch.strided for each in gradients)
    return "a gradient is sparse, which a replayed graph would not fill again" if is_sparse else None


def same(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and one == other)
