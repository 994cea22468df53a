"""The protocol between the tuner and a measuring process: a Job, answered by JSON messages, one per line. Does not
import torch."""

from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import Field, ValidationError, field_validator, model_validator

from kitsune.base.base_record import Record
from kitsune.class_tables import ClassTable
from kitsune.errors import MeasureError
from kitsune.knobs import Choice
from kitsune.long_proof import LongProof
from kitsune.plan import Environment, checked_knobs
from kitsune.timeline import Timeline
from tuner.records import Failure, Measurement, Phase

MAX_LINE_BYTES = 8 * 1024 * 1024
MAX_TOTAL_BYTES = 32 * 1024 * 1024
MAX_REASON_CHARS = 2000
#: The line that a child reads after its job when it is its turn to time.
GO = b"go\n"
#: Most launches of a timeline; about 1 MB as JSON.
MAX_LAUNCHES = 20_000

Seconds = Annotated[float, Field(ge=0)]


class Limits(Record):
    """Wall-clock limits in seconds: of each phase of a child, and of all together."""

    start_s: float = Field(default=300.0, gt=0, description="starting Python and importing torch")
    build_s: float = Field(default=300.0, gt=0, description="loading the workload, one plain step")
    numerics_s: float = Field(default=900.0, gt=0, description="includes the candidate's first compilation")
    warmup_s: float = Field(default=900.0, gt=0)
    timing_s: float = Field(default=300.0, gt=0)
    total_s: float | None = Field(default=None, gt=0, description="None: the sum of the others")

    def of(self, phase: Phase) -> float:
        limit: float = getattr(self, f"{phase.value}_s")
        return limit if self.total_s is None else min(limit, self.total_s)


class ArmSpec(Record):
    """One way to run the step that a child is asked to measure."""

    name: str = Field(min_length=1, max_length=200)
    knobs: Mapping[str, Choice] = Field(default_factory=dict)

    @field_validator("knobs")
    @classmethod
    def _known_choices(cls, knobs: Mapping[str, Choice]) -> Mapping[str, Choice]:
        return checked_knobs(knobs)


class Job(Record):
    """What a child has to do: inspect a workload, measure `arms` (the baseline first, the candidate last), run the
    long numerics gate on the last arm, or explain the only arm: record the launches of its step.

    `rounds`: number of blocks of every arm, each of at least `block_ms` (None: 50 ms on a GPU, 20 ms on a CPU), within
    `budget_s` seconds of timing. `best_speedup`: after three rounds, timing ends as soon as the candidate cannot reach
    it. `timeline`: whether to return the candidate's planned launches, if any. `folder`: shared by the children of one
    run for caches and locks. `reference_s`: time limit of the numerics reference (None: 60 s). `step_ms`: time of the
    step as given, if it was measured on an idle device. `ahead`: whether a second process may compile the timed code
    while the numerics of the code without random numbers are checked. `end_s`: when the process will be killed, on the
    host's monotonic clock; work that would not fit is skipped. `memory_limit_bytes`: the candidate fails if its step
    needs more; on a CPU its memory is measured only then. `checkpointed`: the step as given does not fit into the
    memory, so its blocks are checkpoints wherever it is run.
    """

    kind: Literal["inspect", "measure", "prove", "explain"] = "measure"
    workload: str = Field(min_length=1, max_length=4096)
    device: str = Field(min_length=1, max_length=100)
    seed: int = 0
    arms: tuple[ArmSpec, ...] = Field(default=(), max_length=16)
    rounds: int = Field(default=15, ge=1, le=1000)
    block_ms: float | None = Field(default=None, gt=0)
    budget_s: float | None = Field(default=None, gt=0)
    numerics: bool = True
    best_speedup: float | None = Field(default=None, gt=0)
    timeline: bool = False
    folder: str | None = Field(default=None, max_length=4096)
    reference_s: float | None = Field(default=None, gt=0)
    step_ms: float | None = Field(default=None, gt=0)
    ahead: bool = False
    end_s: float | None = None
    memory_limit_bytes: int | None = Field(default=None, gt=0)
    checkpointed: bool = False

    @model_validator(mode="after")
    def _arms_fit_the_kind(self) -> Self:
        names = [arm.name for arm in self.arms]
        if self.kind == "measure" and len(names) < 2:
            raise ValueError("a measurement needs a baseline and a candidate")
        if self.kind == "prove" and not names:
            raise ValueError("a proof needs a candidate")
        if self.kind == "explain" and len(names) != 1:
            raise ValueError("one arm is explained at a time")
        if len(set(names)) != len(names):
            raise ValueError("two arms have the same name")
        return self


class Inspection(Record):
    """Description of a workload and of the choices that apply to it, found by running it once as given."""

    environment: Environment
    fingerprint: str = Field(min_length=1, max_length=200)
    model_fingerprint: str = Field(default="", max_length=200)
    batch: str = Field(default="", max_length=10_000, description="shapes of the tensors of x")
    inapplicable: Mapping[str, str] = Field(
        description='"knob=choice" -> why it does not apply, "knob=choice, other=choice" -> why not beside that one'
    )
    random: bool = Field(description="whether a step draws random numbers, as dropout does")
    step_ms: float = Field(gt=0, description="an eager step as given, roughly")
    peak_bytes: int = Field(ge=0)
    checkpointed: bool = Field(default=False, description="whether it fits only with its blocks as checkpoints")
    parameters: int = Field(ge=0, description="number of trainable and frozen parameter elements")
    notes: tuple[str, ...] = ()


