"""What a list of runs was asked for in, its addresses and columns out. Pure: no request, no database."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal
from urllib.parse import urlencode

from pydantic import Field, model_validator

from kitsune.record import Record
from server.schemas import Sha256, Tag, Word
from tuner.records import Run, RunStatus, Verdict
from tuner.store.runs import Sort

PLACE: Final = "/runs"


class Wanted(Record):
    """The query of the page: filters, order, and where the page before ended. What is blank is not asked for."""

    status: RunStatus | None = None
    verdict: Verdict | None = None
    gpu: Word | None = None
    workload: Word | None = None
    tag: Tag | None = None
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

    @property
    def is_filtered(self) -> bool:
        return any((self.status, self.verdict, self.gpu, self.workload, self.tag, self.fingerprint))

    @property
    def filters(self) -> dict[str, Any]:
        """As `tuner.store.runs.page` takes them."""
        return self.model_dump(exclude={"order"}) | {"is_descending": self.order == "desc"}

    def address(self, place: str = PLACE, **changes: str | None) -> str:
        """The same list with these changes; only what differs from the default stands in it."""
        query = {**self.model_dump(mode="json", exclude_defaults=True), **changes}
        kept = {name: value for name, value in query.items() if value is not None}
        return f"{place}?{urlencode(kept)}" if kept else place

    def sorted_by(self, sort: Sort) -> str:
        """The address of the list in the order of this column: another click turns it round."""
        order = "asc" if sort is self.sort and self.order == "desc" else "desc" if sort is self.sort else _FIRST[sort]
        return self.address(sort=sort.value, order=order, after=None)


@dataclass(frozen=True)
class Column:
    """A head of the table; `sort` None: there is no order by it. `order` is that of the list, "" for another one."""

    label: str
    sort: Sort | None = None
    is_number: bool = False

    def order(self, wanted: Wanted) -> str:
        if self.sort is not wanted.sort:
            return ""
        return "descending" if wanted.order == "desc" else "ascending"


#: What a first click asks for: the best, the newest, or the beginning of the alphabet.
_FIRST: Final[dict[Sort, str]] = {
    Sort.CREATED: "desc",
    Sort.GAIN: "desc",
    Sort.TRIALS: "desc",
    Sort.MEMORY: "asc",
    Sort.WORKLOAD: "asc",
    Sort.GPU: "asc",
    Sort.STATUS: "asc",
}

COLUMNS: Final = (
    Column("Model", Sort.WORKLOAD),
    Column("GPU", Sort.GPU),
    Column("Gain", Sort.GAIN, is_number=True),
    Column("95 % interval", is_number=True),
    Column("Memory", Sort.MEMORY, is_number=True),
    Column("Verdict"),
    Column("Trials", Sort.TRIALS, is_number=True),
    Column("Age", Sort.CREATED),
    Column("State", Sort.STATUS),
)


def gpu_of(run: Run) -> str:
    """Where it ran; of a run that waits what it asks for."""
    return run.environment.gpu if run.environment else run.device


def gpus_of(found: Sequence[Run]) -> list[str]:
    """Names to choose a filter from."""
    return sorted({run.environment.gpu for run in found if run.environment})
