"""Opening a database, and what becomes of everything that a driver can raise."""

import os
import sqlite3
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from threading import Event, Thread

import pytest
from sqlalchemy import event, text

from kitsune.errors import StoreBusyError, StoreError, StoreFullError
from tests.store.conftest import Postgres
from tests.store.samples import START, a_run, a_trial, after
from tuner.records import Failure, FailureKind, Phase, Run
from tuner.store import engine
from tuner.store.database import Database
from tuner.store.engine import open_database
from tuner.store.queries import runs, trials


def stored(database: Database) -> Run:
    """A run that the database holds, claimed."""
    run = a_run()
    with database.begin() as connection:
        runs.add(connection, run)
        claimed = runs.claim_one(connection, run.id, "w", now=START)
    assert claimed is not None
    return claimed


def test_the_folder_of_a_file_is_made(tmp_path: Path) -> None:
    with open_database(f"sqlite:///{tmp_path}/a/b c/k.db") as database:
        stored(database)
    assert (tmp_path / "a" / "b c" / "k.db").is_file()


def test_nobody_else_reads_a_new_file(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        with open_database(f"sqlite:///{tmp_path}/home/k.db") as database:
            stored(database)
            found = sorted(tmp_path.rglob("*"))
            assert [path.name for path in found] == ["home", "k.db", "k.db-shm", "k.db-wal"]
            assert [path.stat().st_mode & 0o077 for path in found] == [0, 0, 0, 0]
    finally:
        os.umask(before)


def test_a_file_that_is_there_keeps_its_mode(tmp_path: Path) -> None:
    (tmp_path / "k.db").touch(0o640)
    (tmp_path / "k.db").chmod(0o640)
    with open_database(f"sqlite:///{tmp_path}/k.db") as database:
        stored(database)
    assert (tmp_path / "k.db").stat().st_mode & 0o777 == 0o640


def test_a_file_is_safe_against_a_power_cut(tmp_path: Path) -> None:
    with open_database(f"sqlite:///{tmp_path}/k.db") as database, database.read() as connection:
        assert connection.scalar(text("PRAGMA journal_mode")) == "wal"
        assert connection.scalar(text("PRAGMA synchronous")) == 2  # FULL
        assert connection.scalar(text("PRAGMA foreign_keys")) == 1


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///:memory:"])
def test_a_database_in_memory(url: str) -> None:
    with open_database(url) as database:
        run = stored(database)
        with database.read() as connection:
            assert runs.get(connection, run.id) == run


@pytest.mark.parametrize("scheme", ["postgres", "postgresql", "postgresql+psycopg"])
def test_every_spelling_of_postgresql(postgres: Postgres, scheme: str) -> None:
    url = postgres.create()
    with open_database(url.replace("postgresql", scheme, 1)) as database:
        stored(database)
    postgres.drop(url)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("", "cannot be read"),
        ("/home/me/kitsune.db", "cannot be read"),
        ("postgresql://me:hunter2@host:port/db", "cannot be read"),
        ("mysql://me:hunter2@host/db", "cannot begin with mysql"),
        ("postgresql://me:s3c@hunter2@host/db", "more than one @; .* as %40"),
        ("postgresql+psycopg2://me:hunter2@host/db", "cannot begin with"),
    ],
)
def test_a_url_that_makes_no_sense(url: str, says: str) -> None:
    with pytest.raises(StoreError, match=says) as caught:
        open_database(url)
    assert "hunter2" not in str(caught.value)


def test_no_server_at_the_address() -> None:
    with pytest.raises(StoreError, match=r"postgresql\+psycopg://127.0.0.1:1/db cannot be reached \(") as caught:
        open_database("postgresql://me:hunter2@127.0.0.1:1/db")
    assert "hunter2" not in str(caught.value)


def test_a_password_behind_the_question_mark_is_not_told() -> None:
    with pytest.raises(StoreError, match=r"the database postgresql\+psycopg://127.0.0.1:1/db cannot") as caught:
        open_database("postgresql://127.0.0.1:1/db?sslmode=bogus&password=hunter2")
    assert "hunter2" not in str(caught.value)


def test_a_network_that_went_silent_is_noticed(postgres: Postgres) -> None:
    url = postgres.create()
    with open_database(url) as database, database.read() as connection:
        used = connection.connection.dbapi_connection.info.get_parameters()
    postgres.drop(url)
    assert used["tcp_user_timeout"] == "30000"
    assert int(used["keepalives_idle"]) + int(used["keepalives_interval"]) * int(used["keepalives_count"]) == 30


