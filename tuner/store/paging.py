"""A list in an order and where its last page ended in, the next page and where that ends out.

A place is the value that the list is sorted by and the id beside it, so rows that arrive meanwhile shift nothing. The
cursor that names it names the order as well.
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
    """By which column, and by which id among equals. Rows without a value come last, whichever way it goes."""

    column: Column[Any]
    id: Column[str]
    is_descending: bool

    @property
    def name(self) -> str:
        return f"{self.column.name} {'descending' if self.is_descending else 'ascending'}"


class Place(NamedTuple):
    """A row: what it is sorted by, None where it has no such value, and its id."""

    value: Value
    id: str


def rows_after(
    connection: Connection, statement: Select[Any], order: Order, after: str | None, limit: int
) -> tuple[list[Row[Any]], str | None]:
    """Up to `limit` (>= 1) rows of the statement after this cursor, and the cursor of the next page, if there is one.

    Raises CursorError for a cursor that is not ours, or of a list in another order.
    """
    rows: list[Row[Any]] = []
    for part in _parts(statement, order, None if after is None else decode(order, after)):
        rows += connection.execute(part.limit(limit + 1 - len(rows))).all()
        if len(rows) > limit:
            values = rows[limit - 1]._mapping
            return rows[:limit], encode(order, Place(values[order.column], values[order.id]))
    return rows, None


def encode(order: Order, place: Place) -> str:
    value = place.value.isoformat() if isinstance(place.value, datetime) else place.value
    return base64.urlsafe_b64encode(canonical_json([order.name, value, place.id]).encode()).decode()


def decode(order: Order, cursor: str) -> Place:
    """Raises CursorError for what `encode` did not give for this order."""
    try:
        name, value, row_id = json.loads(base64.b64decode(cursor, altchars=b"-_", validate=True))
        if name != order.name:
            raise CursorError(f"{cursor!r:.100} is not a cursor of a list in this order; begin again without one")
        return Place(_value(value, order.column), _text(row_id))
    except (binascii.Error, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise CursorError(f"{cursor!r:.100} is not a cursor of a page; begin again without one") from error


def _parts(statement: Select[Any], order: Order, place: Place | None) -> Iterator[Select[Any]]:
    """The rows that have a value to sort by, and then those that lack it: both are read off an index.

    In one statement NULLS LAST would be needed, for which no index of either database serves both directions.
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
    """Raises ValueError or TypeError unless it fits into the column."""
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
    value.encode()  # half of a pair of surrogates is no text: UnicodeEncodeError
    return value
