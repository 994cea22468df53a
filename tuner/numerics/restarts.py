"""A workload that is put where a candidate stands, for one step: the reference in float64, or eager as a yardstick."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kitsune.device.tf32 import full_precision
from kitsune.workload import Workload
from tuner.building.arms import LiveArm, Rates, fresh_workload
from tuner.measuring.protocol import ArmSpec, Job
from tuner.numerics.tensor_errors import Taken
from tuner.numerics.training_trace import PERTURBATION, held
from tuner.workloads.batches import doubled
from tuner.workloads.plain_step import plain_step

Step = Callable[[Any, Any], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Place:
    """Copies of a model's parameters and buffers at one moment."""

    parameters: Sequence[torch.Tensor]
    buffers: Sequence[torch.Tensor]


def place_of(workload: Workload) -> Place:
    return Place(
        [held(each) for each in workload.model.parameters()], [held(each) for each in workload.model.buffers()]
    )


def put(workload: Workload, place: Place) -> None:
    """In the workload's own dtypes, and in place: a captured graph reads the tensors that it was captured with."""
    with torch.no_grad():
        for parameter, value in zip(workload.model.parameters(), place.parameters, strict=True):
            parameter.copy_(value)
        for buffer, value in zip(workload.model.buffers(), place.buffers, strict=True):
            buffer.copy_(value)


def taken(workload: Workload, loss: torch.Tensor, before: Place) -> Taken:
    """What a step did that began at `before`. The gradients are the live ones."""
    buffers = list(zip(workload.model.buffers(), before.buffers, strict=True))
    return Taken(
        loss=float(loss),
        gradients=[None if each.grad is None else each.grad.detach() for each in workload.model.parameters()],
        buffers=[after.detach().double() - value.double() for after, value in buffers if after.is_floating_point()],
        counters=[after.detach() for after, _ in buffers if not after.is_floating_point()],
    )


class Restarted:
    """One workload and its step, put to a place before each run."""

    def __init__(self, workload: Workload, step: Step, device: torch.device) -> None:
        self._workload = workload
        self._step = step
        self._device = device

    def take(self, place: Place, batch: Any, noise: int | None = None) -> Taken:
        """One step from there; with `noise`, a seed, from a few units in the last place beside it."""
        put(self._workload, place)
        if noise is not None:
            self._perturb(noise)
        return taken(self._workload, self._step(*batch), place)

    def _perturb(self, seed: int) -> None:
        generator = torch.Generator(self._device).manual_seed(seed)
        with torch.no_grad():
            for parameter in self._workload.model.parameters():
                if parameter.is_floating_point():
                    noise = torch.randn(parameter.shape, generator=generator, device=self._device)
                    parameter.mul_(1 + PERTURBATION * noise.to(parameter.dtype))


def reference_of(job: Job, device: torch.device, *, randomness: bool, double: bool) -> tuple[Restarted, str]:
    """The step as given in float64, or in fp32 without TF32 where that is not asked for or fails; and a note."""
    if double:
        # What a model with a dtype written into its code says to float64 is not ours to foresee.
        with contextlib.suppress(RuntimeError, TypeError, ValueError, NotImplementedError):
            return _double_reference(job, device, randomness=randomness), ""
    workload = fresh_workload(job, randomness=randomness)

    def step(x: Any, y: Any) -> torch.Tensor:
        with full_precision():
            return plain_step(workload, x, y, update=False)

    return Restarted(workload, step, device), "the reference is fp32"


def _double_reference(job: Job, device: torch.device, *, randomness: bool) -> Restarted:
    workload = fresh_workload(job, randomness=randomness)
    workload.model.double()
    if isinstance(workload.loss_fn, torch.nn.Module):
        workload.loss_fn.double()

    def step(x: Any, y: Any) -> torch.Tensor:
        return plain_step(workload, *doubled((x, y)), update=False)

    step(*workload.batch)
    return Restarted(workload, step, device)


def eager_arm(job: Job, *, randomness: bool) -> LiveArm:
    """The step as given with the candidate's precision and nothing else."""
    precision = job.arms[-1].knobs.get("precision")
    knobs = {} if precision is None else {"precision": precision}
    return LiveArm(job, ArmSpec(name="yardstick", knobs=knobs), randomness=randomness)


def standing(arm: LiveArm, device: torch.device) -> Restarted:
    """An arm as a yardstick; its own updates are of no effect, since it is put elsewhere before each step."""
    Rates(arm.workload.optimizer).scale(0.0)
    return Restarted(arm.workload, arm, device)
