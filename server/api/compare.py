"""The route that compares runs: the rows that differ, and warnings where figures are not comparable."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, Final, Literal, NamedTuple

from fastapi import Query, Request
from fastapi.responses import Response
from pydantic import Field
from sqlalchemy import Connection

from kitsune.base.base_record import Record
from kitsune.errors import SettingsError
from kitsune.knobs import KNOBS
from kitsune.plan import Environment, Evidence, Interval, Plan
from kitsune.run_status import RunStatus
from server.api.runs import require_run
from server.http.auth import GuardedRouter, caller
from server.http.context import Here
from server.payloads.schemas import answer, documented
from tuner.records import Run
from tuner.store.queries import plans, runs
from tuner.store.queries.tokens import Scope

#: Most runs in a comparison; more do not fit on a page.
MOST: Final = 20

Group = Literal["request", "result", "plan", "environment"]
Value = str | int | float | bool | None

router = GuardedRouter(Scope.READ, prefix="/api/v1/compare", tag="runs")


class Row(Record):
    """One property; `values` in the order of the runs, null where it is unknown."""

    group: Group
    name: str = Field(examples=["gain"])
    values: tuple[Value, ...] = Field(examples=[[1.41, 1.52]])
    differs: bool


class SideBySide(Record):
    """Runs side by side. A warning says why figures of some of them are not comparable."""

    ids: tuple[str, ...]
    rows: tuple[Row, ...]
    warnings: tuple[str, ...] = Field(
        examples=[["measured on different GPUs (NVIDIA A100, NVIDIA H200): times do not compare"]]
    )


class Side(NamedTuple):
    """A run and its plan; None if it has none, or none that this version can read."""

    run: Run
    plan: Plan | None


@router.get("", responses={200: {"model": SideBySide}, **documented(404)})
def compare_runs(
    request: Request,
    here: Here,
    ids: Annotated[
        str,
        Query(
            pattern=r"^[A-Za-z0-9_-]{1,64}(,[A-Za-z0-9_-]{1,64}){1,19}$",
            description=f"2 to {MOST} runs, separated by commas",
            examples=["06g0t3n8q4v0e4b6k1m2z5y7xc,06g0t3n8q4v0e4b6k1m2z5y7xd"],
        ),
    ],
    is_whole: Annotated[bool, Query(alias="all", description="also rows that are the same for all runs")] = False,
) -> Response:
    """Runs side by side: what differs, and warnings where GPUs or versions do."""
    names = ids.split(",")
    if len(set(names)) < len(names):
        raise SettingsError("a run is named twice in ids; name each once")
    with here.database.read() as connection:
        found = runs.get_all(connection, names, team=caller(request).team)
        sides = with_plans(connection, [require_run(found.get(name), name) for name in names], caller(request).team)
    return answer(compare(sides, is_whole=is_whole).model_dump(mode="json"))


def with_plans(connection: Connection, chosen: Sequence[Run], team: str) -> list[Side]:
    """The runs with their plans. A plan that this version cannot read is left out, and the run stays."""
    readable = plans.get_readable(connection, [run.plan_id for run in chosen if run.plan_id], team=team)
    return [Side(run, readable.get(run.plan_id or "")) for run in chosen]


def compare(sides: Sequence[Side], *, is_whole: bool = False) -> SideBySide:
    """The rows that differ between the runs; with `is_whole` all rows."""
    rows = [row for row in _rows(sides) if is_whole or row.differs]
    return SideBySide(ids=tuple(side.run.id for side in sides), rows=tuple(rows), warnings=tuple(warnings(sides)))


_REQUEST: Final[Mapping[str, Callable[[Side], Value]]] = {
    "name": lambda side: side.run.name,
    "workload": lambda side: side.run.workload,
    "fingerprint": lambda side: side.run.fingerprint or None,
    "batch": lambda side: (side.plan.batch or None) if side.plan else None,
    "device": lambda side: side.run.device,
    "budget_trials": lambda side: side.run.budget_trials,
    "budget_s": lambda side: side.run.budget_s,
    "memory_limit_bytes": lambda side: side.run.memory_limit_bytes,
    "seed": lambda side: side.run.seed,
}
_RESULT: Final[Mapping[str, Callable[[Side], Value]]] = {
    "status": lambda side: side.run.status.value,
    "verdict": lambda side: side.run.verdict.value if side.run.verdict else None,
    "gain": lambda side: side.run.speedup.median if side.run.speedup else None,
    "gain_low": lambda side: found.low if (found := _interval(side.run)) else None,
    "gain_high": lambda side: found.high if (found := _interval(side.run)) else None,
    "memory_ratio": lambda side: side.run.memory_ratio,
    "trials": lambda side: side.run.trials,
    "took_s": lambda side: side.run.took_s,
    "error": lambda side: side.run.error,
}
_OF_EVIDENCE: Final = (
    "baseline",
    "baseline_step_ms",
    "step_ms",
    "eager_step_ms",
    "baseline_peak_bytes",
    "peak_bytes",
    "first_step_s",
    "processes",
)


def _rows(sides: Sequence[Side]) -> Iterable[Row]:
    for name, value in _REQUEST.items():
        yield _row("request", name, map(value, sides))
    for name, value in _RESULT.items():
        yield _row("result", name, map(value, sides))
    for name in _OF_EVIDENCE:
        yield _row("result", name, (_said(_evidence(side), name) for side in sides))
    for name in KNOBS:
        if any(side.plan is not None and name in side.plan.knobs for side in sides):
            yield _row("plan", name, (side.plan.choice(name) if side.plan else None for side in sides))
    for name in Environment.model_fields:
        yield _row("environment", name, (_said(_environment(side), name) or None for side in sides))


def _row(group: Group, name: str, values: Iterable[Value]) -> Row:
    found = tuple(values)
    return Row(group=group, name=name, values=found, differs=len(set(found)) > 1)


def warnings(sides: Sequence[Side]) -> Iterable[str]:
    """Reasons why figures of these runs are not comparable; used by the API and by the page."""
    unlike = {name: sorted({str(value) for value in _known(sides, name)}) for name in Environment.model_fields}
    if len(unlike["gpu"]) > 1:
        yield f"measured on different GPUs ({', '.join(unlike['gpu'])}): times do not compare, gains only with care"
    for name in ("torch", "triton", "cuda", "driver", "python", "kitsune"):
        if len(unlike[name]) > 1:
            yield f"measured with different versions of {name} ({', '.join(unlike[name])})"
    if len({side.run.fingerprint for side in sides if side.run.fingerprint}) > 1:
        yield "not the same training step: times and gains do not compare"
    if len({side.plan.batch for side in sides if side.plan and side.plan.batch}) > 1:
        yield "measured with batches of different shapes: times do not compare"
    for side in sides:
        if side.run.status is not RunStatus.FINISHED:
            yield f"run {side.run.id} is {side.run.status}: it has no result to compare"


def _known(sides: Sequence[Side], name: str) -> Iterable[Any]:
    return (value for side in sides if (value := _said(_environment(side), name)))


def _environment(side: Side) -> Environment | None:
    return (side.plan.environment if side.plan else None) or side.run.environment


def _evidence(side: Side) -> Evidence | None:
    return side.plan.evidence if side.plan else None


def _said(record: Record | None, name: str) -> Any:
    return None if record is None else getattr(record, name)


def _interval(run: Run) -> Interval | None:
    """The interval of the gain, if one was measured."""
    return None if run.speedup is None or run.speedup.is_itself else run.speedup
