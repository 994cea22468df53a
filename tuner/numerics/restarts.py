"""Takes single steps from a candidate's current state: the reference in float64, or eager steps as yardsticks."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch

from kitsune.device.tf32 import full_precision
from kitsune.errors import SURPRISES
from kitsune.knobs import dtype_choices
from kitsune.techniques.precision import AUTOCAST
from kitsune.workload import Workload, call_model, loss_of
from tuner.building.arms import LiveArm, Rates, fresh_workload
from tuner.measuring.protocol import ArmSpec, Job
from tuner.numerics.reference import NOT_CONVERTIBLE, dtypes_of_references, reference_step
from tuner.numerics.tensor_errors import StepResult
from tuner.numerics.trace_errors import ModelState
from tuner.numerics.training_trace import load_state, model_state, perturb

Step = Callable[[Any, Any], torch.Tensor]

NOT_ROUNDED: Final = "the step as given does not run with its parameters in bf16, so nothing shows what rounding does"


def step_result(workload: Workload, loss: torch.Tensor, before: ModelState) -> StepResult:
    """The result of a step that started from `before`. The gradients are the live ones, not copies."""
    buffers = list(zip(workload.model.buffers(), before.buffers, strict=True))
    return StepResult(
        loss=float(loss),
        gradients=[None if each.grad is None else each.grad.detach() for each in workload.model.parameters()],
        buffers=[after.detach().double() - value.double() for after, value in buffers if after.is_floating_point()],
        counters=[after.detach() for after, _ in buffers if not after.is_floating_point()],
    )


class StepFromState:
    """A workload and its step, set to a given state before each run."""

    def __init__(self, workload: Workload, step: Step) -> None:
        self._workload = workload
        self._step = step

    def run(self, state: ModelState, batch: Any, noise: int | None = None) -> StepResult:
        """One step from that state. With `noise`, a seed, the state is changed by a few units in the last place."""
        load_state(self._workload, state)
        if noise is not None:
            perturb(self._workload, noise)
        return step_result(self._workload, self._step(*batch), state)


def reference_of(job: Job, *, randomness: bool, double: bool) -> tuple[StepFromState, str]:
    """The step as given in float64, or without TF32 in fp32 if float64 is not asked for or fails; and a note."""
    workload = fresh_workload(job, randomness=randomness)
    *wider, (_, note) = dtypes_of_references(workload.model.parameters(), double=double)
    for dtype, wider_note in wider:
        with contextlib.suppress(*NOT_CONVERTIBLE):
            return _reference(workload, dtype), wider_note
        workload = fresh_workload(job, randomness=randomness)  # the other one is converted
    return _reference(workload, None), note


def _reference(workload: Workload, dtype: torch.dtype | None) -> StepFromState:
    """In another dtype it runs once, so that a model which cannot run in it raises here."""
    plain = reference_step(workload, dtype)

    def step(x: Any, y: Any) -> torch.Tensor:
        with full_precision():
            return plain(x, y, False)

    if dtype is not None:
        step(*workload.batch)
    return StepFromState(workload, step)


def eager_arm(job: Job, *, randomness: bool) -> LiveArm:
    """The step as given with the candidate's precision and nothing else, but for checkpoints where it needs them."""
    knobs = dtype_choices(job.arms[-1].knobs)
    if job.checkpointed:
        knobs["recompute"] = "blocks"
    return LiveArm(job, ArmSpec(name="yardstick", knobs=knobs), randomness=randomness)


class Yardsticks:
    """Eager steps in the candidate's formats, from the candidate's state: how far rounding alone is off.

    `count` steps have its precision, the first one from the same state, each other from one changed by a few units in
    the last place. A plan with rounded activations has one more, with its parameters in that format.
    """

    def __init__(self, job: Job, count: int, *, randomness: bool) -> None:
        self._seed, self._count, self._moments = job.seed, count, 0
        self._eager = eager_arm(job, randomness=randomness)
        Rates(self._eager.workload.optimizer).scale(0.0)  # so that its updates have no effect
        self._step = StepFromState(self._eager.workload, self._eager)
        rounded, self.note = rounded_step(job, randomness=randomness)
        self._rounded = None if rounded is None else StepFromState(rounded.workload, rounded)

    def runs(self, state: ModelState, batch: Any) -> Iterator[StepResult]:
        """The result of each yardstick, in the same order at every moment. Read it before the next one is made."""
        for index in range(self._count):
            noise = self._seed + 1000 * index + self._moments if index else None
            yield self._step.run(state, batch, noise)
        self._moments += 1
        if self._rounded is not None:
            yield self._rounded.run(state, batch)

    def close(self) -> None:
        self._eager.close()


class RoundedStep:
    """The step as given under autocast, with its parameters in the format that the candidate's activations have.

    So it is trained where parameters are gathered in bf16 (FSDP2's `param_dtype`): what an embedding or a norm returns
    is in bf16 too.
    """

    def __init__(self, job: Job, *, randomness: bool) -> None:
        self.workload = fresh_workload(job, randomness=randomness)
        self._dtype = AUTOCAST[str(job.arms[-1].knobs["activations"])]
        parameters = list(self.workload.model.parameters())
        self._kind = parameters[0].device.type
        for parameter in parameters:
            if parameter.dtype is torch.float32:
                parameter.data = parameter.data.to(self._dtype)

    def __call__(self, x: Any, y: Any) -> torch.Tensor:
        """The loss of a step without an update; gradients have the format of the parameters."""
        model = self.workload.model
        model.zero_grad(set_to_none=True)
        with torch.autocast(self._kind, dtype=self._dtype, cache_enabled=False):
            loss = loss_of(call_model(model, x), self.workload.loss_fn, y)
        loss.backward()
        return loss.detach()

    def updating(self, given: Workload) -> Step:
        """A step that updates the weights and buffers of the workload as given, in fp32, by these gradients."""
        models = given.model, self.workload.model

        def step(x: Any, y: Any) -> torch.Tensor:
            load_state(self.workload, model_state(given))
            loss = self(x, y)
            for parameter, rounded in zip(*(model.parameters() for model in models), strict=True):
                parameter.grad = None if rounded.grad is None else rounded.grad.to(parameter.dtype)
            for buffer, written in zip(*(model.buffers() for model in models), strict=True):
                buffer.copy_(written)
            given.optimizer.step()
            return loss

        return step


def rounded_step(job: Job, *, randomness: bool) -> tuple[RoundedStep | None, str]:
    """None if the candidate's activations are not rounded, or if the model does not run so, which the note tells."""
    if job.arms[-1].knobs.get("activations") not in AUTOCAST:
        return None, ""
    step = RoundedStep(job, randomness=randomness)
    try:
        step(*step.workload.batch)
    except torch.OutOfMemoryError:
        raise
    except SURPRISES as error:
        return None, f"{NOT_ROUNDED}: {error}"
    return step, ""
