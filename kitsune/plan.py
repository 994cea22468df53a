"""Plan: the choice of each knob, the environment it holds for, and the evidence for it. Does not import torch."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, Literal, NoReturn, Self

from pydantic import ConfigDict, Field, ValidationError, field_validator

from kitsune.base.atomic_write import write_whole
from kitsune.base.base_record import Record, canonical_json
from kitsune.base.digest import digest_of
from kitsune.errors import PlanError
from kitsune.knobs import KNOBS, Choice
from kitsune.long_proof import LongProof

FORMAT_VERSION: Final = 1
MAX_PLAN_BYTES = 256 * 1024
#: A difference between two plans: the path of a field, and its value in each plan.
Row = tuple[str, str, str]
#: The possible verdicts of a plan.
Said = Literal["faster", "same", "ambiguous", "too_noisy", "fits"]


class Match(StrEnum):
    """How well the environment of a plan matches this machine."""

    EXACT = "exact"
    COMPATIBLE = "compatible"
    REFUSED = "refused"


class Environment(Record):
    """The machine and software that a measurement holds for."""

    device: Literal["cuda", "cpu"]
    gpu: str = Field(description="name of the GPU, or of the CPU when there is none")
    compute_capability: str = Field(default="", description='"9.0"; empty on a CPU')
    memory_bytes: int = Field(ge=0)
    driver: str = ""
    cuda: str = ""
    torch: str
    triton: str = ""
    python: str
    kitsune: str

    def match(self, here: "Environment") -> tuple[Match, str]:
        """Whether a plan measured in this environment may be applied `here`, and the reason."""
        if self.device != here.device or self.gpu != here.gpu:
            return Match.REFUSED, f"tuned on {self.gpu} ({self.device}), this is {here.gpu} ({here.device})"
        for name in ("compute_capability", "memory_bytes", "torch", "triton", "cuda", "driver"):
            was, now = getattr(self, name), getattr(here, name)
            if was != now:
                return Match.COMPATIBLE, f"tuned with {name} {was}, this is {now}"
        return Match.EXACT, "same machine type and software"


class Interval(Record):
    """A median with its 95 % confidence interval."""

    median: float
    low: float
    high: float

    @property
    def is_itself(self) -> bool:
        """Whether this is the ratio of a step to itself: 1 by definition, so there is no interval."""
        return self.low == self.median == self.high == 1


class Numerics(Record):
    """What the numerics check found: errors relative to a high-precision reference, and their tolerances.

    Each error is ‖candidate - reference‖ / ‖reference‖ (for parameters: over the size of the update).
    """

    steps: int = Field(ge=1)
    loss_error: float = Field(ge=0)
    gradient_error: float = Field(ge=0)
    parameter_error: float = Field(ge=0)
    loss_allowed: float = Field(ge=0)
    gradient_allowed: float = Field(ge=0)
    parameter_allowed: float = Field(ge=0)
    note: str = ""


class Evidence(Record):
    """Why the plan was chosen. Every number comes from samples taken after the choice was made."""

    run_id: str
    verdict: Said = Field(
        description="ambiguous and too_noisy: the samples do not decide, so the best stock configuration was kept; "
        "fits: no stock configuration that was tried fits into the memory limit, so the baseline is the step as given"
    )
    baseline: str = Field(description="name of the best stock configuration, which the speedup is relative to")
    baseline_step_ms: float = Field(gt=0)
    step_ms: float = Field(gt=0)
    speedup: Interval
    prediction: Interval | None = Field(
        default=None, description="95 % prediction interval of the speedup measured in one more fresh process"
    )
    process_spread: float | None = Field(
        default=None, ge=0, description="standard deviation of ln(speedup) between processes, if there is a gain"
    )
    process_degrees: int = Field(default=0, ge=0, description="degrees of freedom of process_spread")
    eager_step_ms: float = Field(gt=0, description="the unmodified step")
    speedup_over_eager: Interval
    baseline_peak_bytes: int = Field(ge=0)
    peak_bytes: int = Field(ge=0)
    first_step_s: float = Field(ge=0, description="time to the first tuned step: compiling, warming up, capturing")
    blocks: int = Field(ge=1, description="blocks of samples, over all processes")
    processes: int = Field(default=1, ge=1, description="fresh processes that timed the plan and its baseline")
    note: str = Field(default="", description="why the samples do not decide, and what to do")
    samples_sha256: str
    numerics: Numerics
    proof: LongProof | None = Field(default=None, description="result of the long numerics check of the plan")
    budget_s: float | None = Field(default=None, ge=0, description="budget of the search; None: a number of trials")
    memory_limit_bytes: int | None = Field(default=None, gt=0, description="limit of the search for the peak memory")
    interrupted: bool = Field(default=False, description="whether the user ended the search early")


#: Fields added later. At their default they are left out of the hashed content, so that ids of older plans stay valid.
LATER_EVIDENCE: Final = (
    "prediction",
    "process_spread",
    "process_degrees",
    "processes",
    "note",
    "proof",
    "budget_s",
    "memory_limit_bytes",
    "interrupted",
)


class Choices(dict[str, Choice]):
    """Immutable dict of knob -> choice: the evidence of a plan holds for exactly these choices."""

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError("the choices of a plan cannot be changed; make another plan by Plan.by_hand")

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (dict(self),)


class Plan(Record):
    """The choice of every knob, with its evidence. Equal plans have equal content; `plan_id` is its SHA-256."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    format_version: Literal[1] = FORMAT_VERSION
    knobs: Mapping[str, Choice] = Field(default_factory=Choices, description="choices that differ from the default")
    fingerprint: str = Field(default="", description="fingerprint of the workload; empty for a plan written by hand")
    model_fingerprint: str = Field(default="", description="fingerprint of model and optimizer alone, if known")
    batch: str = Field(default="", description='shapes of the tensors of x in the measured batch: "128x3x32x32"')
    environment: Environment | None = None
    evidence: Evidence | None = None

    @field_validator("knobs")
    @classmethod
    def _known_choices(cls, knobs: Mapping[str, Choice]) -> Mapping[str, Choice]:
        return Choices(checked_knobs(knobs))

    @property
    def was_interrupted(self) -> bool:
        """Whether the user interrupted the search that found this plan."""
        return self.evidence is not None and self.evidence.interrupted

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """As pydantic's, but validates new knobs. Raises PlanError naming the knob."""
        if update is not None and "knobs" in update:
            update = {**update, "knobs": Choices(checked_knobs(update["knobs"]))}
        return super().model_copy(update=update, deep=deep)

    @classmethod
    def by_hand(cls, **knobs: Choice) -> Self:
        """A plan without evidence, chosen by the user. Raises PlanError naming the knob that is not valid."""
        return cls(knobs=checked_knobs(knobs))

    def choice(self, knob: str) -> Choice:
        """The choice of this knob, or its default where the plan does not set it."""
        return self.knobs.get(knob, KNOBS[knob].default)

    def is_of(self, fingerprint: str) -> bool:
        """Whether it was tuned for this step, or for this model and optimizer with any loss."""
        return bool(fingerprint) and fingerprint in (self.fingerprint, self.model_fingerprint)

    @property
    def plan_id(self) -> str:
        """The SHA-256 of the plan's canonical JSON, in hex. Equal plans have equal ids."""
        return digest_of(self.canonical_json())

    def canonical_json(self) -> str:
        """The canonical JSON of the plan, which `plan_id` is the digest of."""
        content = self.model_dump(mode="json")
        if self.evidence is not None:
            for name in LATER_EVIDENCE:
                if content["evidence"][name] == Evidence.model_fields[name].default:
                    del content["evidence"][name]
        return canonical_json(content)

    def to_json(self) -> dict[str, Any]:
        """The plan as plain JSON data, with its id."""
        return {**self.model_dump(mode="json"), "plan_id": self.plan_id}

    @classmethod
    def from_json(cls, value: Any) -> Self:
        """The plan of what `to_json` returned.

        Raises PlanError naming the field that is unknown, out of range, of another version, or altered since it was
        written.
        """
        if not isinstance(value, dict):
            raise PlanError("plan", "is not a JSON object")
        content = dict(value)
        claimed = content.pop("plan_id", None)
        version = content.get("format_version")
        if type(version) is not int or version != FORMAT_VERSION:
            raise PlanError("format_version", f"is {version!r}; this Kitsune reads version {FORMAT_VERSION}")
        try:
            plan = cls.model_validate(content)
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(str(part) for part in first["loc"]) or "plan"
            raise PlanError(field, first["msg"]) from error
        if claimed != plan.plan_id:
            raise PlanError("plan_id", "does not match the content: the plan was altered after it was written")
        return plan

    def save(self, path: str | Path) -> None:
        """Writes the plan to a JSON file, atomically. Raises OSError."""
        write_whole(path, (json.dumps(self.to_json(), indent=2, sort_keys=True) + "\n").encode())

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Reads a file written by `save`. Raises PlanError as `from_json` does, and OSError."""
        data = Path(path).read_bytes()
        if len(data) > MAX_PLAN_BYTES:
            raise PlanError("plan", f"is larger than {MAX_PLAN_BYTES} bytes")
        try:
            value = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise PlanError("plan", "is not JSON") from error
        return cls.from_json(value)


@dataclass(frozen=True, slots=True)
class PlanQuery:
    """The step that a plan is wanted for: the fingerprint of the step or of its model, and `Plan.batch` if known."""

    fingerprint: str
    batch: str = ""


def shapes_text(shapes: Iterable[Sequence[int]]) -> str:
    """`Plan.batch` for tensors of these shapes, independent of their order: "16x128,16x128"."""
    return ",".join(sorted("x".join(map(str, shape)) or "scalar" for shape in shapes))


def checked_knobs(knobs: Mapping[str, Choice]) -> dict[str, Choice]:
    """The choices that differ from the default, validated. Raises PlanError naming the knob."""
    checked = {}
    for name, choice in sorted(knobs.items()):
        knob = KNOBS.get(name)
        if knob is None:
            raise PlanError(f"knobs.{name}", f"is not a knob; there are {', '.join(KNOBS)}")
        is_choice = isinstance(choice, str | int) and not isinstance(choice, bool)  # True == 1
        if not is_choice or choice not in knob.choices:
            raise PlanError(f"knobs.{name}", f"cannot be {choice!r}; choose one of {', '.join(map(str, knob.choices))}")
        if choice != knob.default:
            checked[name] = choice
    return checked


def differences(one: Plan, other: Plan) -> list[Row]:
    """The differences of two plans: knobs in table order, then evidence, then environment. Empty for equal plans."""
    chosen = ((f"knobs.{name}", str(one.choice(name)), str(other.choice(name))) for name in KNOBS)
    first, second = ({**_flat(plan.evidence), **_flat(plan.environment)} for plan in (one, other))
    names = [*first, *(name for name in second if name not in first)]
    rest = ((name, first.get(name, "-"), second.get(name, "-")) for name in names)
    rows = [*chosen, *rest, ("fingerprint", one.fingerprint or "-", other.fingerprint or "-")]
    return [row for row in rows if row[1] != row[2]]


def _flat(part: Any) -> dict[str, str]:
    """The fields of a record by their dotted paths."""
    if part is None:
        return {}
    kind = type(part).__name__.lower()
    return {f"{kind}.{path}": value for path, value in _paths(part.model_dump(mode="json"))}


def _paths(fields: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in fields.items():
        if isinstance(value, Mapping):
            yield from ((f"{name}.{path}", text) for path, text in _paths(value))
        else:
            yield name, f"{value:.4g}" if isinstance(value, float) else str(value)
