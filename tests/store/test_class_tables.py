"""Class tables on both databases: written once and by who may, gone with their run, and left out when damaged."""

import pytest
from alembic import command
from sqlalchemy import text

from kitsune.class_tables import ClassTables
from kitsune.errors import LeaseLostError, StoppedError, StoreError
from tests.store.carrying import carried_out, claimed, raising, stored, taken_over
from tests.store.samples import a_run, some_class_tables
from tests.unit.tuner.machine import GRAPH_WINS, SMALL, Machine, classes_of
from tuner.records import RunStatus
from tuner.store import migrate
from tuner.store.engine import open_database
from tuner.store.queries import class_tables, retention, runs
from tuner.tuning.class_recording import VANISHED, without
from tuner.tuning.events import Ablating, Event, Explaining

FOUND = some_class_tables()


def kept(database, run) -> ClassTables | None:
    with database.read() as connection:
        return class_tables.get(connection, run.id)


def put(database, run, found: ClassTables = FOUND) -> bool:
    with database.begin() as connection:
        return class_tables.put(connection, run, found)


@pytest.mark.parametrize("found", [FOUND, without("out of memory \x00 \N{SNOWMAN}")])
def test_what_goes_in_comes_out(database, found):
    run = claimed(database)
    assert kept(database, run) is None
    assert put(database, run, found)
    assert kept(database, run) == found


def test_the_first_ones_stay(database):
    run = claimed(database)
    assert put(database, run)
    assert not put(database, run, without("so"))
    assert kept(database, run) == FOUND


def test_who_has_lost_the_run_writes_nothing(database):
    run = claimed(database)
    with database.begin() as connection:
        runs.cancel(connection, run.id)
    with pytest.raises(LeaseLostError):
        put(database, run)
    assert kept(database, run) is None


def test_they_go_with_their_run(database):
    run, other = claimed(database), claimed(database)
    for each in (run, other):
        put(database, each)
        with database.begin() as connection:
            runs.cancel(connection, each.id)
    with database.begin() as connection:
        retention.delete_run(connection, run.id)
    assert kept(database, run) is None
    assert kept(database, other) == FOUND


@pytest.mark.parametrize("content", ["", "no", "[]", '{"classes":[["a",1,-1,0]]}', '{"surprise":1}', "[" * 100_000])
def test_damaged_ones_are_noticed_and_left_out_of_pages(database, content, caplog):
    run = claimed(database)
    put(database, run)
    with database.begin() as connection:
        connection.execute(text("UPDATE kitsune_class_tables SET given = :content"), {"content": content})
    with pytest.raises(StoreError, match=f"row {run.id} of kitsune_class_tables is not a ClassTables"):
        kept(database, run)
    with database.read() as connection:
        assert class_tables.readable(connection, run.id) is None
    assert f"the class tables of run {run.id} are left out" in caplog.text


def test_a_run_from_before_has_none(bare_url):
    with open_database(bare_url) as database:
        with database.begin() as connection:
            runs.add(connection, a_run(id="old"))
            command.downgrade(migrate.config(connection), "0012")
        migrate.bring_up_to_date(database)
        with database.read() as connection:
            assert runs.get(connection, "old") is not None
            assert class_tables.get(connection, "old") is None


# By a worker ----------------------------------------------------------------------------------------------------------


def a_machine() -> Machine:
    return Machine(step_ms=GRAPH_WINS, inapplicable=SMALL, ablates=True)


def test_a_worker_keeps_them_after_the_plan_and_before_it_takes_its_choices_back(database):
    run, seen = claimed(database), []

    def tell(event: Event) -> None:
        if isinstance(event, (Explaining, Ablating)):
            current, _ = stored(database, run)
            seen.append((type(event), current.plan_id is not None, kept(database, run) is not None))

    _, conclusion = carried_out(database, run, a_machine(), tell)
    assert seen[:3] == [(Explaining, True, False), (Explaining, True, False), (Ablating, True, True)]
    assert kept(database, run) == ClassTables(given=classes_of({}), plan=classes_of(conclusion.plan.knobs))


@pytest.mark.parametrize("error", [KeyboardInterrupt(), StoppedError("the worker was asked to end"), ValueError("no")])
def test_what_ends_a_recording_leaves_a_finished_run(database, error):
    def tell(event: Event) -> None:
        if isinstance(event, Explaining):
            raising(error)()

    run = claimed(database)
    _, conclusion = carried_out(database, run, a_machine(), tell)
    found, _ = stored(database, run)
    assert (found.status, found.plan_id) == (RunStatus.FINISHED, conclusion.plan.plan_id)
    assert kept(database, run) is None
    assert conclusion.interrupted is not isinstance(error, ValueError)


class PowerCutError(BaseException):
    """Nobody catches it: what a process that dies leaves behind."""


def test_a_worker_that_takes_over_records_nothing_and_goes_on(database):
    def tell(event: Event) -> None:
        if isinstance(event, Explaining):
            raise PowerCutError

    run, heir = claimed(database), a_machine()
    with pytest.raises(PowerCutError):
        carried_out(database, run, a_machine(), tell)
    carried_out(database, taken_over(database, run), heir)
    assert kept(database, run) == without(VANISHED)
    assert heir.explained == []
    assert stored(database, run)[0].status is RunStatus.FINISHED


def test_what_was_recorded_before_a_worker_vanished_stays(database):
    def tell(event: Event) -> None:
        if isinstance(event, Ablating):
            raise PowerCutError

    run = claimed(database)
    with pytest.raises(PowerCutError):
        carried_out(database, run, a_machine(), tell)
    before = kept(database, run)
    carried_out(database, taken_over(database, run), a_machine())
    assert before is not None
    assert kept(database, run) == before
