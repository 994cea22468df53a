"""The candidate's training in the long numerics gate, with comparisons along the way.

At many settled steps a reference takes the same step from the candidate's state, and the last updates are recomputed in
float64. Eager trainings (yardsticks) show how far rounding alone drives trainings apart.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch

from kitsune.device.tf32 import full_precision
from kitsune.long_proof import Margin
from kitsune.workload import Workload
from tuner.building.arms import LiveArm, Rates, fresh_workload
from tuner.measuring.protocol import Job
from tuner.numerics.depth import DEPTHS, Depth
from tuner.numerics.restarts import (
    StepFromState,
    Yardsticks,
    eager_arm,
    reference_of,
    rounded_step,
    step_result,
)
from tuner.numerics.tensor_errors import ErrorSamples, StepErrors, compared, is_lost, judge_comparisons
from tuner.numerics.trace_errors import TrainingStart, nearest
from tuner.numerics.training_trace import BatchAt, load_state, model_state, perturb
from tuner.numerics.update_check import DoubleUpdate, copied_state, live_state, trained_parameters
from tuner.records import Failure, FailureKind, Phase
from tuner.workloads.plain_step import plain_step

#: Factors of the given learning rates. They change, so that a captured step which ignores them is detected.
RATES: Final = (1.0, 0.8, 0.6, 0.9)
LOST_IN_ROUNDING: Final = "with its parameters in bf16 the step as given loses a gradient, so that shows nothing"
#: Extra steps for compiling, warm-up, capturing, and overflows of fp16.
UNSETTLED: Final = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofTask:
    """What to compare. Values are compared only if random numbers can be switched off, and less if memory is short.

    `step_s`: seconds of an eager step. `end_s`: end time on the clock `time.monotonic`.
    """

    job: Job
    depth: Depth
    device: torch.device
    batches: BatchAt
    double: bool
    randomness: bool
    step_s: float
    end_s: float = math.inf
    compares: bool = True
    recomputes: bool = True

    @property
    def scales_loss(self) -> bool:
        return self.job.arms[-1].knobs.get("precision") == "fp16"

    @property
    def length(self) -> int:
        return self.depth.steps + UNSETTLED

    def has_time_for(self, needed_s: float) -> bool:
        return time.monotonic() + needed_s <= self.end_s


class Training:
    """The candidate's training. Every step is checked for values that are not finite, some settled ones in detail."""

    def __init__(self, task: ProofTask, arm: LiveArm, length: int) -> None:
        self._task = task
        self._arm = arm
        self._length = length
        depth = task.depth
        self._at = {round(index * (depth.steps - 1) / max(1, depth.restarts - 1)) for index in range(depth.restarts)}
        self._comparisons: list[StepErrors] = []
        self._yardstick_comparisons: list[list[StepErrors]] = []  # of each moment
        self._updates: list[Margin] = []
        self._reference: StepFromState | None = None
        self._yardsticks: Yardsticks | None = None
        self._recomputed: DoubleUpdate | None = None
        self.shows_rounding = True  # whether a yardstick with rounded parameters, if there is one, shows anything
        self.losses: list[float] = []
        self.notes: list[str] = []
        self.settled = 0
        self.settling_s = 0.0
        self.updates = 0

    @property
    def restarts(self) -> int:
        return len(self._comparisons)

    def run(self) -> Failure | None:
        task = self._task
        torch.manual_seed(task.job.seed)
        for index in range(self._length):
            is_settled = self._arm.step.is_settled
            begin_s = time.monotonic()
            failure = self._step(index, is_settled=is_settled)
            if failure is not None:
                return failure
            self.settled += is_settled
            self.settling_s += 0.0 if is_settled else time.monotonic() - begin_s
            if self.settled >= task.depth.steps or not task.has_time_for(0.0):
                break
        if not task.has_time_for(0.0) and not self._is_enough():
            return failed(FailureKind.TIMEOUT, f"{self.settled} settled steps in the time there was are too few")
        if self.settled < task.depth.steps:
            without = "" if self.updates or not task.recomputes else ", and no update recomputed"
            self.notes.append(f"{self.settled} settled steps in place of {task.depth.steps}{without}")
        if self._yardsticks is not None:
            self._yardsticks.close()
        return None

    def _is_enough(self) -> bool:
        """Whether the smallest depth was reached, which correct candidates are known to pass."""
        least = DEPTHS[-1]
        return self.settled >= least.steps and (self.restarts >= least.restarts or not self._task.compares)

    def _step(self, index: int, *, is_settled: bool) -> Failure | None:
        task, arm = self._task, self._arm
        factor = RATES[index % len(RATES)]
        arm.rates.scale(factor)
        batch = task.batches(index)
        restarts = is_settled and task.compares and self.settled in self._at
        recomputes = is_settled and task.recomputes and self.settled >= task.depth.steps - task.depth.updates
        state = model_state(arm.workload) if restarts else None
        before = copied_state(live_state(arm.workload)) if recomputes else None
        loss = arm(*batch)
        self.losses.append(float(loss))
        overflowed = False
        if (problem := self._not_finite()) is not None:
            overflowed = task.scales_loss and "parameter" not in problem and math.isfinite(self.losses[-1])
            if not overflowed:
                return failed(FailureKind.NOT_FINITE, f"{problem} at step {index}")
        if before is not None:
            self._recompute(before, factor, overflowed=overflowed)
        if state is not None and not overflowed:
            self._compare(state, batch, loss)
        return None

    def _not_finite(self) -> str | None:
        if not math.isfinite(self.losses[-1]):
            return f"the loss is {self.losses[-1]}"
        named = list(self._arm.workload.model.named_parameters())
        tensors = {f"parameter {name}": parameter.detach() for name, parameter in named}
        tensors |= {f"the gradient of {name}": each.grad for name, each in named if each.grad is not None}
        sums = torch.stack([each.abs().sum(dtype=torch.float64) for each in tensors.values()])
        if bool(torch.isfinite(sums).all()):
            return None
        bad = torch.isfinite(sums).logical_not().nonzero()[0]
        return f"{list(tensors)[int(bad)]} is not finite"

    def _recompute(self, before: Any, factor: float, *, overflowed: bool) -> None:
        """Checks one update. An update that was skipped for an overflow must have changed nothing."""
        if self._recomputed is None:
            self._recomputed = DoubleUpdate(fresh_workload(self._task.job))
            self._given = Rates(self._recomputed.optimizer)
        self._given.scale(factor)
        workload = self._arm.workload
        named = trained_parameters(workload)
        gradients = [None if overflowed else each.grad for each in named.values()]
        self._updates += self._recomputed.check(list(named), before, gradients, live_state(workload))
        self.updates += 1

    def _compare(self, state: Any, batch: Any, loss: torch.Tensor) -> None:
        task = self._task
        if self._reference is None or self._yardsticks is None:
            randomness = task.randomness
            self._reference, note = reference_of(task.job, randomness=randomness, double=task.double)
            self._yardsticks = Yardsticks(task.job, task.depth.yardsticks, randomness=randomness)
            self.notes += filter(None, [note, self._yardsticks.note])
        reference = self._reference.run(state, batch)
        self._comparisons.append(compared(step_result(self._arm.workload, loss, state), reference))
        theirs = [compared(each, reference) for each in self._yardsticks.runs(state, batch)]
        self._yardstick_comparisons.append(theirs)
        if self.shows_rounding and len(theirs) > task.depth.yardsticks and is_lost(theirs[-1], theirs[0]):
            self.shows_rounding = False
            self.notes.append(LOST_IN_ROUNDING)

    def margins(self) -> list[Margin]:
        found = [nearest([each for each in self._updates if each.what == what]) for what in _kinds(self._updates)]
        if not self._comparisons:
            return found
        model = self._arm.workload.model
        names = [name for name, _ in model.named_parameters()]
        buffers = [name for name, buffer in model.named_buffers() if buffer.is_floating_point()]
        yardsticks = list(zip(*self._yardstick_comparisons, strict=True))
        if not self.shows_rounding:
            yardsticks = yardsticks[: self._task.depth.yardsticks]
        samples = ErrorSamples(self._comparisons, yardsticks)
        return found + judge_comparisons(samples, self._arm.tolerance, names, buffers)


