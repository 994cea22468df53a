"""The tuner's records: a Run has Trials, a Trial has a Measurement. Frozen, serialisable as JSON, without torch."""

from collections.abc import Mapping
from datetime import datetime
from enum import StrEnum
from typing import Final

from pydantic import AwareDatetime, Field
from pydantic.json_schema import SkipJsonSchema

from kitsune.base.base_record import Record
from kitsune.knobs import Choice
from kitsune.plan import Environment, Interval, Numerics
from kitsune.run_status import RunStatus as RunStatus
from kitsune.timeline import Timeline

#: The team of everything that has no other team: runs of this machine, and requests of its operators.
DEFAULT_TEAM: Final = "default"


def seconds_between(begin: datetime, end: datetime) -> float:
    """Seconds from `begin` to `end`; 0 if the clock was set back in between."""
    return max(0.0, (end - begin).total_seconds())


class Verdict(StrEnum):
    """What a comparison allows us to say."""

    FASTER = "faster"
    SAME = "same"
    SLOWER = "slower"
    AMBIGUOUS = "ambiguous"  #: undecided; more samples would decide it
    TOO_NOISY = "too_noisy"  #: undecided; more samples on a machine as noisy as this would not decide it
    FITS = "fits"  #: it fits into the memory limit, and no stock configuration that was tried does


class Source(StrEnum):
    """Who proposed a trial."""

    BASELINE = "baseline"  #: the step as given, against itself: the noise floor
    STOCK = "stock"  #: what a user of plain torch would try by hand
    KNOWN = "known"  #: a winner of an earlier run
    SEED = "seed"  #: a preset that an expert would try first
    MODEL = "model"  #: the largest expected improvement by the main-effects model
    DESCENT = "descent"  #: one knob changed from the best so far
    TPE = "tpe"  #: Optuna's tree-structured Parzen estimator
    PLAYOFF = "playoff"  #: the best few against each other in one process
    CONFIRM = "confirm"  #: the winner, measured again in a fresh process
    ABLATION = "ablation"  #: the plan against itself without one or two choices

    @property
    def is_search(self) -> bool:
        return self not in (Source.PLAYOFF, Source.CONFIRM, Source.ABLATION)


class Phase(StrEnum):
    """The parts of a trial, each with its own time limit."""

    START = "start"
    BUILD = "build"
    NUMERICS = "numerics"
    WARMUP = "warmup"
    TIMING = "timing"


class FailureKind(StrEnum):
    """Why a trial has no measurement."""

    DECLINED = "declined"  #: a technique said that it does not apply
    RAISED = "raised"  #: the step raised an error
    OUT_OF_MEMORY = "out_of_memory"
    TOO_LARGE = "too_large"  #: the step ran, and needs more memory than the limit of the run
    TIMEOUT = "timeout"
    CRASHED = "crashed"  #: the child died
    WRONG = "wrong"  #: the numbers differ from the reference by more than is allowed
    NOT_FINITE = "not_finite"  #: NaN or infinity in loss, gradients or parameters


class CauseKind(StrEnum):
    """What can make the times of one step differ."""

    LOAD = "load"
    STEAL = "steal"
    QUOTA = "quota"
    GPU_PROCESS = "gpu_process"
    GPU_CLOCK = "gpu_clock"


class Cause(Record):
    """Something that was seen to disturb a measurement, in words: "other processes kept 5.1 of 8 cores busy"."""

    kind: CauseKind
    seen: str = Field(max_length=500)


class Failure(Record):
    """A trial that gave no measurement, and why, in one line."""

    kind: FailureKind
    phase: Phase
    reason: str = Field(max_length=2000)
    peak_bytes: int | None = Field(default=None, ge=0, description="of a step that is too large for the limit")


class Arm(Record):
    """One way to run the step, timed in blocks interleaved with the other arms of the same process.

    `step_ms[i]` is the mean time of a step in block i; block i of every arm ran within the same round.
    """

    name: str
    knobs: Mapping[str, Choice]
    step_ms: tuple[float, ...]
    peak_bytes: int = Field(ge=0)
    first_step_s: float = Field(ge=0)
    applied: tuple[str, ...] = ()
    declined: Mapping[str, str] = Field(default_factory=dict)


class Measurement(Record):
    """What one child process measured: arms[0] is the baseline."""

    arms: tuple[Arm, ...] = Field(min_length=1)
    steps_per_block: tuple[int, ...]
    dropped_rounds: int = Field(default=0, ge=0, description="rounds left out because the machine was disturbed")
    disturbed: bool = Field(
        default=False, description="whether rounds were kept in which the machine was disturbed, as too few others were"
    )
    causes: tuple[Cause, ...] = ()
    notes: tuple[str, ...] = ()
    numerics: Numerics | None = None
    environment: Environment
    # Not stored with the trial: it is large, rarely read, and stored with the run whose plan it shows
    timeline: SkipJsonSchema[Timeline | None] = Field(default=None, exclude=True, repr=False)


