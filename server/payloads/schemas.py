"""Schemas of request bodies, parameters and answers, with their OpenAPI examples, and helpers to build answers."""

import re
from typing import Annotated, Any, Final, Literal, Self

from fastapi import Path
from fastapi.responses import Response
from pydantic import AwareDatetime, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from kitsune.base.base_record import Record, canonical_json
from kitsune.base.byte_sizes import parse_memory_limit
from kitsune.base.durations import seconds_of
from kitsune.class_tables import ClassTables
from kitsune.errors import SettingsError
from kitsune.plan import Plan
from kitsune.timeline import Timeline
from server.payloads.names import MAX_NAME, is_showable
from server.payloads.problems import API, MEDIA_TYPE, TITLES
from tuner.records import Run, Trial
from tuner.store.queries.archives import StoredArchive
from tuner.store.queries.submits import Request

#: Longest budget, so that no run blocks a worker forever.
MAX_BUDGET_S: Final = 30 * 86400
_SHA256: Final = r"^[0-9a-f]{64}$"
_LINE: Final = r"^[^\x00-\x1f\x7f-\x9f]*$"
_PROSE: Final = r"^[^\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]*$"
_EXAMPLE_ID: Final = "06g0t3n8q4v0e4b6k1m2z5y7xc"
_EXAMPLE_SHA256: Final = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"

_MOMENT: Final = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)", re.ASCII | re.IGNORECASE)


def _of_rfc_3339(value: Any) -> Any:
    """Raises ValueError for what only pydantic accepts as a time: a number of seconds, a date."""
    if isinstance(value, str) and not _MOMENT.fullmatch(value):
        raise ValueError("is not written as 2026-11-22T18:00:00Z")
    return value


RUN_ID: Final = r"^[A-Za-z0-9_-]{1,64}$"
RunId = Annotated[str, Path(pattern=RUN_ID, examples=[_EXAMPLE_ID])]
TokenId = Annotated[str, Path(pattern=r"^[0-9a-f]{1,64}$")]
PlanId = Annotated[str, Path(pattern=_SHA256, examples=[_EXAMPLE_SHA256])]
ArchiveId = Annotated[str, Path(pattern=_SHA256, description="SHA-256 of the body", examples=[_EXAMPLE_SHA256])]
Sha256 = Annotated[str, Field(pattern=_SHA256)]
Word = Annotated[str, Field(max_length=200, pattern=_LINE)]
Shapes = Annotated[str, Field(max_length=10_000, pattern=r"^[0-9a-z,]*$")]
#: No comma, no quote: see `tuner.store.queries.runs.page`.
Tag = Annotated[str, Field(pattern=r"^[\w.:/+-]{1,40}$", examples=["paper"])]
Moment = Annotated[AwareDatetime, BeforeValidator(_of_rfc_3339), Field(examples=["2026-11-22T18:00:00Z"])]
Key = Annotated[str, Field(min_length=1, max_length=255, pattern=r"^[\x21-\x7e]*$")]


class Submit(Record):
    """What to tune. `budget` is a time such as "5m" (or `budget_s`, in seconds), `trials` a number of configurations.

    With neither, the worker picks a time after a first look at the model.
    """

    #: Strict: `true` and "1" are not numbers.
    model_config = ConfigDict(
        strict=True, json_schema_extra={"examples": [{"archive": _EXAMPLE_SHA256, "budget": "10m", "device": "cuda"}]}
    )

    archive: Sha256 = Field(description="`sha256` of the answer of PUT /archives")
    device: Literal["", "cuda", "cpu"] = Field(default="", description="empty: any")
    trials: int | None = Field(default=None, ge=1, le=100_000)
    budget: str | float | None = Field(default=None, description='"90s", "5m", "1h" or seconds', examples=["5m"])
    budget_s: float | None = Field(default=None, gt=0, le=MAX_BUDGET_S)
    memory_limit: str | int | None = Field(
        default=None,
        description="of the peak memory of a step, in bytes or as 40GiB: the fastest step that fits is found",
    )
    memory_limit_bytes: int | None = Field(default=None, gt=0, lt=2**63)
    seed: int = Field(default=0, ge=-(2**63), lt=2**63)
    name: str = Field(default="", max_length=MAX_NAME, description="one line of printable characters")

    @field_validator("name")
    @classmethod
    def _is_showable(cls, name: str) -> str:
        if not is_showable(name):
            raise ValueError("use printable characters only, in one line")
        return name

    @field_validator("memory_limit")
    @classmethod
    def _is_memory(cls, size: str | int | None) -> str | int | None:
        try:
            parse_memory_limit(size)
        except SettingsError as error:
            raise ValueError(str(error)) from error
        return size

    @model_validator(mode="after")
    def _one_budget(self) -> Self:
        if self.budget is not None and self.budget_s is not None:
            raise ValueError("give either budget or budget_s")
        try:
            seconds = self._seconds()
        except SettingsError as error:
            raise ValueError(str(error)) from error
        if self.memory_limit is not None and self.memory_limit_bytes is not None:
            raise ValueError("give either memory_limit or memory_limit_bytes")
        if seconds is not None and seconds > MAX_BUDGET_S:
            raise ValueError(f"a budget is at most {MAX_BUDGET_S // 86400} days")
        return self

    def request(self) -> Request:
        """The request with its defaults filled in, so that naming a default makes no difference."""
        given = self.model_dump(include={"archive", "device", "trials", "seed", "name"})
        limit_bytes = self.memory_limit_bytes or parse_memory_limit(self.memory_limit)
        return Request(**given, budget_s=self._seconds(), memory_limit_bytes=limit_bytes)

    def _seconds(self) -> float | None:
        return self.budget_s if self.budget is None else seconds_of(self.budget, "budget")


