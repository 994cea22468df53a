"""Builds the step of an arm on its own copy of the workload, and measures its compile time and peak memory."""

import contextlib
import gc
import time
from collections.abc import Iterator

import torch

from kitsune.base.byte_sizes import size_words
from kitsune.base.environment import is_on
from kitsune.device.backend import (
    allocated_bytes,
    graph_pool_bytes,
    make_current,
    peak_bytes,
    pick_device,
    release_cached,
    reset_peak,
    synchronize,
)
from kitsune.plan import Plan
from kitsune.step import TrainStep
from kitsune.techniques import tolerance
from kitsune.techniques.precision import precision_of
from kitsune.techniques.recompute import checkpoint_blocks
from kitsune.techniques.technique import Tolerance
from kitsune.timeline import Timeline
from kitsune.workload import Workload
from tuner.building.dropout import disable_dropout
from tuner.building.host_memory import peak_of_step
from tuner.measuring.compile_lock import turn_for
from tuner.measuring.protocol import MAX_LAUNCHES, ArmSpec, Job
from tuner.records import Arm, Failure, FailureKind, Phase
from tuner.sandbox.confinement import bound_memory, runs_code
from tuner.workloads.loader import load_workload

MAX_SETTLING_STEPS = 32
DOES_NOT_FIT = "the step as given ran out of memory; where it is run, its blocks are checkpoints (recompute=blocks)"


def prepare(job: Job) -> None:
    """Selects the device, limits memory and sets the seed. Every process that runs the job's step calls it first."""
    device = pick_device(job.device)
    make_current(device)
    if device.type == "cpu" and is_on("confine", default=True) and not runs_code(job.workload):
        bound_memory()
    torch.manual_seed(job.seed)


def fresh_workload(job: Job, *, randomness: bool = True, as_given: bool = True) -> Workload:
    """The job's workload with the weights of the job's seed. Without randomness, all its dropouts have p = 0.

    `as_given`: whether it is run as given, so that its blocks become checkpoints where the job says so.
    """
    workload = load_workload(job.workload, job.device, job.seed, randomness=randomness)
    if job.checkpointed and as_given:
        checkpoint_blocks(workload.model)
    if not randomness:
        disable_dropout(workload.model)
    return workload


class Rates:
    """The learning rates of an optimizer, which the numerics gate and timing scale and reset."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._groups = [group for group in optimizer.param_groups if "lr" in group]
        self._given = [float(group["lr"]) for group in self._groups]

    def scale(self, factor: float) -> None:
        """Sets every learning rate to `factor` times the given one, as a scheduler would."""
        for group, given in zip(self._groups, self._given, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(given * factor)
            else:
                group["lr"] = given * factor


class LiveArm:
    """A step with an arm's choices applied, on its own model and optimizer, with its compile time and peak memory."""

    def __init__(self, job: Job, spec: ArmSpec, *, randomness: bool = True) -> None:
        """Raises DeclinedError when a choice cannot be applied, and whatever the workload raises."""
        self.spec = spec
        self.limit_bytes = job.memory_limit_bytes
        self.device = pick_device(job.device)
        synchronize(self.device)
        gc.collect()  # garbage freed later (a step in a cycle with its hooks) would be subtracted from this arm's peak
        release_cached(self.device)  # so that memory left by an earlier arm's graphs does not count as in use
        self._before_bytes = allocated_bytes(self.device) + graph_pool_bytes(self.device)
        self.workload = fresh_workload(job, randomness=randomness, as_given=not spec.knobs)
        begin = time.perf_counter()
        plan = Plan.by_hand(**spec.knobs) if spec.knobs else None
        model, optimizer = self.workload.model, self.workload.optimizer
        self.step = TrainStep(model, self.workload.loss_fn, optimizer, plan, on_decline="raise")
        self.first_step_s = time.perf_counter() - begin
        self.peak_bytes = 0
        self._first = turn_for(spec.knobs, randomness=randomness)
        self.rates = Rates(optimizer)

    @property
    def precision(self) -> str:
        """The precision it computes in: a model given in half precision has that of most of its parameters."""
        return precision_of(self.spec.knobs, self.workload.model.parameters())

    @property
    def tolerance(self) -> Tolerance:
        """The errors against a reference that are allowed in any case."""
        return tolerance({**self.spec.knobs, "precision": self.precision})

    def __call__(self, x: object, y: object) -> torch.Tensor:
        """One step. Its time is added to `first_step_s` while the arm still compiles, warms up or captures."""
        if self.step.is_settled:
            return self.step(x, y)
        first, self._first = self._first, contextlib.nullcontext()
        with first:
            begin = time.perf_counter()
            loss = self.step(x, y)
            synchronize(self.device)
            self.first_step_s += time.perf_counter() - begin
        return loss

    def run(self) -> torch.Tensor:
        """One step on the example batch."""
        return self.step(*self.workload.batch)

    def settle(self) -> bool:
        """Runs steps on the example batch until nothing more will be compiled or captured.

        Returns False when that is not so after MAX_SETTLING_STEPS.
        """
        for _ in range(MAX_SETTLING_STEPS):
            if self.step.is_settled:
                break
            self(*self.workload.batch)
        return self.step.is_settled

    def weigh(self) -> None:
        """Measures the peak memory of the settled arm; call it before another arm is built.

        Memory needed only for compiling and warming up does not count; private pools of graphs, also Inductor's, do. On
        a CPU it is measured if there is a limit.
        """
        if self.device.type == "cpu":
            self.peak_bytes = peak_of_step(self.run, self.workload) if self.limit_bytes else 0
            return
        gc.collect()
        release_cached(self.device)
        reset_peak(self.device)
        for _ in range(2):
            self.run()
        synchronize(self.device)
        self.peak_bytes = max(0, peak_bytes(self.device) + graph_pool_bytes(self.device) - self._before_bytes)

    def too_large(self, phase: Phase) -> Failure | None:
        """The Failure of an arm that was weighed and needs more memory than the job's limit."""
        if self.limit_bytes is None or self.peak_bytes <= self.limit_bytes:
            return None
        reason = f"a step needs {size_words(self.peak_bytes)}, more than the limit of {size_words(self.limit_bytes)}"
        return Failure(kind=FailureKind.TOO_LARGE, phase=phase, reason=reason, peak_bytes=self.peak_bytes)

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Memory that is allocated in the block and kept does not count towards the arm's peak."""
        before_bytes = allocated_bytes(self.device)
        yield
        self._before_bytes += allocated_bytes(self.device) - before_bytes

    def is_random(self) -> bool:
        """Whether the loss of one batch differs from step to step with fixed weights (learning rate 0)."""
        self.rates.scale(0.0)
        losses = {float(self.run()) for _ in range(4)}
        self.rates.scale(1.0)
        return len(losses) > 1

    def record(self, step_ms: tuple[float, ...]) -> Arm:
        report = self.step.report
        return Arm(
            name=self.spec.name,
            knobs=self.spec.knobs,
            step_ms=step_ms,
            peak_bytes=self.peak_bytes,
            first_step_s=self.first_step_s,
            applied=tuple(f"{knob}={choice}" for knob, choice in report.applied.items()),
            declined=report.declined,
        )

    def timeline(self) -> Timeline | None:
        """The planned launches of the step, or None; at most MAX_LAUNCHES, the longest ones. Times a few kernels."""
        report = self.step.report
        timeline = report.timeline(MAX_LAUNCHES)
        if timeline is None or report.picture is None:
            return None
        return timeline.model_copy(update={"classes": report.picture.class_times()})

    def close(self) -> None:
        self.step.close()
