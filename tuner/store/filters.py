"""Filters of a list of runs, as SQL conditions.

No filter uses an index, because none would fit every sort order: a list is read from the index of its order, and rows
that do not match are skipped. The `+ 0` and function calls around columns keep SQLite from choosing another index.
"""

from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from typing import Any, Final, TypedDict

from sqlalchemy import Column, ColumnElement, Text, func, not_, or_, type_coerce

from kitsune.base.base_record import canonical_json
from tuner.records import RunStatus, Verdict
from tuner.store import tables
from tuner.store.lease import is_abandoned
from tuner.store.moments import Instant

_runs = tables.runs


class Filters(TypedDict, total=False):
    """All given filters must match; None counts as not given. Parts of names match case-insensitively."""

    status: RunStatus | None
    is_lost: bool | None  #: marked as running, but its lease has expired
    fingerprint: str | None
    gpu: str | None  #: part of the name of the GPU it ran on, or of the device it asks for
    workload: str | None  #: part of its label in lists, or of the workload
    verdict: Verdict | None
    tag: str | None
    min_gain: float | None
    min_gain_low: float | None
    max_memory: float | None
    min_trials: int | None
    created_after: datetime | None


def conditions(filters: Filters, now: Instant) -> Iterator[ColumnElement[bool]]:
    for name, value in filters.items():
        if name == "is_lost" and value is not None:
            yield is_abandoned(now) if value else not_(func.coalesce(is_abandoned(now), False))
        elif value is not None:
            yield _CONDITIONS[name](value)


def _equals(column: Column[Any]) -> Callable[[Any], ColumnElement[bool]]:
    return lambda value: column == value


def _is_of_gpu(part: str) -> ColumnElement[bool]:
    return _holds(func.lower(func.coalesce(_runs.c.gpu, _runs.c.device), type_=Text), part.lower())


def _is_called(part: str) -> ColumnElement[bool]:
    return or_(_holds(_runs.c.label, part.casefold()), _holds(func.lower(_runs.c.workload, type_=Text), part.lower()))


def _has_tag(tag: str) -> ColumnElement[bool]:
    """Matches the tag as it is encoded in the JSON list."""
    return _holds(type_coerce(_runs.c.tags, Text), canonical_json(tag))


def _holds(text: ColumnElement[str], part: str) -> ColumnElement[bool]:
    """Substring match. Not LIKE, which ignores case on SQLite and treats "_" as a wildcard."""
    return func.replace(text, part, "", type_=Text) != text


_CONDITIONS: Final[Mapping[str, Callable[[Any], ColumnElement[bool]]]] = {
    "status": _equals(_runs.c.status),
    "fingerprint": _equals(_runs.c.fingerprint),
    "gpu": _is_of_gpu,
    "workload": _is_called,
    "verdict": _equals(_runs.c.verdict),
    "tag": _has_tag,
    "min_gain": lambda least: _runs.c.gain + 0 >= least,
    "min_gain_low": lambda least: _runs.c.gain_low + 0 >= least,
    "max_memory": lambda most: _runs.c.memory_ratio + 0 <= most,
    "min_trials": lambda least: _runs.c.trials + 0 >= least,
    # coalesce keeps the type of the column but not its index
    "created_after": lambda moment: func.coalesce(_runs.c.created_at, _runs.c.created_at) > moment,
}
