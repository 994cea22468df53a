"""Alembic's environment script: uses the connection of `tuner/store/migrate.py`, or serves Alembic's command line.

The command line (`alembic revision --autogenerate -m "..."`, `alembic upgrade head --sql`) uses KITSUNE_DATABASE_URL.
"""

from typing import Any, Literal

from alembic import context
from sqlalchemy import Connection, TypeDecorator

from tuner.settings import Settings
from tuner.store.database import Database
from tuner.store.engine import create
from tuner.store.tables import VERSION_TABLE, metadata


def is_ours(name: str | None, kind: str, _parents: object) -> bool:
    """Excludes tables of other programs in the same database (such as Optuna's) from comparison and dropping."""
    return kind != "table" or name in metadata.tables


def plain_type(kind: str, item: object, _context: object) -> str | Literal[False]:
    """Renders custom types as SQLAlchemy's own, so that a revision does not change when the custom types do."""
    return f"sa.{item.impl!r}" if kind == "type" and isinstance(item, TypeDecorator) else False


def run(**options: Any) -> None:
    context.configure(
        target_metadata=metadata,
        version_table=VERSION_TABLE,
        include_name=is_ours,
        render_item=plain_type,
        render_as_batch=True,  # SQLite cannot alter a column in place
        **options,
    )
    with context.begin_transaction():
        context.run_migrations()


def main() -> None:
    connection: Connection | None = context.config.attributes.get("connection")
    if connection is not None:
        run(connection=connection)
    elif context.is_offline_mode():
        run(url=Settings.from_environment().database_url, literal_binds=True)
    else:
        with Database(create(Settings.from_environment().database_url)) as database, database.begin() as opened:
            run(connection=opened)


main()