class Comparison(Record):
    """A candidate against a baseline, from paired blocks. speedup = baseline time / candidate time."""

    speedup: Interval
    p_value: float = Field(ge=0, le=1)
    verdict: Verdict
    blocks: int = Field(ge=0)


class Spent(Record):
    """Seconds of a trial by what they went to. A candidate compiles within `numerics_s`, other arms in `warmup_s`."""

    start_s: float = Field(default=0.0, ge=0, description="starting Python and importing torch, where it was not ready")
    build_s: float = Field(default=0.0, ge=0, description="loading the workload and running it as given")
    numerics_s: float = Field(default=0.0, ge=0)
    warmup_s: float = Field(default=0.0, ge=0)
    queued_s: float = Field(default=0.0, ge=0, description="for another child, which compiled the same")
    waited_s: float = Field(default=0.0, ge=0, description="for its turn to be timed")
    timing_s: float = Field(default=0.0, ge=0)

    @property
    def total_s(self) -> float:
        prepared_s = self.start_s + self.build_s + self.numerics_s + self.warmup_s
        return prepared_s + self.queued_s + self.waited_s + self.timing_s


class Trial(Record):
    """One configuration that was tried: either a measurement or the reason why there is none."""

    run_id: str
    number: int = Field(ge=0, description="from 0; pages and the command line count from 1")
    source: Source
    knobs: Mapping[str, Choice]
    measurement: Measurement | None = None
    comparison: Comparison | None = None
    failure: Failure | None = None
    started_at: AwareDatetime
    finished_at: AwareDatetime
    spent: Spent | None = Field(default=None, description="by a monotonic clock; None for trials of older versions")

    @property
    def took_s(self) -> float:
        return seconds_between(self.started_at, self.finished_at) if self.spent is None else self.spent.total_s


class Run(Record):
    """One request to tune one workload on one kind of device."""

    id: str
    team: str = Field(default=DEFAULT_TEAM, description="who sees it: the team of the token that asked for it")
    name: str = Field(default="", description="what its owner calls it")
    workload: str = Field(
        description='"zoo:resnet18?batch=128", "train.py:make_workload", "model.ksn", "archive" or "live"'
    )
    archive: str | None = Field(default=None, description="SHA-256 of the submitted archive, when that is the workload")
    fingerprint: str = ""
    device: str = Field(
        default="cuda:0", description='where it runs; of a queued submit what it asks for: "cuda", "cpu" or "" for any'
    )
    budget_trials: int | None = Field(default=None, ge=1)
    budget_s: float | None = Field(default=None, gt=0)
    memory_limit_bytes: int | None = Field(default=None, gt=0, description="of the peak memory of a step")
    seed: int = 0
    status: RunStatus = RunStatus.QUEUED
    attempt: int = Field(default=0, ge=0, description="fencing token: grows with every claim")
    deaths: int = Field(default=0, ge=0, description="workers in a row that vanished without one more trial stored")
    worker: str | None = None
    created_at: AwareDatetime
    started_at: AwareDatetime | None = None
    heartbeat_at: AwareDatetime | None = None
    lease_until: AwareDatetime | None = None
    finished_at: AwareDatetime | None = None
    environment: Environment | None = None
    inapplicable: Mapping[str, str] = Field(
        default_factory=dict,
        description='"knob=choice" -> why it was never tried on this device and model; "knob=choice, other=choice" -> '
        "why it was never tried beside that choice of another knob",
    )
    plan_id: str | None = None
    verdict: Verdict | None = None
    error: str | None = None
    trials: int = Field(default=0, ge=0, description="how many are stored, of every source")
    speedup: Interval | None = Field(
        default=None,
        description="of the plan over the best stock configuration; null without a plan, and 1 with low and high at 1, "
        "which nothing measured, where the plan is that configuration",
    )
    memory_ratio: float | None = Field(
        default=None, ge=0, description="peak memory of the plan, as a part of that of the best stock configuration"
    )
    tags: tuple[str, ...] = ()
    note: str = ""

    @property
    def took_s(self) -> float | None:
        """From its claim to its end; None of a run that has not ended."""
        if self.started_at is None or self.finished_at is None:
            return None
        return seconds_between(self.started_at, self.finished_at)

    def evolve(self, **changes: object) -> "Run":
        return self.model_copy(update=changes)
