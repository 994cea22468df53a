"""Idempotent inserts: a row is written unless its key exists. A concurrent insert of the same key is waited for."""

from typing import Any

from sqlalchemy import Connection, Select, Table
from sqlalchemy.dialects import postgresql, sqlite


def insert_once(connection: Connection, table: Table, values: dict[str, Any]) -> bool:
    """INSERT ... ON CONFLICT DO NOTHING. Returns whether the row was inserted; False if its primary key exists."""
    return _is_inserted(connection, table, _insert(connection, table).values(values))


def insert_selected(connection: Connection, table: Table, names: list[str], source: Select[Any]) -> bool:
    """Like `insert_once`, for the row that `source` selects, if any."""
    return _is_inserted(
        connection, table, _insert(connection, table).from_select(names, source, include_defaults=False)
    )


def _insert(connection: Connection, table: Table) -> postgresql.Insert | sqlite.Insert:
    return postgresql.insert(table) if connection.dialect.name == "postgresql" else sqlite.insert(table)


def _is_inserted(connection: Connection, table: Table, statement: postgresql.Insert | sqlite.Insert) -> bool:
    key = list(table.primary_key.columns)
    return connection.execute(statement.on_conflict_do_nothing(index_elements=key).returning(*key)).first() is not None
