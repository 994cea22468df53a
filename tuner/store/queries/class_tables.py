"""Class tables: the time of a run's step by class of kernels. Written once, deleted with the run."""

import logging

from sqlalchemy import Connection, select

from kitsune.class_tables import ClassTables
from kitsune.errors import StoreError
from tuner.records import Run
from tuner.store import tables
from tuner.store.lease import insert_if_held
from tuner.store.rows import from_row, to_row

_log = logging.getLogger(__name__)
_class_tables = tables.class_tables


def put(connection: Connection, run: Run, found: ClassTables) -> bool:
    """Stores those of the claimed run unless it has some (then False). Raises LeaseLostError."""
    return insert_if_held(connection, run, _class_tables, to_row(found, run_id=run.id))


def get(connection: Connection, run_id: str) -> ClassTables | None:
    """Those of a run, if it has any. Raises StoreError when they were altered."""
    row = connection.execute(select(_class_tables).where(_class_tables.c.run_id == run_id)).one_or_none()
    return None if row is None else from_row(ClassTables, _class_tables, row)


def readable(connection: Connection, run_id: str) -> ClassTables | None:
    """Like `get`, but logs a warning and returns None for altered ones, so that a page can show the rest."""
    try:
        return get(connection, run_id)
    except StoreError as error:
        _log.warning("the class tables of run %s are left out: %s", run_id, error)
        return None
