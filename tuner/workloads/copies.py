"""Builds a workload once and hands out deep copies, if a copy trains exactly like the original.

A trial needs 3 to 6 workloads with the same weights: for the probe, the reference and each arm. Building a model of
125 M parameters takes seconds; copying it is only a copy of memory.
"""

import contextlib
import copy
import gc
import math
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, replace
from typing import Final

import torch

from kitsune.device.backend import rng_state, set_rng_state
from kitsune.workload import Workload
from tuner.workloads.plain_step import plain_step

#: An original on the GPU is kept only if it is at most this share of the GPU's memory, which measurements need.
MOST_OF_GPU: Final = 0.02
#: Kernels with a nondeterministic order of summation differ by less; a copy that lost a weight or a rate, by more.
RELATIVE_TOLERANCE: Final = 1e-2

Build = Callable[[], Workload]
Move = Callable[[Workload], Workload]


class Copies:
    """Originals by key; None where a copy does not train like the original, which is then built each time."""

    def __init__(self) -> None:
        self._originals: dict[Hashable, Workload | None] = {}

    def get(self, key: Hashable, build: Build, move: Move, device: torch.device, *, is_ours: bool = False) -> Workload:
        """A workload on the device. `build` makes it on whatever device the user's function chooses, `move` moves it.

        `is_ours`: the workload is from the zoo, whose copies need not be checked.
        """
        if key not in self._originals:
            self._originals[key] = build() if is_ours else _original(build, move, device)
        original = self._originals[key]
        return move(build() if original is None else copied(original))


_active: Copies | None = None


@contextlib.contextmanager
def copying() -> Iterator[None]:
    """Inside the block, workloads from files and from the zoo are built once and then copied."""
    global _active  # noqa: PLW0603 - of the process, as a measuring process has one job
    _active = Copies()
    try:
        yield
    finally:
        _active = None


def copies_here() -> Copies | None:
    return _active


def copied(workload: Workload) -> Workload:
    """A deep copy with its own optimizer and loss. Raises whatever copying a user's class raises."""
    parts = (workload.model, workload.loss_fn, workload.optimizer, workload.batch)
    model, loss_fn, optimizer, batch = copy.deepcopy(parts)
    return replace(workload, model=model, loss_fn=loss_fn, optimizer=optimizer, batch=batch)


def _original(build: Build, move: Move, device: torch.device) -> Workload | None:
    """A workload that can be copied again and again, or None if copies do not train like the original.

    A copy runs one step, which must not change the original: a loss that holds a reference to the model would train
    the original. Then the original runs the same step, with the same result. A second copy is returned.
    """
    built = build()
    if not _fits_on_gpu(built, device):
        return None
    before = rng_state(device)
    try:
        kept = copied(built)
        marks = _marks(built)
        first = _first_step(move(copied(built)))
        gc.collect()  # otherwise models in reference cycles with their hooks would stay on the device
        if _marks(built) != marks:
            return None
        set_rng_state(device, before)
        return kept if first.is_like(_first_step(move(built))) else None
    except Exception:  # noqa: BLE001 - from the user's code: reported when the workload is really built and run
        return None
    finally:
        set_rng_state(device, before)
        del built
        gc.collect()


def _fits_on_gpu(workload: Workload, device: torch.device) -> bool:
    on_gpu = sum(p.nbytes for p in workload.model.parameters() if p.device.type == "cuda")
    return not on_gpu or on_gpu <= MOST_OF_GPU * torch.cuda.get_device_properties(device).total_memory


def _marks(workload: Workload) -> list[tuple[int, bool]]:
    """Values that change when a tensor of the model is written to or gets a gradient."""
    tensors = [*workload.model.parameters(), *workload.model.buffers()]
    return [(tensor._version, tensor.grad is None) for tensor in tensors]


@dataclass(frozen=True, slots=True)
class FirstStep:
    """Results of a step: loss, gradient norms, which parameters were updated, and norms of the optimizer's state."""

    loss: float
    gradients: tuple[float | None, ...]
    updated: tuple[bool, ...]
    states: tuple[float, ...]

    def is_like(self, other: "FirstStep") -> bool:
        if self.updated != other.updated or len(self.states) != len(other.states):
            return False
        ours, theirs = ([self.loss, *self.gradients, *self.states], [other.loss, *other.gradients, *other.states])
        return all(_near(a, b) for a, b in zip(ours, theirs, strict=True))


def _near(a: float | None, b: float | None) -> bool:
    if a is None or b is None:
        return a is b
    return math.isclose(a, b, rel_tol=RELATIVE_TOLERANCE, abs_tol=1e-30)


def _first_step(workload: Workload) -> FirstStep:
    parameters = list(workload.model.parameters())
    versions = [parameter._version for parameter in parameters]
    loss = plain_step(workload, *workload.batch)
    gradients = tuple(None if p.grad is None else float(p.grad.norm()) for p in parameters)
    states = tuple(
        float(value.norm())
        for parameter in parameters
        for value in workload.optimizer.state.get(parameter, {}).values()
        if isinstance(value, torch.Tensor) and value.is_floating_point()
    )
    updated = tuple(p._version != before for p, before in zip(parameters, versions, strict=True))
    return FirstStep(float(loss), gradients, updated, states)
