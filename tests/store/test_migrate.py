"""From any database to the schema of this version, or a refusal that says why."""

import json
from collections.abc import Iterable
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from optuna import create_study
from optuna.storages import RDBStorage
from sqlalchemy import Connection, event, inspect, text

from kitsune.errors import SchemaError, StoreFullError
from tests.store.samples import a_plan, a_run, an_archive
from tuner.records import Verdict
from tuner.store import migrate, tables
from tuner.store.database import Database
from tuner.store.engine import create, open_database
from tuner.store.queries import archives, plans, runs, submits, tokens, trials

OURS = {*tables.metadata.tables, tables.VERSION_TABLE}


def names(connection: Connection) -> set[str]:
    return set(inspect(connection).get_table_names())


def test_revisions_are_one_line_that_ends_where_the_code_says(tmp_path: Path) -> None:
    with Database(create(f"sqlite:///{tmp_path}/k.db")) as database, database.read() as connection:
        scripts = ScriptDirectory.from_config(migrate.config(connection))
    assert scripts.get_heads() == [tables.SCHEMA_REVISION]
    for script in scripts.walk_revisions():
        assert Path(script.path).name.startswith(f"{script.revision}_")
        assert not script.is_branch_point


def test_a_migrated_database_is_what_the_code_describes(bare_url: str) -> None:
    with open_database(bare_url) as database, database.begin() as connection:
        context = MigrationContext.configure(
            connection,
            opts={
                "compare_type": True,
                "version_table": tables.VERSION_TABLE,
                "include_name": lambda name, kind, _: kind != "table" or name in OURS,
            },
        )
        assert compare_metadata(context, tables.metadata) == []
        command.check(migrate.config(connection))
        assert names(connection) == OURS


def test_a_difference_would_be_noticed(bare_url: str) -> None:
    with open_database(bare_url) as database, database.begin() as connection:
        connection.execute(text("DROP INDEX ix_kitsune_runs_created_at_id"))
        with pytest.raises(Exception, match="ix_kitsune_runs_created_at_id"):
            command.check(migrate.config(connection))


def test_down_and_up_again(bare_url: str) -> None:
    with open_database(bare_url) as database:
        with database.begin() as connection:
            command.downgrade(migrate.config(connection), "base")
            assert names(connection) == {tables.VERSION_TABLE}
        migrate.bring_up_to_date(database)
        with database.begin() as connection:
            command.check(migrate.config(connection))
            runs.add(connection, a_run())


def test_a_second_opening_changes_nothing(bare_url: str) -> None:
    run = a_run()
    with open_database(bare_url) as database, database.begin() as connection:
        runs.add(connection, run)
    with open_database(bare_url) as database, database.read() as connection:
        assert runs.get(connection, run.id) == run
        assert migrate.revisions(connection) == (tables.SCHEMA_REVISION,)


def test_an_old_database_keeps_its_rows(bare_url: str) -> None:
    """Those of the first version, written as it wrote them, with every reference between them."""
    with Database(create(bare_url)) as database:
        with database.begin() as connection:
            command.upgrade(migrate.config(connection), "0001")
            old = fill_first_version(connection)
            assert migrate.revisions(connection) == ("0001",)
        migrate.bring_up_to_date(database)
        with database.begin() as connection:
            command.check(migrate.config(connection))
            assert {name: rows(connection, name, old[name][0]) for name in old} == old
            run = runs.get(connection, "r1")
            assert run is not None
            assert (run.name, run.archive, run.workload, run.plan_id) == ("", None, "zoo:mlp", "p1")
            assert [trial.number for trial in trials.list_of(connection, "r1")] == [0]
            taken = runs.claim(connection, "w", device="cpu")
            assert taken is not None
            assert taken.id == "r2"
            runs.add(connection, a_run(name="new"))


def test_back_to_the_first_version_keeps_what_that_knew(bare_url: str) -> None:
    with Database(create(bare_url)) as database, database.begin() as connection:
        command.upgrade(migrate.config(connection), "0001")
        old = fill_first_version(connection)
        before = schema(connection)
        command.upgrade(migrate.config(connection), "head")
        step = an_archive()
        stored, _ = archives.put(connection, step.to_bytes(), step)
        run, _ = submits.submit(connection, submits.Request(archive=stored.sha256), owner="ann", key="k")
        command.downgrade(migrate.config(connection), "0001")
        assert schema(connection) == before
        found = {name: rows(connection, name) for name in old}
        assert found["kitsune_runs"].pop(0)["id"] == run.id
        assert found == old


