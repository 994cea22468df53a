"""The candidate's training in the winner's gate: at many of its settled steps a reference is put where it stands, and
the last updates are recomputed in float64. Eager trainings beside it tell how far rounding alone drives them apart."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch

from kitsune.device.tf32 import full_precision
from kitsune.long_proof import Margin
from kitsune.techniques import tolerance
from kitsune.workload import Workload
from tuner.building.arms import LiveArm, Rates, fresh_workload
from tuner.measuring.protocol import Job
from tuner.numerics.depth import DEPTHS, Depth
from tuner.numerics.restarts import Restarted, eager_arm, place_of, reference_of, standing, taken
from tuner.numerics.tensor_errors import Reading, Readings, judge_readings, reading
from tuner.numerics.trace_errors import Start, nearest
from tuner.numerics.training_trace import BatchAt, begin, perturb
from tuner.numerics.update_check import DoubleUpdate, kept, live, trained
from tuner.records import Failure, FailureKind, Phase
from tuner.workloads.plain_step import plain_step

#: Of the given rates: a captured step that ignores them shows.
RATES: Final = (1.0, 0.8, 0.6, 0.9)
#: Beside the steps that are asked for: compiling, warming up, capturing, and overflows of fp16.
UNSETTLED: Final = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is compared: values only where random numbers can be switched off; less where memory or time is short.

    `step_s`: of an eager step. `end_s`: of the clock `time.monotonic`.
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
    def precision(self) -> str:
        return str(self.job.arms[-1].knobs.get("precision", "fp32"))

    @property
    def length(self) -> int:
        return self.depth.steps + UNSETTLED

    def has_time_for(self, needed_s: float) -> bool:
        return time.monotonic() + needed_s <= self.end_s


class Training:
    """The candidate's training: every step is looked at for what is not finite, some settled ones more closely."""

    def __init__(self, question: Question, arm: LiveArm, length: int) -> None:
        self._question = question
        self._arm = arm
        self._length = length
        depth = question.depth
        self._at = {round(index * (depth.steps - 1) / max(1, depth.restarts - 1)) for index in range(depth.restarts)}
        self._readings: list[Reading] = []
        self._yardsticks: list[list[Reading]] = [[] for _ in range(depth.yardsticks)]
        self._updates: list[Margin] = []
        self._reference: Restarted | None = None
        self._eager: LiveArm | None = None
        self._recomputed: DoubleUpdate | None = None
        self.losses: list[float] = []
        self.notes: list[str] = []
        self.settled = 0
        self.settling_s = 0.0
        self.updates = 0

    @property
    def restarts(self) -> int:
        return len(self._readings)

    def run(self) -> Failure | None:
        question = self._question
        torch.manual_seed(question.job.seed)
        for index in range(self._length):
            is_settled = self._arm.step.is_settled
            begin_s = time.monotonic()
            failure = self._step(index, is_settled=is_settled)
            if failure is not None:
                return failure
            self.settled += is_settled
            self.settling_s += 0.0 if is_settled else time.monotonic() - begin_s
            if self.settled >= question.depth.steps or not question.has_time_for(0.0):
                break
        if not question.has_time_for(0.0) and not self._is_enough():
            return failed(FailureKind.TIMEOUT, f"{self.settled} settled steps in the time there was are too few")
        if self.settled < question.depth.steps:
            without = "" if self.updates or not question.recomputes else ", and no update recomputed"
            self.notes.append(f"{self.settled} settled steps in place of {question.depth.steps}{without}")
        if self._eager is not None:
            self._eager.close()
        return None

    def _is_enough(self) -> bool:
        """As much as the least depth has, by which right candidates are known to pass."""
        least = DEPTHS[-1]
        return self.settled >= least.steps and (self.restarts >= least.restarts or not self._question.compares)

    def _step(self, index: int, *, is_settled: bool) -> Failure | None:
        question, arm = self._question, self._arm
        factor = RATES[index % len(RATES)]
        arm.rates.scale(factor)
        batch = question.batches(index)
        restarts = is_settled and question.compares and self.settled in self._at
        recomputes = (
            is_settled and question.recomputes and self.settled >= question.depth.steps - question.depth.updates
        )
        place = place_of(arm.workload) if restarts else None
        before = kept(live(arm.workload)) if recomputes else None
        loss = arm(*batch)
        self.losses.append(float(loss))
        overflowed = False
        if (problem := self._not_finite()) is not None:
            overflowed = question.precision == "fp16" and "parameter" not in problem and math.isfinite(self.losses[-1])
            if not overflowed:
                return failed(FailureKind.NOT_FINITE, f"{problem} at step {index}")
        if before is not None:
            self._recompute(before, factor, overflowed=overflowed)
        if place is not None and not overflowed:
            self._compare(place, batch, loss)
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
        """An update that an overflow skips must leave everything as it was."""
        if self._recomputed is None:
            self._recomputed = DoubleUpdate(fresh_workload(self._question.job))
            self._given = Rates(self._recomputed.optimizer)
        self._given.scale(factor)
        workload = self._arm.workload
        named = trained(workload)
        gradients = [None if overflowed else each.grad for each in named.values()]
        self._updates += self._recomputed.check(list(named), before, gradients, live(workload))
        self.updates += 1

    def _compare(self, place: Any, batch: Any, loss: torch.Tensor) -> None:
        question = self._question
        if self._reference is None or self._eager is None:
            randomness = question.randomness
            self._reference, note = reference_of(
                question.job, question.device, randomness=randomness, double=question.double
            )
            self.notes += [note] if note else []
            self._eager = eager_arm(question.job, randomness=randomness)
            self._standing = standing(self._eager, question.device)
        reference = self._reference.take(place, batch)
        self._readings.append(reading(taken(self._arm.workload, loss, place), reference))
        for index, readings in enumerate(self._yardsticks):
            noise = None if index == 0 else question.job.seed + 1000 * index + len(readings)
            eager = self._standing.take(place, batch, noise)
            readings.append(reading(eager, reference))

    def margins(self) -> list[Margin]:
        found = [nearest([each for each in self._updates if each.what == what]) for what in _kinds(self._updates)]
        if not self._readings:
            return found
        model = self._arm.workload.model
        names = [name for name, _ in model.named_parameters()]
        buffers = [name for name, buffer in model.named_buffers() if buffer.is_floating_point()]
        floor = tolerance(self._question.job.arms[-1].knobs)
        return found + judge_readings(Readings(self._readings, self._yardsticks), floor, names, buffers)