def test_no_such_database(postgres: Postgres) -> None:
    with pytest.raises(StoreError, match="does not exist"):
        open_database(postgres.admin.url.set(database="nowhere").render_as_string(hide_password=False))


def test_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(StoreError, match=r"kitsune-torch\[postgres\]"):
        open_database("postgresql://127.0.0.1:1/db")


def test_a_file_that_is_not_a_database(tmp_path: Path) -> None:
    path = tmp_path / "k.db"
    path.write_bytes(b"not a database at all, but the notes of somebody" * 100)
    before = path.read_bytes()
    with pytest.raises(StoreError, match="not an SQLite database"):
        open_database(f"sqlite:///{path}")
    assert path.read_bytes() == before


def test_a_damaged_file(tmp_path: Path) -> None:
    path = tmp_path / "k.db"
    with open_database(f"sqlite:///{path}") as database:
        stored(database)
    data = path.read_bytes()
    path.write_bytes(data[:4096] + b"\xff" * (len(data) - 4096))  # the first page, its header included, is whole
    with pytest.raises(StoreError, match="damaged"):
        open_database(f"sqlite:///{path}")


def test_a_folder_in_place_of_the_file(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="cannot be opened"):
        open_database(f"sqlite:///{tmp_path}")


def test_a_file_in_place_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    with pytest.raises(StoreError, match=r"cannot make the folder .*KITSUNE_DATABASE_URL"):
        open_database(f"sqlite:///{tmp_path}/a/b/k.db")


def test_a_read_only_file_can_be_read(tmp_path: Path) -> None:
    with open_database(f"sqlite:///{tmp_path}/k.db") as database:
        run = stored(database)
    with open_database(f"sqlite:///file:{tmp_path}/k.db?mode=ro&uri=true") as database:
        with database.read() as connection:
            assert runs.get(connection, run.id) == run
        with pytest.raises(StoreError, match="read-only"), database.begin() as connection:
            runs.cancel(connection, run.id)


def test_an_empty_read_only_file(tmp_path: Path) -> None:
    sqlite3.connect(tmp_path / "k.db").close()
    with pytest.raises(StoreError, match="read-only"):
        open_database(f"sqlite:///file:{tmp_path}/k.db?mode=ro&uri=true")


