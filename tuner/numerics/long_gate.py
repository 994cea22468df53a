"""The winner's numbers, looked at for longer: a job's candidate in, a LongProof or the Failure that it is out.

The candidate trains at the given rates. At many of its settled steps a reference is put where it stands, and the last
updates are recomputed in float64; with random numbers in the step, these are looked at with dropout on.
"""

import gc
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final

import torch

from kitsune.device.backend import pick_device, release_cached, synchronize
from kitsune.long_proof import LongProof, Margin
from kitsune.techniques import tolerance
from tuner.building.arms import LiveArm, fresh_workload
from tuner.building.dropout import dropout_off
from tuner.building.probe import Probe, draws_random, probe_workload
from tuner.measuring.protocol import Job
from tuner.numerics.depth import depth_of
from tuner.numerics.dropout_gate import (
    Runner,
    given_rates,
    judge_slopes,
    judge_spread,
    keep_rates,
    repeats,
    slopes_of,
    spread_of,
)
from tuner.numerics.long_training import Question, Training, failed, plain_losses, yardstick_losses
from tuner.numerics.restarts import eager_arm, place_of
from tuner.numerics.tensor_errors import judge_windows, window_errors
from tuner.numerics.trace_errors import nearest
from tuner.numerics.training_trace import batches_of, begin, start_of
from tuner.records import Failure, FailureKind, Phase

WINDOW: Final = 10
DOUBLE_SLOWDOWN: Final = {"cpu": 3.0, "cuda": 32.0}
#: Of the budget; a reference that takes more is in fp32.
DOUBLE_SHARE: Final = 0.3
BUDGET_S: Final = 120.0
#: Of the time until the process is ended; the rest is for what cannot be told beforehand.
END_SHARE: Final = 0.9
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
    settling_s: float = 0.0  # of the candidate: to compile, warm up and capture
    margins: list[Margin] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def is_right(self) -> bool:
        return all(margin.is_kept for margin in self.margins)

    def verdict(self) -> LongProof | Failure:
        wrong = [margin for margin in self.margins if not margin.is_kept]
        if wrong:
            return failed(FailureKind.WRONG, str(nearest(wrong)))
        return LongProof(
            steps=self.steps,
            restarts=self.restarts,
            updates=self.updates,
            directions=self.directions,
            margins=tuple(self.margins),
            notes=tuple(dict.fromkeys(note[:2000] for note in self.notes)),
        )


def prove_job(job: Job, enter: Enter) -> LongProof | Failure:
    """As `prove_long`, from the beginning. `enter` is told when a phase begins."""
    begin_s = time.monotonic()
    end_s = math.inf if job.end_s is None else begin_s + END_SHARE * (job.end_s - begin_s)
    probe = probe_workload(job)
    if isinstance(probe, Failure):
        return probe
    enter(Phase.NUMERICS)
    return prove_long(job, probe, end_s=end_s)


def prove_long(
    job: Job, probe: Probe, budget_s: float | None = None, *, end_s: float = math.inf
) -> LongProof | Failure:
    """Of the job's last arm. Within `budget_s`, or the job's, or two minutes, without what compiling takes.

    What would not end by `end_s`, compiling included, is left out, and the proof's notes say so.

    Raises DeclinedError when a choice cannot be applied, and whatever the candidate raises.
    """
    asked, found = _question(job, probe, budget_s or job.budget_s or BUDGET_S, end_s)
    if not probe.random:
        failure = _within_memory(asked, found)
        return failure or found.verdict()
    with dropout_off():
        is_silent = not draws_random(fresh_workload(job, randomness=False), asked.device)
        failure = _within_memory(replace(asked, randomness=False), found) if is_silent else None
    if not is_silent:
        found.notes.append("random numbers of the step cannot be switched off: no step is compared with a reference's")
        failure = _within_memory(replace(asked, compares=False), found)
    if failure is not None:
        return failure
    if not found.is_right:
        return found.verdict()
    needed_s = found.settling_s + asked.depth.masks_s(asked.step_s)
    if not asked.has_time_for(needed_s):
        found.notes.append(f"no time for what the step does with random numbers, about {needed_s:.0f} s")
        return found.verdict()
    torch.compiler.reset()  # what was compiled has no dropout
    _look_at_masks(asked, found)
    return found.verdict()


def _question(job: Job, probe: Probe, budget_s: float, end_s: float) -> tuple[Question, Found]:
    """How deeply to look in this time, and what is to be said of it."""
    device = pick_device(job.device)
    step_s = min(probe.step_ms, job.step_ms or probe.step_ms) / 1e3
    double_s = DOUBLE_SLOWDOWN[device.type] * step_s
    double = 10 * double_s <= DOUBLE_SHARE * budget_s
    depth, note = depth_of(step_s, double_s if double else step_s, budget_s, is_random=probe.random)
    question = Question(
        job=job,
        depth=depth,
        device=device,
        batches=batches_of(fresh_workload(job).batch, job.seed, vary=probe.vary),
        double=double,
        randomness=True,
        step_s=step_s,
        end_s=end_s,
    )
    return question, Found(notes=[*filter(None, [note]), *probe.notes])


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
    given = plain_losses(question, plain)
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
        found.settling_s = training.settling_s
        found.steps, found.restarts, found.updates = training.settled, training.restarts, training.updates
        found.margins += training.margins()
    finally:
        arm.close()
    if not question.compares or not found.is_right:
        return None
    if question.has_time_for(question.depth.yardsticks * len(training.losses) * question.step_s):
        ours = training.losses
        del arm, training
        theirs = [window_errors(losses, given, WINDOW) for losses in yardstick_losses(question, start, len(ours))]
        found.margins.append(judge_windows(window_errors(ours, given, WINDOW), theirs))
    else:
        found.notes.append("no time for trainings beside this one: its losses were not compared")
    return None


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