class Annotation(Record):
    """Tags and a note of a run. A field that is left out does not change."""

    model_config = ConfigDict(
        strict=True, json_schema_extra={"examples": [{"tags": ["paper", "batch-128"], "note": "before the new loader"}]}
    )

    # A list in JSON; strict mode would require a tuple
    tags: tuple[Tag, ...] | None = Field(default=None, max_length=20, strict=False)
    note: str | None = Field(default=None, max_length=4000, pattern=_PROSE)

    @field_validator("tags")
    @classmethod
    def _each_once(cls, tags: tuple[str, ...] | None) -> tuple[str, ...] | None:
        return None if tags is None else tuple(dict.fromkeys(tags))

    @field_validator("note")
    @classmethod
    def _with_plain_line_ends(cls, note: str | None) -> str | None:
        """HTML forms send CR LF at the end of a line."""
        return None if note is None else note.replace("\r\n", "\n")


class Links(Record):
    """Paths of the parts of a run; `plan` once there is one."""

    self: str
    trials: str
    events: str
    export: str
    trace: str
    cancel: str
    retry: str
    share: str
    plan: str | None = None


class RunView(Run):
    """A run with links to its parts."""

    links: Links


class RunsView(Record):
    """A page of runs; `after` is the cursor of the next page, null on the last one."""

    runs: tuple[RunView, ...]
    after: str | None


class TrialsView(Record):
    """Trials in the order of their numbers."""

    trials: tuple[Trial, ...]


class ShareView(Record):
    """A share link: `path` on this server."""

    id: str
    path: str = Field(examples=["/shared/Zx3vKq2mY8sJ1tRw0bNf5uLh7cGd4eAiPoQy6kTjWlE"])
    run_id: str
    created_at: AwareDatetime
    expires_at: AwareDatetime | None


class SharesEnded(Record):
    """How many links were revoked."""

    ended: int


class RunDeleted(Record):
    """The run that was deleted."""

    id: str = Field(examples=[_EXAMPLE_ID])


class ArchiveView(StoredArchive):
    """A stored archive: `sha256` is its digest, `sent_sha256` that of the bytes that were sent."""

    sent_sha256: str


class PlanView(Plan):
    """A plan with its id, which is the SHA-256 of the rest."""

    id: str = Field(alias="plan_id")


class RunExport(Record):
    """A run with its plan, timeline, class tables and trials."""

    run: RunView
    plan: PlanView | None
    timeline: Timeline | None = Field(description="the launches of a step by the plan, where it has several streams")
    classes: ClassTables | None = Field(description="the time of a step by class of kernels, where the run recorded it")
    trials: tuple[Trial, ...]


class Question(Record):
    """The query of a plan look-up: a workload and a machine."""

    fingerprint: Sha256 = Field(description="of the step, or of model and optimizer alone", examples=[_EXAMPLE_SHA256])
    gpu: Word = Field(examples=["NVIDIA H200"])
    torch: Word = Field(examples=["2.13.0"])
    batch: Shapes | None = Field(default=None, description="shapes of x's tensors, sorted", examples=["128x3x32x32"])
    device: Literal["cuda", "cpu"] | None = None
    triton: Word | None = None
    cuda: Word | None = None
    driver: Word | None = None
    compute_capability: Word | None = Field(default=None, examples=["9.0"])
    memory_bytes: int | None = Field(default=None, ge=0, lt=2**63)

    def given_fields(self) -> dict[str, str | int]:
        """The given fields that an exact match must equal, in the order in which a difference is reported."""
        return ({} if self.batch is None else {"batch": self.batch}) | self.software()

    def software(self) -> dict[str, str | int]:
        """The given fields of the machine, in the order in which a difference is reported."""
        fields: dict[str, str | int | None] = {
            "compute_capability": self.compute_capability,
            "memory_bytes": self.memory_bytes,
            "torch": self.torch,
            "triton": self.triton,
            "cuda": self.cuda,
            "driver": self.driver,
        }
        return {name: value for name, value in fields.items() if value is not None}


class Lookup(Record):
    """The best plan for a workload on a machine, and how well it fits."""

    match: Literal["exact", "compatible", "none"]
    reason: str = Field(examples=["tuned with torch 2.12.0, this is 2.13.0"])
    plan: PlanView | None


def query_of(model: type[Record]) -> list[dict[str, Any]]:
    """OpenAPI parameters of a query that a route parses as one record."""
    schema = model.model_json_schema()
    required = schema.get("required", ())
    return [
        {"name": name, "in": "query", "required": name in required, "schema": part}
        for name, part in schema["properties"].items()
    ]


def run_json(run: Run) -> dict[str, Any]:
    place = f"{API}/runs/{run.id}"
    parts = ("trials", "events", "export", "trace", "cancel", "retry", "share")
    links = {"self": place, **{part: f"{place}/{part}" for part in parts}}
    plan = {"plan": f"{API}/plans/{run.plan_id}"} if run.plan_id else {}
    return {**run.model_dump(mode="json"), "links": {**links, **plan}}


def answer(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(canonical_json(value), status, headers, media_type="application/json")


def documented(*codes: int) -> dict[int | str, dict[str, Any]]:
    """OpenAPI responses for problems with these statuses."""
    content = {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}}
    return {code: {"description": TITLES[code], "content": content} for code in codes}