def test_back_to_before_verdicts_that_noise_hides_they_are_told_in_its_words(bare_url: str) -> None:
    with open_database(bare_url) as database, database.begin() as connection:
        run = a_run(verdict="too_noisy")
        runs.add(connection, run)
        assert runs.get(connection, run.id).verdict is Verdict.TOO_NOISY
        command.downgrade(migrate.config(connection), "0009")
        found = connection.execute(text("SELECT verdict FROM kitsune_runs")).scalar_one()
        command.upgrade(migrate.config(connection), "head")
        assert found == "ambiguous"


def test_a_database_without_teams_tells_of_its_runs_what_a_list_shows(bare_url: str) -> None:
    """Rows as 0003 had them: everything is of the team "default", trials are counted, plans are read for their gain."""
    moment = "2026-11-20 12:00:00.123456"
    plan = a_plan(1.5)
    evidence = plan.evidence.model_dump(mode="json") | {"baseline_peak_bytes": 400, "peak_bytes": 300}
    documents = {
        "good": json.dumps({"evidence": evidence}),
        "no memory": json.dumps({"evidence": evidence | {"baseline_peak_bytes": 0}}),
        "by hand": json.dumps({"evidence": None}),
        "not json": "nonsense",
        "not a plan": "[1]",
        "altered": json.dumps({"evidence": evidence | {"speedup": {"median": "fast"}}}),
        "infinite": json.dumps({"evidence": evidence | {"peak_bytes": 10**400}}),
    }
    with Database(create(bare_url)) as database:
        with database.begin() as connection:
            command.upgrade(migrate.config(connection), "0003")
            put = partial(insert_row, connection)
            for name, document in documents.items():
                put("plans", plan_id=name, fingerprint="f", created_at=moment, document=document)
                put("runs", **OLD_RUN, id=name, status="finished", plan_id=name, created_at=moment)
            put("runs", **OLD_RUN, id="queued", status="queued", created_at=moment)
            for number in range(3):
                told = {"attempt": 1, "source": "seed", "knobs": "{}", "started_at": moment, "finished_at": moment}
                put("trials", run_id="good", number=number, **told)
            put("archives", sha256="a" * 64, content=b"x", size_bytes=1, fingerprint="f", model_fingerprint="m",
                created_at=moment)  # fmt: skip
            put("tokens", id="t", name="ci", digest="d", scopes='["read"]', created_at=moment)
        migrate.bring_up_to_date(database)
        with database.begin() as connection:
            command.check(migrate.config(connection))
            found = {run.id: run for run in runs.page(connection, team="default").runs}
            assert set(found) == {*documents, "queued"}
            good = found["good"]
            assert (good.trials, good.speedup, good.memory_ratio) == (3, plan.evidence.speedup, 0.75)
            assert (found["no memory"].speedup, found["no memory"].memory_ratio) == (plan.evidence.speedup, None)
            for name in ("by hand", "not json", "not a plan", "altered", "infinite", "queued"):
                assert (found[name].trials, found[name].speedup, found[name].memory_ratio) == (0, None, None)
            best = runs.page(connection, team="default", sort=runs.Sort.GAIN, limit=2).runs
            assert {run.id for run in best} == {"good", "no memory"}
            by_low = runs.page(connection, team="default", min_gain_low=plan.evidence.speedup.low).runs
            assert {run.id for run in by_low} == {"good", "no memory"}
            assert archives.get(connection, "a" * 64) is not None
            assert archives.get(connection, "a" * 64, team="red") is None
            kept = connection.execute(text("SELECT team, document FROM kitsune_plans WHERE plan_id = 'good'")).one()
            assert kept == ("default", documents["good"])
            assert [token.team for token in tokens.listed(connection)] == ["default"]


