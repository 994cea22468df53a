"""The long numerics gate, which the winner of a run must pass.

The candidate trains at the given learning rates. At many of its settled steps a reference starts from the candidate's
current state and takes the same step, and the last optimizer updates are recomputed in float64. A step with random
numbers is also checked with dropout on.
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
from tuner.building.arms import LiveArm, fresh_workload
from tuner.building.dropout import dropout_off
from tuner.building.probe import Probe, draws_random, probe_workload
from tuner.measuring.protocol import Job
from tuner.numerics.depth import depth_of
from tuner.numerics.dropout_gate import (
    SeededStep,
    given_rates,
    judge_slopes,
    judge_spread,
    keep_rates,
    repeats,
    slopes_of,
    spread_of,
)
from tuner.numerics.long_training import ProofTask, Training, failed, plain_losses, yardstick_losses
from tuner.numerics.restarts import eager_arm
from tuner.numerics.tensor_errors import judge_windows, window_errors
from tuner.numerics.trace_errors import ModelState, nearest
from tuner.numerics.training_trace import batches_of, load_state, model_state, start_of
from tuner.records import Failure, FailureKind, Phase

WINDOW: Final = 5  # steps
DOUBLE_SLOWDOWN: Final = {"cpu": 3.0, "cuda": 32.0}
#: Share of the budget; a float64 reference that would take more is in fp32.
DOUBLE_SHARE: Final = 0.3
BUDGET_S: Final = 120.0
#: Share of the time until the process is killed; the rest is for what cannot be estimated.
END_SHARE: Final = 0.9
#: Choices with which the modules of a model are called at every step, so that forward hooks run.
CALLING: Final = {"compile": "off", "capture": "none", "fusion": "off"}

Enter = Callable[[Phase], None]


@dataclass(slots=True)
class Results:
    """Results of the gate so far."""

    steps: int = 0
    restarts: int = 0
    updates: int = 0
    directions: int = 0
    settling_s: float = 0.0  # time of the candidate to compile, warm up and capture
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
    """Probes the workload and then runs `prove_long`. Calls `enter` when a phase begins."""
    begin_s = time.monotonic()
    end_s = math.inf if job.end_s is None else begin_s + END_SHARE * (job.end_s - begin_s)
    probe = probe_workload(job)
    if isinstance(probe, Failure):
        return probe
    enter(Phase.NUMERICS)
    return prove_long(job, probe, end_s=end_s)


def prove_long(job: Job, probe: Probe, *, end_s: float = math.inf) -> LongProof | Failure:
    """Checks the job's last arm. Takes the job's budget, or two minutes, not counting compilation.

    Checks that would not end by `end_s`, with compilation, are skipped, and the proof's notes say so.

    Raises DeclinedError when a choice cannot be applied, and whatever the candidate raises.
    """
    task, results = _task(job, probe, job.budget_s or BUDGET_S, end_s)
    if not probe.random:
        failure = _within_memory(task, results)
        return failure or results.verdict()
    with dropout_off():
        is_deterministic = not draws_random(fresh_workload(job, randomness=False), task.device)
        failure = _within_memory(replace(task, randomness=False), results) if is_deterministic else None
    if not is_deterministic:
        results.notes.append(
            "random numbers of the step cannot be switched off: no step is compared with a reference's"
        )
        failure = _within_memory(replace(task, compares=False), results)
    if failure is not None:
        return failure
    if not results.is_right:
        return results.verdict()
    needed_s = results.settling_s + task.depth.masks_s(task.step_s)
    if not task.has_time_for(needed_s):
        results.notes.append(f"no time for the checks with random numbers, about {needed_s:.0f} s")
        return results.verdict()
    torch.compiler.reset()  # the compiled code is without dropout
    _check_random_numbers(task, results)
    return results.verdict()


def _task(job: Job, probe: Probe, budget_s: float, end_s: float) -> tuple[ProofTask, Results]:
    """The work that fits the budget, and results that hold only notes so far."""
    device = pick_device(job.device)
    step_s = min(probe.step_ms, job.step_ms or probe.step_ms) / 1e3
    double_s = DOUBLE_SLOWDOWN[device.type] * step_s
    double = 10 * double_s <= DOUBLE_SHARE * budget_s
    depth, note = depth_of(step_s, double_s if double else step_s, budget_s, is_random=probe.random)
    task = ProofTask(
        job=job,
        depth=depth,
        device=device,
        batches=batches_of(fresh_workload(job).batch, job.seed, vary=probe.vary),
        double=double,
        randomness=True,
        step_s=step_s,
        end_s=end_s,
    )
    return task, Results(notes=[*filter(None, [note]), *probe.notes])


def _within_memory(task: ProofTask, results: Results) -> Failure | None:
    """Trains the candidate, with fewer checks where a reference beside it does not fit in memory; notes say so."""
    attempts = (
        (task, ""),
        (replace(task, compares=False), "no memory for a reference beside the candidate: no step was compared"),
        (replace(task, compares=False, recomputes=False), "no memory to recompute updates: none was checked"),
    )
    for attempt, note in attempts:
        try:
            failure = _train(attempt, results, *([note] if note else []))
        except torch.OutOfMemoryError:
            if attempt is attempts[-1][0]:
                raise
            gc.collect()
            release_cached(task.device)
            continue
        return failure
    raise AssertionError("the last attempt returns or raises")


def _train(task: ProofTask, results: Results, *notes: str) -> Failure | None:
    """Trains the candidate, and adds the results of the comparisons to `results`."""
    plain = fresh_workload(task.job, randomness=task.randomness)
    start = start_of(plain)
    given = plain_losses(task, plain)
    del plain
    length = next((index for index, loss in enumerate(given) if not math.isfinite(loss)), len(given))
    if length < len(given):
        results.notes.append(f"the step as given is not finite after {length} steps at its rates: no more were made")
    arm = LiveArm(task.job, task.job.arms[-1], randomness=task.randomness)
    try:
        load_state(arm.workload, start)
        training = Training(task, arm, length)
        failure = training.run()
        if failure is not None:
            return failure
        results.notes += [*notes, *training.notes]
        results.settling_s = training.settling_s
        results.steps, results.restarts, results.updates = training.settled, training.restarts, training.updates
        results.margins += training.margins()
    finally:
        arm.close()
    if not task.compares or not results.is_right:
        return None
    if task.has_time_for(task.depth.yardsticks * len(training.losses) * task.step_s):
        ours, shows_rounding = training.losses, training.shows_rounding
        del arm, training
        yardsticks = yardstick_losses(task, start, len(ours), shows_rounding=shows_rounding)
        theirs = [window_errors(losses, given, WINDOW) for losses in yardsticks]
        results.margins.append(judge_windows(window_errors(ours, given, WINDOW), theirs))
    else:
        results.notes.append("no time for yardstick trainings: losses were not compared")
    return None


def _check_random_numbers(task: ProofTask, results: Results) -> None:
    """Compares the candidate with eager in its precision, with random numbers on and from the same weights."""
    job, depth = task.job, task.depth
    arm = LiveArm(job, job.arms[-1])
    precision = arm.precision
    eager = eager_arm(job, randomness=True)
    try:
        state = model_state(eager.workload)
        ours, theirs = _runner(arm, state), _runner(eager, state)
        names = [name for name, _ in arm.workload.model.named_parameters()]
        knobs = job.arms[-1].knobs
        if all(knobs.get(knob, choice) == choice for knob, choice in CALLING.items()):
            results.margins += keep_rates(ours, given_rates(fresh_workload(job)), 4, job.seed)
        spreads = spread_of(ours, depth.draws, job.seed + 1), spread_of(theirs, depth.draws, job.seed + 100_001)
        results.margins += judge_spread(*spreads, arm.tolerance, names)
        if not (repeats(ours, job.seed, precision) and repeats(theirs, job.seed, precision)):
            results.notes.append(
                "a seed does not fix the step's random numbers: directional derivatives were not checked"
            )
            return
        slopes = [slopes_of(runner, depth.directions, job.seed, precision) for runner in (ours, theirs)]
        if not slopes[0]:
            results.notes.append("directional derivatives were not checked: none could be measured")
            return
        results.directions = len(slopes[0])
        results.margins += judge_slopes(slopes[0], slopes[1], precision)
    finally:
        arm.close()
        eager.close()
        synchronize(task.device)


def _runner(arm: LiveArm, start: ModelState) -> SeededStep:
    runner = SeededStep(arm.workload, arm, start)
    arm.settle()
    return runner
