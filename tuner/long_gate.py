"""The winner's numbers, looked at for longer: a job's candidate in, a LongProof or the Failure that it is out.

The candidate trains at the given rates. At many of its settled steps a reference is put where it stands, and the last
updates are recomputed in float64; with random numbers in the step, these are looked at with dropout on.
"""

import gc
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch

from kitsune.device import full_precision, pick_device, release_cached, synchronize
from kitsune.proof import LongProof, Margin
from kitsune.techniques import tolerance
from kitsune.workload import Workload
from tuner.arms import LiveArm, Rates, fresh_workload
from tuner.depth import Depth, depth_of
from tuner.dropout import dropout_off
from tuner.masks import (
    Runner,
    given_rates,
    judge_slopes,
    judge_spread,
    keep_rates,
    repeats,
    slopes_of,
    spread_of,
)
from tuner.numerics import Start, nearest
from tuner.plain_step import plain_step
from tuner.probe import Probe, draws_random, probe_workload
from tuner.protocol import Job
from tuner.records import Failure, FailureKind, Phase
from tuner.restarts import Restarted, eager_arm, place_of, reference_of, standing, taken
from tuner.tensorwise import Reading, Readings, judge_readings, judge_windows, reading, window_errors
from tuner.tracing import BatchAt, batches_of, begin, perturb, start_of
from tuner.updates import DoubleUpdate, kept, live, trained

#: Of the given rates: a captured step that ignores them shows.
RATES: Final = (1.0, 0.8, 0.6, 0.9)
#: Beside the steps that are asked for: compiling, warming up, capturing, and overflows of fp16.
UNSETTLED: Final = 24
WINDOW: Final = 10
DOUBLE_SLOWDOWN: Final = {"cpu": 3.0, "cuda": 32.0}
#: Of the budget; a reference that takes more is in fp32.
DOUBLE_SHARE: Final = 0.3
BUDGET_S: Final = 120.0
#: Choices with which the modules of a model are called at every step.
CALLING: Final = {"compile": "off", "capture": "none", "fusion": "off"}

Enter = Callable[[Phase], None]


