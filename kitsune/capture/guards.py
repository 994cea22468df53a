"""Has anything changed that a captured graph has baked in? Cheap enough to be asked before every replay."""

import gc
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter, is_
from types import NoneType
from typing import Any, Generic, Protocol, TypeVar

import torch

from kitsune.autograd.hooks import HOOKS, are_hooked, has_global_hooks, named_modules, roots_of
from kitsune.capture.program_cache import ProgramCache, autocast_of
from kitsune.device.backend import Sync
from kitsune.device.gc_control import live_tensors
from kitsune.device.static_batch import signature_unless_opaque, versions_of

MEMBERS = ("_modules", "_parameters", "_buffers")
PLAIN = (bool, int, float, str, NoneType)
CONTAINERS = (list, tuple, dict, deque)
DEEPEST = 4  # containers within containers
IS_TRAINING = attrgetter("training")
NEEDS_GRADIENT = attrgetter("requires_grad")


class GuardedProgram(Protocol):
    """A step, prepared for batches of one signature."""

    @property
    def is_settled(self) -> bool: ...

    def is_stale(self) -> bool: ...

    def holds(self) -> bool: ...


Prepared = TypeVar("Prepared", bound=GuardedProgram)


class StepGuards(Generic[Prepared]):
    """What must hold before a program may run a batch: its signature, its model and optimizer, its hyperparameters."""

    def __init__(
        self,
        programs: ProgramCache[Prepared],
        model: torch.nn.Module,
        device: torch.device,
        has_other_groups: Callable[[], bool],
    ) -> None:
        self._programs = programs
        self._model = model
        self._kind = device.type
        self._has_other_groups = has_other_groups

    def check(self, batch: Any) -> Prepared | None:
        """The program that can run this batch right away, with learning rates taken over.

        None for a signature without a program, for a program that is still to compile or capture, and where the model
        or the optimizer has changed.
        """
        program = self._programs.find(self._key_of(batch))
        if program is None or not program.is_settled or self._has_other_groups() or not program.holds():
            return None
        return program

    def is_stale(self, batch: Any) -> bool:
        """Whether the program of this batch is stale, or the optimizer has groups to which the plan was not applied."""
        program = self._programs.find(self._key_of(batch))
        return self._has_other_groups() or (program is not None and program.is_stale())

    def program_of(self, batch: Any) -> Prepared | None:
        """The program of this batch, made if need be; None where none may be made (see `ProgramCache.admit`)."""
        key = self._key_of(batch)
        return self._programs.find(key) or self._programs.admit(key)

    def _key_of(self, batch: Any) -> Any:
        # Objects that may hide tensors compare by identity, or not at all: None is the signature of them all.
        return signature_unless_opaque(batch), self._model.training, autocast_of(self._kind)


class ModelGuard:
    """Compares modules, modes, hooks, parameters (identity, memory, requires_grad) and the optimizer's state.

    As in all of this file, a loss that is a module and was captured is looked at like the model.

    231 modules and 200 parameters of BERT-base are compared in about 0.15 ms of host time, which a replay of such a
    model hides; an MLP takes about 10 us.
    """

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, loss_fn: Any = None) -> None:
        self._optimizer = optimizer
        self._state = optimizer.state
        self._states = len(optimizer.state)
        self._modules = [module for _, module in named_modules(model, loss_fn)]
        self._hooks = [getattr(module, name) for module in self._modules for name, _ in HOOKS]
        members = [getattr(module, name) for module in self._modules for name in MEMBERS]
        self._members = [each for each in members if each]
        self._empty = [each for each in members if not each]
        self._held = list(chain.from_iterable(map(dict.values, self._members)))
        roots = roots_of(model, loss_fn)
        self._parameters = list(dict.fromkeys(chain.from_iterable(root.parameters() for root in roots)))
        buffers = chain.from_iterable(root.buffers() for root in roots)
        tensors = (*self._parameters, *buffers)
        self._strided = [each for each in tensors if each.layout is torch.strided and not each.is_nested]
        self._seen = self._look()
        self._attributes = Attributes(model, loss_fn)

    def unchanged(self, *, state: bool = True) -> bool:
        """`state=False` when the graph does not use the optimizer's state."""
        now = self._optimizer.state
        if state and (now is not self._state or len(now) != self._states):
            return False
        held = chain.from_iterable(map(dict.values, self._members))  # each as a member of its module
        if any(self._empty) or not all(map(is_, held, self._held)) or self._attributes.why_replaced():
            return False
        return self._look() == self._seen

    def _look(self) -> tuple[object, ...]:
        """Whole lists, built and compared in C."""
        return (
            list(map(IS_TRAINING, self._modules)),
            any(self._hooks) or has_global_hooks(),
            list(map(len, self._members)),
            list(map(torch.Tensor.data_ptr, self._strided)),
            list(map(torch.Tensor.size, self._strided)),
            list(map(torch.Tensor.stride, self._strided)),
            list(map(NEEDS_GRADIENT, self._parameters)),
            are_hooked(self._parameters),
        )


class Attributes:
    """The tensors that modules hold as plain attributes. A loop may replace them: a mask for each batch, say."""

    def __init__(self, model: torch.nn.Module, loss_fn: Any = None) -> None:
        self._held = [
            (vars(module), attribute, value, f"{name}.{attribute}".lstrip("."))
            for name, module in named_modules(model, loss_fn)
            for attribute, value in vars(module).items()
            if isinstance(value, torch.Tensor)
        ]

    def why_replaced(self) -> str | None:
        """Why a replay would not see a tensor that the loop has replaced, or None."""
        for attributes, attribute, value, place in self._held:
            if attributes.get(attribute) is not value:
                return f"the loop sets {place} between steps, which a replayed graph would not see"
        return None


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


def why_not_replayed(what: str, syncs: Sequence[Sync], host: SideEffects) -> str | None:
    """Why a replay of the observed run would not do the same, or None."""
    if syncs:
        file, line = syncs[0]
        return f"{what} waits for the device at {file}:{line}"
    change = host.change()
    if change:
        return f"{change}, which a replayed graph would not"
    if host.writes_given():
        return f"{what} writes into its input, where a replayed graph would write into a copy"
    return None


def newest_node() -> int:
    """The sequence number of an autograd node that is made now; they count up in each thread."""
    with torch.enable_grad():
        node: Any = torch.zeros((), requires_grad=True).clone().grad_fn
    return int(node._sequence_nr())


def why_not_joined_again(since: int) -> str | None:
    """Why a replay would lack a part of the autograd graph that was made after this node, or None."""
    if not keeps_graph(since):
        return None
    gc.collect()
    told = "the forward keeps a tensor with its autograd graph, which a replayed graph would not make again"
    return told if keeps_graph(since) else None


def keeps_graph(since: int) -> bool:
    with torch._C.DisableTorchFunctionSubclass():
        return any(number_of(each) > since for each in live_tensors())


def number_of(tensor: torch.Tensor) -> int:
    """The sequence number of the tensor's node; -1 without one, or where torch has none (a view written in place)."""
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
