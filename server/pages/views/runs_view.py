"""The query of the list of runs, its URLs, and its columns."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Annotated, Any, Final, Literal
from urllib.parse import urlencode

from pydantic import Field, ValidationError, field_validator, model_validator

from kitsune.base.base_record import Record
from server.payloads.schemas import Sha256, Tag, Word
from tuner.records import Run, RunStatus, Verdict
from tuner.store.filters import Filters
from tuner.store.queries.runs import Sort
from tuner.terminal.views import LOST

PLACE: Final = "/runs"
#: The choices of the filter for age.
AGES: Final[Mapping[str, timedelta]] = {
    "hour": timedelta(hours=1),
    "day": timedelta(days=1),
    "week": timedelta(days=7),
    "month": timedelta(days=30),
}
#: Rarely used filters, hidden until one of them is set.
FIGURES: Final = ("gain", "interval", "memory", "trials", "age")
#: What each field of the form accepts, for error messages.
MEANINGS: Final[Mapping[str, str]] = {
    "status": "choose one of the states",
    "verdict": "choose one of the verdicts",
    "gpu": "at most 200 characters, in one line",
    "workload": "at most 200 characters, in one line",
    "tag": "a tag has up to 40 letters, digits and _ . : / + -",
    "gain": "a factor, such as 1.2",
    "interval": "a factor, such as 1.1",
    "memory": "per cent, such as -10",
    "trials": "a whole number",
    "age": "choose one of the ages",
}

Standing = RunStatus | Literal["lost"]
STANDINGS: Final = (*RunStatus, LOST)
Factor = Annotated[float, Field(ge=0, le=1e6)]


#: Signs of formatted figures, translated to what float() reads.
_SHOWN: Final = {ord("\N{MULTIPLICATION SIGN}"): "", ord("%"): "", ord("\N{MINUS SIGN}"): "-"}


class Wanted(Record):
    """The query of the page: filters, order and cursor. Blank fields are ignored."""

    status: Standing | None = None
    verdict: Verdict | None = None
    gpu: Word | None = None
    workload: Word | None = None
    tag: Tag | None = None
    gain: Factor | None = None
    interval: Factor | None = None
    memory: Annotated[float, Field(ge=-100, le=1e6)] | None = None
    trials: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    age: Literal["hour", "day", "week", "month"] | None = None
    fingerprint: Sha256 | None = None
    sort: Sort = Sort.CREATED
    order: Literal["desc", "asc"] = "desc"
    after: Annotated[str, Field(max_length=1000)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_blanks(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return {name: value for name, value in given.items() if not isinstance(value, str) or value.strip()}

    @field_validator("gain", "interval", "memory", mode="before")
    @classmethod
    def _as_shown(cls, given: Any) -> Any:
        """Accepts figures as the table shows them."""
        return given.translate(_SHOWN).strip() if isinstance(given, str) else given

    @property
    def is_filtered(self) -> bool:
        return bool(self.model_fields_set - {"sort", "order", "after"})

    def filters(self, now: datetime) -> Filters:
        """The filters for `tuner.store.queries.runs.page`. Lost runs are not listed as running."""
        standing = self.status
        return {
            "status": standing if isinstance(standing, RunStatus) else None,
            "is_lost": standing == LOST if standing in (LOST, RunStatus.RUNNING) else None,
            "verdict": self.verdict,
            "gpu": self.gpu,
            "workload": self.workload,
            "tag": self.tag,
            "min_gain": self.gain,
            "min_gain_low": self.interval,
            "max_memory": None if self.memory is None else 1 + self.memory / 100,
            "min_trials": self.trials,
            "created_after": None if self.age is None else now - AGES[self.age],
            "fingerprint": self.fingerprint,
        }

    def address(self, place: str = PLACE, **changes: str | None) -> str:
        """The URL of the same list with these changes; defaults are left out."""
        query = {**self.model_dump(mode="json", exclude_defaults=True), **changes}
        kept = {name: value for name, value in query.items() if value is not None}
        return f"{place}?{urlencode(kept)}" if kept else place

    def sorted_by(self, sort: Sort) -> str:
        """The URL of the list sorted by this column; in the opposite order if it is sorted by it already."""
        order = "asc" if sort is self.sort and self.order == "desc" else "desc" if sort is self.sort else _FIRST[sort]
        return self.address(sort=sort.value, order=order, after=None)


@dataclass(frozen=True)
class Column:
    """A column of the table. `order`: of the list by this column; "" if it is sorted by another one."""

    label: str
    sort: Sort
    is_number: bool = False

    def order(self, wanted: Wanted) -> str:
        if self.sort is not wanted.sort:
            return ""
        return "descending" if wanted.order == "desc" else "ascending"


#: Order of the first click on a column: best first, newest first, or alphabetical.
_FIRST: Final[dict[Sort, str]] = {
    Sort.CREATED: "desc",
    Sort.GAIN: "desc",
    Sort.INTERVAL: "desc",
    Sort.TRIALS: "desc",
    Sort.MEMORY: "asc",
    Sort.NAME: "asc",
    Sort.VERDICT: "asc",
    Sort.GPU: "asc",
    Sort.STATUS: "asc",
}

COLUMNS: Final = (
    Column("Model", Sort.NAME),
    Column("GPU", Sort.GPU),
    Column("Gain", Sort.GAIN, is_number=True),
    Column("95 % interval", Sort.INTERVAL, is_number=True),
    Column("Memory", Sort.MEMORY, is_number=True),
    Column("Verdict", Sort.VERDICT),
    Column("Trials", Sort.TRIALS, is_number=True),
    Column("Age", Sort.CREATED),
    Column("State", Sort.STATUS),
)


def wrong_fields(error: ValidationError) -> dict[str, str] | None:
    """A hint for each invalid field of the form; None if the error is elsewhere in the query."""
    names = {str(one["loc"][0]) if one["loc"] else "" for one in error.errors(include_url=False)}
    return {name: MEANINGS[name] for name in names} if names <= set(MEANINGS) else None


def gpu_of(run: Run) -> str:
    """The GPU of the run; the requested device while it waits."""
    return run.environment.gpu if run.environment else run.device


def gpus_of(found: Sequence[Run]) -> list[str]:
    """GPU names to suggest in the filter."""
    return sorted({run.environment.gpu for run in found if run.environment})