def test_runs_from_before_have_the_names_that_a_list_shows(bare_url: str) -> None:
    """Rows as 0007 had them: the migration calls them as the code of its version does."""
    told = [
        {"workload": "zoo:gpt2_small?batch=8&seq=512"},
        {"workload": "zoo:googlenet", "name": "Mine \u202e"},
        {"workload": "train.py:make"},
        {"workload": "live"},
        {"workload": "archive", "fingerprint": "c" * 64},
    ]
    with Database(create(bare_url)) as database:
        with database.begin() as connection:
            command.upgrade(migrate.config(connection), "0007")
            for number, changes in enumerate(told):
                row = {**OLD_RUN, "id": f"r{number}", "status": "queued", "created_at": "2026-11-20 12:00:00.123456"}
                insert_row(connection, "runs", **{**row, **changes})
        migrate.bring_up_to_date(database)
        with database.read() as connection:
            labels = {row["id"]: row["label"] for row in rows(connection, "kitsune_runs", ("id", "label"))}
            found = runs.page(connection).runs
            assert labels == {run.id: runs.label_of(run).casefold() for run in found} and len(labels) == len(told)


def test_archives_from_before_tell_of_their_models_and_count_for_their_teams(bare_url: str) -> None:
    """Rows as 0005 had them."""
    moment = "2026-11-20 12:00:00.123456"
    plan = a_plan(1.5)
    with Database(create(bare_url)) as database:
        with database.begin() as connection:
            command.upgrade(migrate.config(connection), "0005")
            put = partial(insert_row, connection)
            for letter, size in (("a", 3), ("b", 5)):  # two batch sizes of one step
                put("archives", sha256=letter * 64, content=b"x", size_bytes=size, fingerprint=plan.fingerprint,
                    model_fingerprint="m", created_at=moment)  # fmt: skip
                put("archive_owners", team="default", sha256=letter * 64, created_at=moment)
            put("archive_owners", team="blue", sha256="b" * 64, created_at=moment)
        migrate.bring_up_to_date(database)
        with database.begin() as connection:
            command.check(migrate.config(connection))
            plans.put(connection, plan)
            assert [found.plan_id for found in plans.find_documents(connection, "m", team="default")] == [plan.plan_id]
            assert plans.find_documents(connection, "m", team="blue") == []
            assert plans.extent(connection)[:2] == (1, 2)
            owners = rows(connection, "kitsune_archive_owners", ("team", "sha256", "size_bytes", "sent_at, created_at"))
        assert [(row["team"], row["size_bytes"]) for row in owners] == [("blue", 5), ("default", 3), ("default", 5)]
        assert all(row["sent_at"] == row["created_at"] for row in owners)


def insert_row(connection: Connection, table: str, **row: Any) -> None:
    columns, values = ", ".join(row), ", ".join(f":{name}" for name in row)
    connection.execute(text(f"INSERT INTO kitsune_{table} ({columns}) VALUES ({values})"), row)


def fill_first_version(connection: Connection) -> dict[str, list[dict[str, Any]]]:
    """The rows that are there then, by table. No code of today makes them: that may change."""
    moment = "2026-11-20 12:00:00.123456"
    knobs = '{"precision":"bf16"}'
    for table, row in (
        ("plans", {"plan_id": "p1", "fingerprint": "f", "created_at": moment, "document": f'{{"knobs":{knobs}}}'}),
        ("runs", {"id": "r1", **OLD_RUN, "status": "finished", "plan_id": "p1", "created_at": moment}),
        ("runs", {"id": "r2", **OLD_RUN, "status": "queued", "created_at": moment}),
        (
            "trials",
            {"run_id": "r1", "number": 0, "attempt": 1, "source": "seed", "knobs": knobs}
            | {"started_at": moment, "finished_at": moment},
        ),
    ):
        insert_row(connection, table, **row)
    return {name: rows(connection, name) for name in ("kitsune_plans", "kitsune_runs", "kitsune_trials")}


OLD_RUN = {"workload": "zoo:mlp", "fingerprint": "f", "device": "cpu", "seed": 0, "attempt": 0, "inapplicable": "{}"}


def rows(connection: Connection, table: str, like: Iterable[str] = ("*",)) -> list[dict[str, Any]]:
    found = connection.execute(text(f"SELECT {', '.join(like)} FROM {table} ORDER BY 1, 2"))
    return [dict(row._mapping) for row in found]


def schema(connection: Connection) -> list[tuple[str, list[str], list[str]]]:
    """Tables with their columns and indexes."""
    seen = inspect(connection)
    return [
        (
            name,
            [column["name"] for column in seen.get_columns(name)],
            sorted(str(i["name"]) for i in seen.get_indexes(name)),
        )
        for name in sorted(seen.get_table_names())
    ]


