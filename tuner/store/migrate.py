"""Migrates a database to the schema of this version."""

import threading
from collections.abc import Iterator
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, inspect, text

from kitsune import __version__
from kitsune.errors import SchemaError
from tuner.store.database import Database
from tuner.store.tables import SCHEMA_REVISION, VERSION_TABLE, metadata

#: Key of the advisory lock for migrating a PostgreSQL database: "kitsune" in ASCII.
_LOCK = 0x6B697473756E65

#: Alembic keeps the running migration in a module global, so only one thread may migrate at a time.
_one_at_a_time = threading.Lock()


def bring_up_to_date(database: Database) -> None:
    """Migrates an empty or older database to head in one transaction. Safe to call from several processes at once.

    Raises SchemaError for a database that a newer version or another program wrote.
    """
    with database.read() as connection:
        if revisions(connection) == (SCHEMA_REVISION,):
            return
    with _one_at_a_time, database.begin() as connection:
        if connection.dialect.name == "postgresql":
            connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _LOCK})
        found = revisions(connection)
        if found != (SCHEMA_REVISION,):
            refuse_strangers(connection, found)
            command.upgrade(config(connection), "head")


def revisions(connection: Connection) -> tuple[str, ...]:
    """The schema revisions that the database records; empty for a database without Kitsune's tables."""
    context = MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE})
    return tuple(context.get_current_heads())


def config(connection: Connection) -> Config:
    """Alembic's configuration for an open connection, without a file, so that it works in an installed wheel."""
    made = Config()
    made.set_main_option("script_location", str(scripts_folder()).replace("%", "%%"))
    made.attributes["connection"] = connection
    return made


def scripts_folder() -> Path:
    """`migrations/` beside `tuner/`, in the repository and in an installed wheel.

    It is found by path and not imported: in the user's folder `import migrations` might find another package.
    """
    return Path(__file__).resolve().parents[2] / "migrations"


def refuse_strangers(connection: Connection, found: tuple[str, ...]) -> None:
    """Raises SchemaError if these `revisions` show that a newer version or another program wrote the database."""
    known = set(_known_revisions(connection))
    if unknown := [revision for revision in found if revision not in known]:
        raise SchemaError(
            f"the database is at schema revision {', '.join(unknown)}, which Kitsune {__version__} does not know: a "
            "newer version wrote it. Upgrade Kitsune, or choose another database with KITSUNE_DATABASE_URL"
        )
    if not found and (ours := sorted(set(inspect(connection).get_table_names()) & set(metadata.tables))):
        raise SchemaError(
            f"the database holds {', '.join(ours)} but no {VERSION_TABLE}, so their version is unknown: something else "
            "made them, or the version was deleted. Restore a backup, or choose another database with "
            "KITSUNE_DATABASE_URL"
        )


def _known_revisions(connection: Connection) -> Iterator[str]:
    return (script.revision for script in ScriptDirectory.from_config(config(connection)).walk_revisions())
