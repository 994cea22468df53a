"""Timelines on both databases: written once and by who may, gone with their run, and never read when damaged."""

import zlib

import pytest
from sqlalchemy import select, update

from kitsune.errors import LeaseLostError, StoreError
from kitsune.timeline import Timeline
from tests.store.carrying import carried_out, claimed, stored
from tests.store.samples import a_timeline
from tests.unit.tuner.machine import GRAPH_WINS, SMALL, Machine
from tuner.measuring.protocol import Job
from tuner.records import Measurement, RunStatus, Source
from tuner.statistics.process_statistics import PROCESSES
from tuner.store import tables
from tuner.store.queries import retention, runs, timelines
from tuner.store.queries.timelines import MAX_BYTES

SMALLEST = Timeline(streams=1, names=(), launches=())


class Scheduling(Machine):
    """Its children schedule every step of which they are asked for the launches, each in another way."""

    def measurement(self, number: int, job: Job) -> Measurement:
        found = super().measurement(number, job)
        timeline = a_timeline(told=f"of child {number}") if job.timeline else None
        return found.model_copy(update={"timeline": timeline})


def kept(database, run) -> Timeline | None:
    with database.read() as connection:
        return timelines.get(connection, run.id)


@pytest.mark.parametrize("timeline", [a_timeline(), a_timeline(2000, 4), SMALLEST])
def test_what_goes_in_comes_out(database, timeline):
    run = claimed(database)
    assert kept(database, run) is None
    with database.begin() as connection:
        assert timelines.put(connection, run, timeline)
    assert kept(database, run) == timeline


def test_the_first_one_stays(database):
    run = claimed(database)
    with database.begin() as connection:
        assert timelines.put(connection, run, a_timeline())
        assert not timelines.put(connection, run, SMALLEST)
    assert kept(database, run) == a_timeline()


def test_who_has_lost_the_run_writes_nothing(database):
    run = claimed(database)
    with database.begin() as connection:
        runs.cancel(connection, run.id)
        with pytest.raises(LeaseLostError):
            timelines.put(connection, run, a_timeline())
    assert kept(database, run) is None


def test_it_goes_with_its_run(database):
    run, other = claimed(database), claimed(database)
    with database.begin() as connection:
        for each in (run, other):
            timelines.put(connection, each, a_timeline())
            runs.cancel(connection, each.id)
    with database.begin() as connection:
        retention.delete_run(connection, run.id)
    assert kept(database, run) is None
    assert kept(database, other) == a_timeline()


def test_a_damaged_one_is_noticed(database):
    run = claimed(database)
    with database.begin() as connection:
        timelines.put(connection, run, a_timeline(300))
        content = connection.scalar(select(tables.timelines.c.content))
    assert content is not None
    for bit in range(0, 8 * len(content), 8 * len(content) // 60):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        write(database, bytes(damaged))
        with pytest.raises(StoreError, match=f"row {run.id} of kitsune_timelines is not a Timeline"):
            kept(database, run)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not compressed",
        zlib.compress(b"[]"),
        zlib.compress(b"[" * 100_000),
        zlib.compress(b" " * (MAX_BYTES + 1)),
        zlib.compress(SMALLEST.model_dump_json().encode())[:-1],
        zlib.compress(SMALLEST.model_dump_json().encode()) + b"more",
    ],
    ids=["empty", "plain", "another", "deep", "a bomb", "cut", "longer"],
)
def test_what_was_put_there_by_hand_is_refused(database, content):
    run = claimed(database)
    with database.begin() as connection:
        timelines.put(connection, run, SMALLEST)
    write(database, content)
    with pytest.raises(StoreError, match="is not a Timeline"):
        kept(database, run)


def write(database, content: bytes) -> None:
    with database.begin() as connection:
        connection.execute(update(tables.timelines).values(content=content))


# By a worker ----------------------------------------------------------------------------------------------------------


def test_a_worker_keeps_the_launches_of_the_confirmed_plan_beside_its_trials(database):
    machine = Scheduling(step_ms=GRAPH_WINS, inapplicable=SMALL)
    finished, conclusion = carried_out(database, claimed(database), machine)
    found, tried = stored(database, finished)
    assert found.status is RunStatus.FINISHED
    assert kept(database, found) == conclusion.timeline
    assert conclusion.timeline is not None
    assert {trial.source for trial in tried[-PROCESSES:]} == {Source.CONFIRM}
    assert conclusion.timeline.told == f"of child {len(tried) - PROCESSES}", "the first of those that confirm"
    assert [job.timeline for job in machine.jobs].count(True) == 1
    with database.read() as connection:
        measured = connection.scalars(select(tables.trials.c.measurement)).all()
    assert not any("of child" in each for each in measured)


def test_where_the_plan_is_not_what_was_scheduled_nothing_is_kept(database):
    machine = Scheduling(inapplicable=SMALL)  # nothing is faster than the step as given
    finished, conclusion = carried_out(database, claimed(database), machine)
    assert conclusion.plan.knobs == {}
    assert conclusion.timeline is None
    assert kept(database, finished) is None
