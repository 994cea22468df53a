"""Has anything changed that a captured graph has baked in? Cheap enough to be asked before every replay."""

from collections.abc import Callable
from itertools import chain
from operator import attrgetter, is_
from typing import Any, Final, Generic, Protocol, TypeVar

import torch

from kitsune.autograd.hooks import HOOKS, are_hooked, has_global_hooks, named_modules, roots_of
from kitsune.capture.program_cache import ProgramCache, autocast_of
from kitsune.device.static_batch import signature_unless_opaque

MEMBERS: Final = ("_modules", "_parameters", "_buffers")
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