@dataclass(slots=True)
class Found:
    """What was found so far."""

    steps: int = 0
    restarts: int = 0
    updates: int = 0
    directions: int = 0
    margins: list[Margin] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def is_right(self) -> bool:
        return all(margin.is_kept for margin in self.margins)

    def verdict(self) -> LongProof | Failure:
        wrong = [margin for margin in self.margins if not margin.is_kept]
        if wrong:
            return _failed(FailureKind.WRONG, str(nearest(wrong)))
        return LongProof(
            steps=self.steps,
            restarts=self.restarts,
            updates=self.updates,
            directions=self.directions,
            margins=tuple(self.margins),
            notes=tuple(dict.fromkeys(note[:2000] for note in self.notes)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is compared: values only where random numbers can be switched off; less where memory is short."""

    job: Job
    depth: Depth
    device: torch.device
    batches: BatchAt
    double: bool
    randomness: bool
    compares: bool = True
    recomputes: bool = True

    @property
    def precision(self) -> str:
        return str(self.job.arms[-1].knobs.get("precision", "fp32"))

    @property
    def length(self) -> int:
        return self.depth.steps + UNSETTLED


def prove_job(job: Job, enter: Enter) -> LongProof | Failure:
    """As `prove_long`, from the beginning. `enter` is told when a phase begins."""
    probe = probe_workload(job)
    if isinstance(probe, Failure):
        return probe
    enter(Phase.NUMERICS)
    return prove_long(job, probe)


def prove_long(job: Job, probe: Probe, budget_s: float | None = None) -> LongProof | Failure:
    """Of the job's last arm. Within `budget_s`, or the job's, or two minutes, without what compiling takes.

    Raises DeclinedError when a choice cannot be applied, and whatever the candidate raises.
    """
    device = pick_device(job.device)
    budget_s = budget_s or job.budget_s or BUDGET_S
    step_s = min(probe.step_ms, job.step_ms or probe.step_ms) / 1e3
    double_s = DOUBLE_SLOWDOWN[device.type] * step_s
    double = 10 * double_s <= DOUBLE_SHARE * budget_s
    depth, note = depth_of(step_s, double_s if double else step_s, budget_s, is_random=probe.random)
    found = Found(notes=[*filter(None, [note]), *probe.notes])
    batches = batches_of(fresh_workload(job).batch, job.seed, vary=probe.vary)
    asked = Question(job=job, depth=depth, device=device, batches=batches, double=double, randomness=True)
    if not probe.random:
        failure = _within_memory(asked, found)
        return failure or found.verdict()
    with dropout_off():
        is_silent = not draws_random(fresh_workload(job, randomness=False), device)
        failure = _within_memory(replace(asked, randomness=False), found) if is_silent else None
    if not is_silent:
        found.notes.append("random numbers of the step cannot be switched off: no step is compared with a reference's")
        failure = _within_memory(replace(asked, compares=False), found)
    if failure is not None:
        return failure
    if not found.is_right:
        return found.verdict()
    torch.compiler.reset()  # what was compiled has no dropout
    _look_at_masks(asked, found)
    return found.verdict()


def _within_memory(question: Question, found: Found) -> Failure | None:
    """A reference beside the candidate may be too much for the device; then what needs it is left out, and said."""
    attempts = (
        (question, ""),
        (replace(question, compares=False), "no memory for a reference beside the candidate: no step was compared"),
        (replace(question, compares=False, recomputes=False), "no memory to recompute updates: none was"),
    )
    for attempt, note in attempts:
        try:
            failure = _train(attempt, found, *([note] if note else []))
        except torch.OutOfMemoryError:
            if attempt is attempts[-1][0]:
                raise
            gc.collect()
            release_cached(question.device)
            continue
        return failure
    raise AssertionError("the last attempt returns or raises")


def _train(question: Question, found: Found, *notes: str) -> Failure | None:
    """The candidate's training, and what is compared along it, into `found`."""
    plain = fresh_workload(question.job, randomness=question.randomness)
    start = start_of(plain)
    given = _plain_losses(question, plain)
    del plain
    length = next((index for index, loss in enumerate(given) if not math.isfinite(loss)), len(given))
    if length < len(given):
        found.notes.append(f"the step as given is not finite after {length} steps at its rates: no more were made")
    arm = LiveArm(question.job, question.job.arms[-1], randomness=question.randomness)
    try:
        begin(arm.workload, start)
        training = Training(question, arm, length)
        failure = training.run()
        if failure is not None:
            return failure
        found.notes += [*notes, *training.notes]
        found.steps, found.restarts, found.updates = training.settled, training.restarts, training.updates
        found.margins += training.margins()
    finally:
        arm.close()
    if question.compares and found.is_right:
        ours = training.losses
        del arm, training
        theirs = [window_errors(losses, given, WINDOW) for losses in _yardstick_losses(question, start, len(ours))]
        found.margins.append(judge_windows(window_errors(ours, given, WINDOW), theirs))
    return None


def _plain_losses(question: Question, workload: Workload) -> list[float]:
    with full_precision():
        return _losses(question, workload, lambda x, y: plain_step(workload, x, y), question.length)


def _yardstick_losses(question: Question, start: Start, length: int) -> list[list[float]]:
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
        self.updates = 0

    @property
    def restarts(self) -> int:
        return len(self._readings)

    def run(self) -> Failure | None:
        question = self._question
        torch.manual_seed(question.job.seed)
        for index in range(self._length):
            is_settled = self._arm.step.is_settled
            failure = self._step(index, is_settled=is_settled)
            if failure is not None:
                return failure
            self.settled += is_settled
            if self.settled >= question.depth.steps:
                break
        if self.settled < question.depth.steps:
            self.notes.append(f"{self.settled} settled steps in place of {question.depth.steps}")
        if self._eager is not None:
            self._eager.close()
        return None

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
                return _failed(FailureKind.NOT_FINITE, f"{problem} at step {index}")
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


def _look_at_masks(question: Question, found: Found) -> None:
    """With random numbers on: the candidate beside eager in its precision, from the same weights."""
    job, depth, precision = question.job, question.depth, question.precision
    arm = LiveArm(job, job.arms[-1])
    eager = eager_arm(job, randomness=True)
    try:
        place = place_of(eager.workload)
        ours, theirs = _runner(arm), _runner(eager)
        for runner in (ours, theirs):
            runner.begin(place.parameters, place.buffers)
        names = [name for name, _ in arm.workload.model.named_parameters()]
        floor = tolerance(job.arms[-1].knobs)
        knobs = job.arms[-1].knobs
        if all(knobs.get(knob, choice) == choice for knob, choice in CALLING.items()):
            found.margins += keep_rates(ours, given_rates(fresh_workload(job)), 4, job.seed)
        found.margins += judge_spread(
            spread_of(ours, depth.draws, job.seed + 1), spread_of(theirs, depth.draws, job.seed + 100_001), floor, names
        )
        if not (repeats(ours, job.seed, precision) and repeats(theirs, job.seed, precision)):
            found.notes.append(
                "a seed does not fix the step's random numbers: its gradient was not derived along directions"
            )
            return
        slopes = [slopes_of(runner, depth.directions, job.seed, precision) for runner in (ours, theirs)]
        if not slopes[0]:
            found.notes.append("no direction was found along which the loss could be derived")
            return
        found.directions = len(slopes[0])
        found.margins += judge_slopes(slopes[0], slopes[1], precision)
    finally:
        arm.close()
        eager.close()
        synchronize(question.device)


def _runner(arm: LiveArm) -> Runner:
    runner = Runner(arm.workload, arm)
    arm.settle()
    return runner


def _failed(kind: FailureKind, reason: str) -> Failure:
    return Failure(kind=kind, phase=Phase.NUMERICS, reason=reason[:2000])