def test_a_newer_database_is_refused(bare_url: str) -> None:
    with open_database(bare_url) as database, database.begin() as connection:
        connection.execute(text(f"UPDATE {tables.VERSION_TABLE} SET version_num = '9999'"))
    with pytest.raises(SchemaError, match=r"revision 9999, which Kitsune .* does not know.*Upgrade Kitsune"):
        open_database(bare_url)


def test_our_tables_without_their_version_are_refused(bare_url: str) -> None:
    with open_database(bare_url) as database, database.begin() as connection:
        connection.execute(text(f"DROP TABLE {tables.VERSION_TABLE}"))
    with pytest.raises(SchemaError, match=r"kitsune_archives, .*kitsune_trials but no"):
        open_database(bare_url)


def test_tables_of_optuna_survive(bare_url: str) -> None:
    with Database(create(bare_url)) as database, database.begin() as connection:
        for table in ("alembic_version", "studies", "trials"):
            connection.execute(text(f"CREATE TABLE {table} (version_num TEXT)"))
            connection.execute(text(f"INSERT INTO {table} VALUES ('v3.2.0.a')"))
    with open_database(bare_url) as database, database.begin() as connection:
        assert names(connection) == {*OURS, "alembic_version", "studies", "trials"}
        command.check(migrate.config(connection))
        command.downgrade(migrate.config(connection), "base")
        for table in ("alembic_version", "studies", "trials"):
            assert connection.scalar(text(f"SELECT version_num FROM {table}")) == "v3.2.0.a"


@pytest.mark.parametrize("first", ["optuna", "kitsune"])
def test_optuna_itself_works_beside_us(tmp_path: Path, first: str) -> None:
    url = f"sqlite:///{tmp_path}/k.db"
    if first == "kitsune":
        open_database(url).close()
    storage = RDBStorage(url)
    create_study(storage=storage, study_name="s").ask().suggest_float("x", 0, 1)
    with open_database(url) as database, database.begin() as connection:
        runs.add(connection, a_run())
        command.check(migrate.config(connection))
    assert len(storage.get_all_trials(storage.get_study_id_from_name("s"))) == 1
    storage.engine.dispose()


def test_a_disk_that_fills_up_while_migrating_leaves_no_half(tmp_path: Path) -> None:
    engine = create(f"sqlite:///{tmp_path}/k.db")
    event.listen(engine, "connect", lambda c, _: c.execute("PRAGMA max_page_count = 6").close())
    with Database(engine) as database:
        with pytest.raises(StoreFullError, match="no space left"):
            migrate.bring_up_to_date(database)
        with database.read() as connection:
            assert names(connection) == set()
    open_database(f"sqlite:///{tmp_path}/k.db").close()


def test_the_scripts_stand_beside_the_package() -> None:
    assert (migrate.scripts_folder() / "env.py").is_file()
    assert (migrate.scripts_folder() / "script.py.mako").is_file()


def test_a_folder_of_the_users_with_the_same_name_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "migrations").mkdir()
    (tmp_path / "migrations" / "env.py").write_text("raise RuntimeError('the code of a stranger')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    with open_database("sqlite:///k.db") as database, database.read() as connection:
        assert names(connection) == OURS


def command_line() -> Config:
    """What `alembic` itself makes of a configuration that names the folder of the scripts and nothing else."""
    configured = Config(output_buffer=StringIO())
    configured.set_main_option("script_location", str(migrate.scripts_folder()))
    return configured


def test_alembics_command_line_finds_the_database(bare_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KITSUNE_DATABASE_URL", bare_url)
    command.upgrade(command_line(), "head")
    command.check(command_line())
    with Database(create(bare_url)) as database, database.read() as connection:
        assert names(connection) == OURS


def test_alembics_command_line_prints_sql(bare_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KITSUNE_DATABASE_URL", bare_url)
    configured = command_line()
    command.upgrade(configured, "head", sql=True)
    printed = configured.output_buffer.getvalue()
    assert all(f"CREATE TABLE {name}" in printed for name in OURS)
    with Database(create(bare_url)) as database, database.read() as connection:
        assert names(connection) == set()