Answer = Inspection | Measurement | LongProof | ClassTable
Outcome = Answer | Failure


class Message(Record):
    """One line from the child: one of phase, answer and failure. A measurement may come with a timeline."""

    phase: Phase | None = None
    inspection: Inspection | None = None
    measurement: Measurement | None = None
    proof: LongProof | None = None
    classes: ClassTable | None = None
    failure: Failure | None = None
    timeline: Timeline | None = None
    queued_s: Mapping[Phase, Seconds] = Field(
        default_factory=dict, description="seconds waited for other children's compilations"
    )

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        held = (self.phase, self.inspection, self.measurement, self.proof, self.classes, self.failure)
        if sum(each is not None for each in held) != 1:
            raise ValueError(
                "a message holds exactly one of phase, inspection, measurement, proof, classes and failure"
            )
        if self.timeline is not None and self.measurement is None:
            raise ValueError("a timeline comes with a measurement")
        return self

    @property
    def outcome(self) -> Outcome | None:
        if self.measurement is not None:
            return self.measurement.model_copy(update={"timeline": self.timeline})
        return self.inspection or self.proof or self.classes or self.failure

    def line(self) -> bytes:
        return self.model_dump_json(exclude_none=True).encode() + b"\n"


def parse_message(line: bytes) -> Message:
    """Raises MeasureError when the line is not a valid message."""
    try:
        return Message.model_validate_json(line)
    except ValidationError as error:
        problem = error.errors(include_input=False, include_url=False)[0]
        where = ".".join(str(part) for part in problem["loc"]) or "line"
        raise MeasureError(f"the measuring process sent what is not a message ({where}: {problem['msg']})") from error


class LineReader:
    """Splits an untrusted byte stream into messages, with limits on the length of a line and of the whole stream."""

    def __init__(self, max_line_bytes: int = MAX_LINE_BYTES, max_total_bytes: int = MAX_TOTAL_BYTES) -> None:
        self._rest = bytearray()
        self._total = 0
        self._max_line_bytes = max_line_bytes
        self._max_total_bytes = max_total_bytes

    def feed(self, data: bytes) -> list[Message]:
        """The messages that `data` completes. Raises MeasureError for an invalid message or an exceeded limit."""
        self._total += len(data)
        if self._total > self._max_total_bytes:
            raise MeasureError(f"the measuring process sent more than {self._max_total_bytes} bytes")
        self._rest += data
        *lines, rest = bytes(self._rest).split(b"\n") if b"\n" in data else [bytes(self._rest)]
        self._rest = bytearray(rest)
        if max(map(len, [*lines, rest])) > self._max_line_bytes:
            raise MeasureError(f"the measuring process sent a line of more than {self._max_line_bytes} bytes")
        return [parse_message(line) for line in lines]


_KINDS: Mapping[type[Record], str] = {
    Inspection: "inspect",
    Measurement: "measure",
    LongProof: "prove",
    ClassTable: "explain",
}


def misfit(job: Job, outcome: Answer) -> str | None:
    """Why the outcome is not a valid answer to this job, or None. The child is not trusted."""
    answered = _KINDS[type(outcome)]
    if answered != job.kind:
        return f"it was asked to {job.kind}, and did {answered}"
    if isinstance(outcome, LongProof):
        return None if all(margin.is_kept for margin in outcome.margins) else "its proof has errors beyond their limits"
    if isinstance(outcome, ClassTable):
        return None if outcome.classes else "it recorded no launches"
    if isinstance(outcome, Inspection):
        return None
    asked = [(arm.name, dict(arm.knobs)) for arm in job.arms]
    if asked != [(arm.name, dict(arm.knobs)) for arm in outcome.arms]:
        return "it measured other arms than it was asked to"
    blocks = {len(arm.step_ms) for arm in outcome.arms}
    if len(blocks) != 1 or blocks == {0}:
        return "its arms do not have the same number of blocks"
    if min(step_ms for arm in outcome.arms for step_ms in arm.step_ms) <= 0:
        return "it reports a step that took no time"
    if len(outcome.steps_per_block) != len(outcome.arms) or min(outcome.steps_per_block) < 1:
        return "its blocks have no steps"
    if job.numerics and outcome.numerics is None:
        return "it left out the numerics"
    if outcome.timeline is not None and not (job.timeline and len(outcome.timeline.launches) <= MAX_LAUNCHES):
        return "it sent a timeline that was not asked for or is too long"
    return None


def one_line(text: str, limit: int = MAX_REASON_CHARS) -> str:
    """Makes untrusted text fit for one line of a page or terminal: printable characters only, at most `limit`."""
    line = " ".join("".join(char if char.isprintable() else " " for char in text).split())
    return line if len(line) <= limit else line[: limit - 1] + "…"
