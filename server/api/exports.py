"""The route that exports a run as one file: JSON, or CSV with a line for each raw sample.

The file is streamed, and each part is a query of its own, so that a slow client does not hold a database connection.
Stored trials never change, so the parts are consistent.
"""

import csv
import io
import unicodedata
from collections.abc import Iterable, Iterator
from typing import Annotated, Final, Literal

from fastapi import Query, Request
from fastapi.responses import StreamingResponse

from kitsune.base.base_record import canonical_json
from kitsune.plan import Interval
from server.api.runs import require_run
from server.http.auth import GuardedRouter, caller
from server.http.context import Here
from server.http.lookups import spliced
from server.payloads.schemas import RunExport, RunId, documented, run_json
from tuner.records import Arm, Trial
from tuner.store.database import Database
from tuner.store.queries import class_tables, plans, runs, timelines, trials
from tuner.store.queries.tokens import Scope

#: Characters that begin a formula in a spreadsheet, with their full-width forms.
_FORMULA: Final = frozenset("=+-@\uff1d\uff0b\uff0d\uff20")
_CONTROL: Final = frozenset("\t\r\n")
_BATCH: Final = 50
_CSV: Final = "text/csv"
_COLUMNS: Final = (
    "run",
    "trial",
    "source",
    "knobs",
    "verdict",
    "speedup",
    "speedup_low",
    "speedup_high",
    "failure",
    "reason",
    "arm",
    "arm_knobs",
    "peak_bytes",
    "block",
    "step_ms",
)
_FILES: Final = {
    "model": RunExport,
    "description": "The file. As CSV it has a line for each sample, and one for each trial without any",
    "content": {
        _CSV: {
            "schema": {"type": "string"},
            "example": f"{','.join(_COLUMNS)}\r\nr1,0,baseline,{{}},same,1,0.99,1.01,,,eager,{{}},1048576,0,12.5\r\n",
        }
    },
}

router = GuardedRouter(Scope.READ, prefix="/api/v1/runs", tag="runs")


@router.get("/{run_id}/export", response_class=StreamingResponse, responses={200: _FILES, **documented(404)})
def export(
    request: Request,
    here: Here,
    run_id: RunId,
    kind: Annotated[Literal["json", "csv"], Query(alias="format")] = "json",
) -> StreamingResponse:
    """A run, its plan, the launches of a step by it, where its time goes, and its trials with every raw sample."""
    team = caller(request).team
    with here.database.read() as connection:
        run = require_run(runs.get(connection, run_id, team=team), run_id)
        document = plans.get_document(connection, run.plan_id, team=team) if run.plan_id else None
        timeline = timelines.readable(connection, run.id)
        tables = class_tables.readable(connection, run.id)
    tried = _trials(here.database, run.id)
    if kind == "csv":
        parts, media_type = csv_of(tried), _CSV
    else:
        plan = spliced(run.plan_id, document) if run.plan_id and document else "null"
        launches = timeline.model_dump_json() if timeline else "null"
        classes = tables.model_dump_json() if tables else "null"
        parts, media_type = _json_of(canonical_json(run_json(run)), plan, launches, classes, tried), "application/json"
    name = {"content-disposition": f'attachment; filename="kitsune-{run.id}.{kind}"'}
    return StreamingResponse(parts, headers=name, media_type=media_type)


def csv_of(tried: Iterable[Trial]) -> Iterator[str]:
    """The lines of the CSV file, one trial at a time."""
    yield _lines([_COLUMNS])
    for trial in tried:
        yield _lines(_of_trial(trial))


def _json_of(run: str, plan: str, timeline: str, classes: str, tried: Iterable[Trial]) -> Iterator[str]:
    yield f'{{"run":{run},"plan":{plan},"timeline":{timeline},"classes":{classes},"trials":['
    for position, trial in enumerate(tried):
        yield f"{',' if position else ''}{trial.canonical_json()}"
    yield "]}"


def _trials(database: Database, run_id: str) -> Iterator[Trial]:
    last = -1
    while True:
        with database.read() as connection:
            part = trials.list_of(connection, run_id, after=last, limit=_BATCH)
        yield from part
        if len(part) < _BATCH:
            return
        last = part[-1].number


def _cells(gain: Interval | None) -> tuple[object, object, object]:
    if gain is None:
        return "", "", ""
    return (gain.median, "", "") if gain.is_itself else (gain.median, gain.low, gain.high)


def _of_trial(trial: Trial) -> list[tuple[object, ...]]:
    compared, failure = trial.comparison, trial.failure
    gain = compared.speedup if compared else None
    head = (
        trial.run_id,
        trial.number,
        trial.source.value,
        canonical_json(dict(trial.knobs)),
        compared.verdict.value if compared else "",
        *_cells(gain),
        *((failure.kind.value, escape_formula(failure.reason)) if failure else ("", "")),
    )
    arms = trial.measurement.arms if trial.measurement else ()
    return [(*head, *sample) for arm in arms for sample in _of_arm(arm)] or [(*head, *[""] * 5)]


def _of_arm(arm: Arm) -> Iterator[tuple[object, ...]]:
    for block, step_ms in enumerate(arm.step_ms):
        yield escape_formula(arm.name), canonical_json(dict(arm.knobs)), arm.peak_bytes, block, step_ms


def escape_formula(text: str) -> str:
    """The text, quoted if a spreadsheet would run it as a formula (CSV injection): anybody may have written it."""
    first = next((letter for letter in text if not is_ignored(letter)), "")
    return f"'{text}" if first in _FORMULA or text[:1] in _CONTROL else text


def is_ignored(letter: str) -> bool:
    """Whether it is white space, or a control or format character, which a spreadsheet may skip."""
    return letter.isspace() or unicodedata.category(letter) in ("Cc", "Cf")


def _lines(rows: Iterable[tuple[object, ...]]) -> str:
    file = io.StringIO()
    csv.writer(file).writerows(rows)
    return file.getvalue()
