"""Keyset pagination of sorted lists.

A cursor encodes the sort order, and the sort value and id of the last row of a page, so new rows do not shift pages.
"""

import base64
import binascii
import json
import math
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, NamedTuple

from sqlalchemy import Column, Connection, Row, Select, tuple_

from kitsune.base.base_record import canonical_json
from kitsune.errors import CursorError

Value = datetime | float | str | None  # an int is a float to type checkers


class Order(NamedTuple):
    """Sort column, with the id as tie-breaker. Rows without a value come last in both directions."""

    column: Column[Any]
    id: Column[str]
    is_descending: bool

    @property
    def name(self) -> str:
        return f"{self.column.name} {'descending' if self.is_descending else 'ascending'}"


class Cursor(NamedTuple):
    """The position of a row: its sort value, or None if it has none, and its id."""

    value: Value
    id: str


def rows_after(
    connection: Connection, statement: Select[Any], order: Order, after: str | None, limit: int
) -> tuple[list[Row[Any]], str | None]:
    """Up to `limit` (>= 1) rows of the statement after this cursor, and the cursor of the next page, if there is one.

    Raises CursorError for an invalid cursor, or one of a list in another order.
    """
    rows: list[Row[Any]] = []
    for part in _parts(statement, order, None if after is None else decode(order, after)):
        rows += connection.execute(part.limit(limit + 1 - len(rows))).all()
        if len(rows) > limit:
            values = rows[limit - 1]._mapping
            return rows[:limit], encode(order, Cursor(values[order.column], values[order.id]))
    return rows, None


def encode(order: Order, place: Cursor) -> str:
    value = place.value.isoformat() if isinstance(place.value, datetime) else place.value
    return base64.urlsafe_b64encode(canonical_json([order.name, value, place.id]).encode()).decode()


def decode(order: Order, cursor: str) -> Cursor:
    """The inverse of `encode`. Raises CursorError for an invalid cursor, or one of another order."""
    try:
        name, value, row_id = json.loads(base64.b64decode(cursor, altchars=b"-_", validate=True))
        if name != order.name:
            raise CursorError(f"{cursor!r:.100} is not a cursor of a list in this order; begin again without one")
        return Cursor(_value(value, order.column), _text(row_id))
    except (binascii.Error, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise CursorError(f"{cursor!r:.100} is not a cursor of a page; begin again without one") from error


def _parts(statement: Select[Any], order: Order, place: Cursor | None) -> Iterator[Select[Any]]:
    """Two statements that each use an index: rows with a sort value, then rows without one.

    A single statement would need NULLS LAST, for which neither database can use one index in both directions.
    """
    column, row_id, is_descending = order
    if place is None or place.value is not None:
        valued = statement.where(column.is_not(None)) if column.nullable else statement
        if place is not None:
            key, value = tuple_(column, row_id, types=(column.type, row_id.type)), tuple(place)
            valued = valued.where(key < value if is_descending else key > value)
        yield valued.order_by(*((c.desc() if is_descending else c.asc()) for c in (column, row_id)))
    if column.nullable:
        lacking = statement.where(column.is_(None))
        if place is not None and place.value is None:
            lacking = lacking.where(row_id < place.id if is_descending else row_id > place.id)
        yield lacking.order_by(row_id.desc() if is_descending else row_id.asc())


def _value(value: object, column: Column[Any]) -> Value:
    """The value converted for the column. Raises ValueError or TypeError if its type does not fit."""
    kind = column.type.python_type
    if value is None and column.nullable:
        return None
    if kind is str:
        return _text(value)
    if kind is datetime and (moment := datetime.fromisoformat(_text(value))).tzinfo is not None:
        return moment.astimezone(UTC)
    if kind is float and isinstance(value, float) and math.isfinite(value):
        return value
    if kind is int and type(value) is int and -(2**63) <= value < 2**63:
        return value
    raise ValueError("another kind of value, or too large a one")


def _text(value: object) -> str:
    if not isinstance(value, str) or "\x00" in value:
        raise TypeError("not a text that a column can hold")
    value.encode()  # raises UnicodeEncodeError for an unpaired surrogate
    return value
