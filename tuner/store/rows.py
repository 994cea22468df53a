"""Converts records to rows of a table, and rows to validated records."""

import json
from typing import Any, TypeVar

from sqlalchemy import CursorResult, Row, Table

from kitsune.base.base_record import Record
from kitsune.errors import StoreError
from tuner.store.tables import JsonText

R = TypeVar("R", bound=Record)


def to_row(record: Record, **derived: object) -> dict[str, Any]:
    """A row with every field of the record under its name, and with derived columns."""
    return {**{name: getattr(record, name) for name in type(record).model_fields}, **derived}


def from_row(model: type[R], table: Table, row: Row[Any]) -> R:
    """The inverse of `to_row`. Raises StoreError when the row is no valid record, because it was altered."""
    values = row._mapping
    try:
        return model.model_validate({name: _decoded(table, name, values[name]) for name in model.model_fields})
    except (ValueError, RecursionError) as error:
        which = " ".join(str(values[column.name]) for column in table.primary_key if column.name in values)
        raise StoreError(
            f"row {which} of {table.name} is not a {model.__name__} ({' '.join(str(error).split())[:300]}): "
            "it was altered by hand or written by another version; restore the database from a backup"
        ) from error


def only_record(model: type[R], table: Table, found: CursorResult[Any]) -> R | None:
    """The record of the only row of a result; None if it has no row. Raises StoreError as `from_row` does."""
    row = found.one_or_none()
    return None if row is None else from_row(model, table, row)


def _decoded(table: Table, name: str, value: Any) -> Any:
    return json.loads(value) if value is not None and isinstance(table.c[name].type, JsonText) else value
