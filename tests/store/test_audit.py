"""The audit of benchmarks/reliability.py finds nothing where all is well, and each fault that it is there to find."""

import pytest
from sqlalchemy import delete, update

from benchmarks.audit import IN_VAIN, Audit, audited
from tests.store.carrying import carried_out, claimed
from tests.store.samples import a_plan, a_run
from tests.unit.tuner.machine import SMALL, Machine
from tuner.records import Run, RunStatus, Source
from tuner.store import tables
from tuner.store.database import Database
from tuner.store.queries import plans, runs

run_rows, trial_rows, plan_rows = tables.runs, tables.trials, tables.plans


@pytest.fixture
def run(database: Database) -> Run:
    """Finished, with four trials of its search and those that confirm it."""
    done, _ = carried_out(database, claimed(database, budget_trials=4), Machine(inapplicable=SMALL))
    return done


def write(database: Database, *statements) -> None:
    with database.begin() as connection:
        for statement in statements:
            connection.execute(statement)


def set_run(database: Database, run: Run, **values: object) -> None:
    write(database, update(run_rows).where(run_rows.c.id == run.id).values(**values))


def test_a_run_that_was_carried_out_has_no_fault(database, run):
    found = audited(database, [run.id])
    assert found.faults == []
    assert (found.finished, found.in_vain, found.resumed) == (1, 0, 0)
    assert found.trials > 4


def test_a_run_that_is_not_there_or_has_not_ended_is_lost(database, run):
    waiting = a_run()
    with database.begin() as connection:
        runs.add(connection, waiting)
    found = audited(database, [run.id, waiting.id, "gone"])
    assert found.lost == ["run gone was acknowledged and is not there", f"run {waiting.id} is queued"]


def test_a_run_that_nobody_was_told_of_is_doubled_unless_it_was_there_before(database, run):
    assert audited(database, []).doubled == [f"run {run.id} answers to nobody's submit"]
    assert audited(database, [], frozenset({run.id})) == Audit()
    assert audited(database, [run.id, run.id]).doubled == [f"run {run.id} answers to two submits"]


def test_ten_workers_that_died_in_vain_are_no_fault_and_nine_are(database):
    run = claimed(database)
    set_run(database, run, status=RunStatus.FAILED, error=f"{IN_VAIN}; read the log", deaths=10)
    found = audited(database, [run.id])
    assert (found.in_vain, found.faults) == (1, [])
    set_run(database, run, deaths=9)
    found = audited(database, [run.id])
    assert (found.in_vain, len(found.failed)) == (0, 1)


@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        ({"number": 77}, "has the trials [0, 2, 3, "),
        ({"knobs": {}}, "tried one configuration twice"),
        ({"attempt": 9}, "of attempt 1 has trials of the attempts [1, 9, 1, "),
        ({"source": Source.PLAYOFF}, "was to try 4 configurations and tried 3"),
    ],
)
def test_a_trial_that_is_missing_doubled_or_of_the_past_is_counted_wrongly(changed, fault, database, run):
    write(database, update(trial_rows).where(trial_rows.c.run_id == run.id, trial_rows.c.number == 1).values(**changed))
    assert fault in audited(database, [run.id]).faults[0]


def test_a_search_that_was_too_short_is_counted_wrongly(database, run):
    set_run(database, run, budget_trials=5)
    assert audited(database, [run.id]).miscounted == [
        f"run {run.id} was to try 5 configurations and tried 4",
    ]


def test_a_plan_too_many_or_of_another_run_is_misplanned(database, run):
    assert run.plan_id is not None
    another = a_plan(fingerprint="g")
    with database.begin() as connection:
        plans.put(connection, another)
    write(database, update(plan_rows).where(plan_rows.c.plan_id == another.plan_id).values(run_id=run.id))
    assert len(audited(database, [run.id]).misplanned) == 1
    write(database, delete(plan_rows).where(plan_rows.c.plan_id == another.plan_id))
    assert audited(database, [run.id]).faults == []
    set_run(database, run, status=RunStatus.FAILED)
    assert len(audited(database, [run.id]).misplanned) == 1
