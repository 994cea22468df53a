"""`kitsune migrate`: brings a database to the schema of this version."""

from kitsune.cli import output
from tuner.settings import Settings
from tuner.store.engine import open_database
from tuner.store.error_translation import shown
from tuner.store.tables import SCHEMA_REVISION


def migrate(database_url: str | None, *, as_json: bool) -> None:
    """Raises StoreError when the database cannot be opened, and SchemaError when another version wrote it."""
    with open_database(database_url or Settings.from_environment().database_url) as database:
        where = shown(database.engine.url)
    if as_json:
        output.emit({"database": where, "revision": SCHEMA_REVISION})
    else:
        output.note(f"{where} is at schema revision {SCHEMA_REVISION}.")
