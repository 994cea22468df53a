"""docs/operating.md: a SQLite database that is in use is backed up whole by the command that the page prints."""

import re
import subprocess
import sys
from pathlib import Path

from sqlalchemy import select

from tests.store.samples import a_run
from tuner.store import tables
from tuner.store.engine import open_database
from tuner.store.queries import runs

PAGE = Path(__file__).parents[2] / "docs" / "operating.md"


def printed_command() -> str:
    text = PAGE.read_text("utf-8")
    marked = text[text.index("<!-- executed by tests/store/test_backup.py -->") :]
    found = re.search(r"```bash\n(.+?)\n```", marked, re.DOTALL)
    assert found is not None
    return found[1].replace("python ", f"{sys.executable} ", 1)


def test_a_database_in_use_is_backed_up_whole_by_the_printed_command(tmp_path):
    with open_database(f"sqlite:///{tmp_path}/kitsune.db") as database:
        with database.begin() as connection:
            runs.add(connection, a_run(id="kept"))
        assert (tmp_path / "kitsune.db-wal").stat().st_size > 0, "what was written last is not in the file itself"
        subprocess.run(["/bin/sh", "-c", printed_command()], cwd=tmp_path, check=True)
        with database.begin() as connection:
            runs.add(connection, a_run(id="too late"))
    with open_database(f"sqlite:///{tmp_path}/backup.db") as restored, restored.read() as connection:
        assert connection.scalars(select(tables.runs.c.id)).all() == ["kept"]