def test_a_locked_file_is_told_of_within_the_timeout(tmp_path: Path) -> None:
    with open_database(f"sqlite:///{tmp_path}/k.db", busy_timeout_s=0.3) as database:
        run = stored(database)
        other = sqlite3.connect(tmp_path / "k.db", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        began = time.monotonic()
        with pytest.raises(StoreBusyError, match="locked"), database.begin() as connection:
            runs.cancel(connection, run.id)
        assert 0.25 < time.monotonic() - began < 20
        with database.read() as connection:  # who only reads does not wait
            assert runs.get(connection, run.id) == run
        other.execute("ROLLBACK")
        other.close()
        with database.begin() as connection:
            assert runs.cancel(connection, run.id) is not None


def test_a_file_locked_altogether_cannot_be_opened(tmp_path: Path) -> None:
    other = sqlite3.connect(tmp_path / "k.db", isolation_level=None)
    other.execute("CREATE TABLE t (a)")
    other.execute("BEGIN EXCLUSIVE")
    with pytest.raises(StoreBusyError, match="locked"):
        open_database(f"sqlite:///{tmp_path}/k.db", busy_timeout_s=0.2)
    other.execute("ROLLBACK")
    other.close()
    open_database(f"sqlite:///{tmp_path}/k.db").close()


def test_a_locked_row_is_told_of_within_the_timeout(postgres: Postgres) -> None:
    url = postgres.create()
    with open_database(url) as rival, open_database(url, busy_timeout_s=0.3) as database:
        run = stored(database)
        with rival.begin() as held:
            runs.heartbeat(held, run)
            began = time.monotonic()
            with pytest.raises(StoreBusyError, match="locked"), database.begin() as connection:
                runs.cancel(connection, run.id)
            assert 0.25 < time.monotonic() - began < 20
    postgres.drop(url)


def test_every_connection_in_use(tmp_path: Path) -> None:
    with open_database(f"sqlite:///{tmp_path}/k.db") as database:
        database.engine.pool._timeout = 0.1
        held = [database.engine.connect() for _ in range(15)]
        with pytest.raises(StoreBusyError, match="in use"), database.begin():
            pytest.fail("there was a sixteenth connection")
        for connection in held:
            connection.close()


def test_a_full_disk_loses_nothing(tmp_path: Path) -> None:
    with open_database(f"sqlite:///{tmp_path}/k.db") as database:
        run = stored(database)
        with database.begin() as connection:
            trials.add(connection, run, a_trial(run, 0))
            pages = connection.scalar(text("PRAGMA page_count"))
        limit = {"pages": pages + 2}
        event.listen(database.engine, "begin", lambda c: c.exec_driver_sql(f"PRAGMA max_page_count = {limit['pages']}"))
        long = Failure(kind=FailureKind.RAISED, phase=Phase.BUILD, reason="x" * 2000)
        acknowledged = [0]

        def fill() -> None:
            for number in range(1, 100):
                with database.begin() as connection:
                    trials.add(connection, run, a_trial(run, number, failure=long))
                acknowledged.append(number)

        with pytest.raises(StoreFullError, match="no space left"):
            fill()
        with database.read() as connection:
            assert [trial.number for trial in trials.list_of(connection, run.id)] == acknowledged
            assert runs.get(connection, run.id) == run.evolve(trials=len(acknowledged))
            assert connection.scalar(text("PRAGMA integrity_check")) == "ok"
        limit["pages"] = 10_000  # space was made
        with database.begin() as connection:
            assert trials.add(connection, run, a_trial(run, 100, failure=long))
            assert runs.heartbeat(connection, run, now=after(1)).heartbeat_at == after(1)


def test_a_worker_that_falls_silent_in_a_transaction_gives_up_its_locks(
    postgres: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = postgres.create()
    with open_database(url) as database, ExitStack() as opened:
        run = stored(database)
        monkeypatch.setattr(engine, "SILENCE_S", 2.0)
        silent = opened.enter_context(open_database(url))

        def fall_silent() -> None:
            with silent.begin() as connection:
                trials.add(connection, run, a_trial(run))
                with database.begin() as rival:  # waits for the lock until the server takes it from the silent one
                    assert runs.claim_one(rival, run.id, "v", now=after(1000)) is not None
                trials.add(connection, run, a_trial(run, 1))

        with pytest.raises(StoreBusyError, match="left open too long"):
            fall_silent()
        with database.read() as connection:
            assert trials.list_of(connection, run.id) == []


@pytest.mark.parametrize(
    ("state", "kind", "says"),
    [
        ("53100", StoreFullError, "no space left"),
        ("53200", StoreError, "out of resources"),
        ("53300", StoreBusyError, "no connection left"),
        ("40P01", StoreBusyError, "rival"),
        ("40001", StoreBusyError, "rival"),
        ("25006", StoreError, "read-only"),
        ("42501", StoreError, "refuses this user"),
        ("XX001", StoreError, "damaged"),
        ("22003", StoreError, "refused (22003: because)"),
    ],
)
def test_what_postgresql_raises_is_told_in_our_words(
    postgres: Postgres, state: str, kind: type[StoreError], says: str
) -> None:
    with open_database(postgres.create()) as database:
        with pytest.raises(StoreError) as caught, database.begin() as connection:
            connection.execute(text(f"DO $$ BEGIN RAISE EXCEPTION 'because' USING ERRCODE = '{state}'; END $$"))
        assert type(caught.value) is kind
        assert says in str(caught.value)
        assert caught.value.__cause__ is not None


def test_a_connection_that_the_server_closed(postgres: Postgres) -> None:
    with open_database(postgres.create()) as database:
        run = stored(database)
        with pytest.raises(StoreError, match="closed the connection"), database.begin() as connection:
            connection.execute(text("SELECT pg_terminate_backend(pg_backend_pid())"))
        with database.begin() as connection:  # the next one connects again
            assert runs.get(connection, run.id) == run


def test_a_rival_cannot_claim_between_check_and_commit(postgres: Postgres) -> None:
    """A zombie's trial is being written while another worker claims: the claim waits for it, or passes it by."""
    with open_database(postgres.create()) as database:
        run = stored(database)
        done = Event()

        def take_over() -> None:
            with database.begin() as connection:
                runs.claim_one(connection, run.id, "v", now=after(1000))
            done.set()

        with database.begin() as connection:
            trials.add(connection, run, a_trial(run))
            with database.begin() as rival:
                assert runs.claim(rival, "v", device="cpu", now=after(1000)) is None
            thread = Thread(target=take_over)
            thread.start()
            assert not done.wait(0.3)
        thread.join(60)
        assert done.is_set()
        with database.read() as connection:
            taken = runs.get(connection, run.id)
        assert taken is not None
        assert taken.attempt == 2