def _kinds(margins: list[Margin]) -> list[str]:
    return list(dict.fromkeys(margin.what for margin in margins))


def plain_losses(task: ProofTask, workload: Workload) -> list[float]:
    with full_precision():
        return _losses(task, workload, lambda x, y: plain_step(workload, x, y), task.length)


def yardstick_losses(task: ProofTask, start: TrainingStart, length: int, *, shows_rounding: bool) -> list[list[float]]:
    """Losses of eager trainings in the candidate's formats. They show how far trainings drift apart by rounding alone.

    One has its precision and starts as it did, the others start from weights changed by a few units in the last place.
    The one of a plan with rounded activations has its parameters in that format, and fp32 weights for the updates.
    """
    found = []
    for index in range(task.depth.yardsticks):
        arm = eager_arm(task.job, randomness=task.randomness)
        try:
            load_state(arm.workload, start)
            if index:
                perturb(arm.workload, task.job.seed + index)
            found.append(_losses(task, arm.workload, arm, length))
        finally:
            arm.close()
    rounded, _ = rounded_step(task.job, randomness=task.randomness) if shows_rounding else (None, "")
    if rounded is not None:
        workload = fresh_workload(task.job, randomness=task.randomness)
        load_state(workload, start)
        found.append(_losses(task, workload, rounded.updating(workload), length))
    return found


def _losses(task: ProofTask, workload: Workload, step: Callable[[Any, Any], torch.Tensor], length: int) -> list[float]:
    rates = Rates(workload.optimizer)
    torch.manual_seed(task.job.seed)
    losses = []
    for index in range(length):
        rates.scale(RATES[index % len(RATES)])
        losses.append(step(*task.batches(index)))
    rates.scale(1.0)
    return [float(loss) for loss in losses]


def failed(kind: FailureKind, reason: str) -> Failure:
    return Failure(kind=kind, phase=Phase.NUMERICS, reason=reason[:2000])