def _kinds(margins: list[Margin]) -> list[str]:
    return list(dict.fromkeys(margin.what for margin in margins))


def plain_losses(question: Question, workload: Workload) -> list[float]:
    with full_precision():
        return _losses(question, workload, lambda x, y: plain_step(workload, x, y), question.length)


def yardstick_losses(question: Question, start: Start, length: int) -> list[list[float]]:
    """Eager in the candidate's precision, from the same start and from some that are a few units in the last place
    beside it: how far trainings drift apart by rounding alone."""
    found = []
    for index in range(question.depth.yardsticks):
        arm = eager_arm(question.job, randomness=question.randomness)
        try:
            begin(arm.workload, start)
            if index:
                perturb(arm.workload, question.job.seed + index)
            found.append(_losses(question, arm.workload, arm, length))
        finally:
            arm.close()
    return found


def _losses(
    question: Question, workload: Workload, step: Callable[[Any, Any], torch.Tensor], length: int
) -> list[float]:
    rates = Rates(workload.optimizer)
    torch.manual_seed(question.job.seed)
    losses = []
    for index in range(length):
        rates.scale(RATES[index % len(RATES)])
        losses.append(step(*question.batches(index)))
    rates.scale(1.0)
    return [float(loss) for loss in losses]


def failed(kind: FailureKind, reason: str) -> Failure:
    return Failure(kind=kind, phase=Phase.NUMERICS, reason=reason[:2000])
