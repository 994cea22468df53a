"""Alembic runs this file: on the connection that `tuner/store/migrate.py` hands over, or for its own command line.

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
    """Tables of others in the same database (Optuna's, for one) are neither compared nor dropped."""
    return kind != "table" or name in metadata.tables


def plain_type(kind: str, item: object, _context: object) -> str | Literal[False]:
    """A revision is written in types of SQLAlchemy: it must not change when ours do."""
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
