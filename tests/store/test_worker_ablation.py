"""What becomes of a run, on both databases, whose plan is stored and whose choices are still measured one by one."""

import logging
from collections.abc import Callable
from datetime import timedelta

import pytest
from sqlalchemy import func, select

from benchmarks.audit import audited
from kitsune.errors import LeaseLostError, StoppedError
from tests.store.carrying import cancel, carried_out, claimed, on_confirmed, raising, stored, taken_over
from tests.unit.tuner.machine import ENVIRONMENT, GRAPH, GRAPH_WINS, SMALL, Machine
from tuner.measuring.gpu_health import DEATHS_OF_A_TRIAL, GIVEN_UP
from tuner.planning.ablation import UNREACHED, ablation_of
from tuner.records import Run, RunStatus, Source, Trial
from tuner.statistics.plan_evidence import words
from tuner.statistics.process_statistics import PROCESSES
from tuner.store import tables
from tuner.store.database import Database
from tuner.store.queries import plans, runs
from tuner.tuning.events import Ablating, Event
from tuner.wall_clock import utcnow


class PowerCutError(BaseException):
    """Nobody catches it: what a process that dies leaves behind."""


def a_machine() -> Machine:
    return Machine(step_ms=GRAPH_WINS, inapplicable=SMALL, ablates=True)


@pytest.fixture
def machine() -> Machine:
    return a_machine()


def at(number: int, act: Callable[[], object]) -> Callable[[Event], None]:
    """A `tell` that acts when this process of the ablation is about to begin."""
    begun = iter(range(100))

    def tell(event: Event) -> None:
        if isinstance(event, Ablating) and next(begun) == number:
            act()

    return tell


def left_out(tried: list[Trial]) -> list[Trial]:
    return [trial for trial in tried if trial.source is Source.ABLATION]


def confirmed(tried: list[Trial]) -> int:
    return sum(trial.source is Source.CONFIRM for trial in tried)


def written_plans(database: Database) -> int:
    with database.read() as connection:
        return connection.scalar(select(func.count()).select_from(tables.plans)) or 0


def assert_whole(database: Database, run: Run) -> tuple[Run, list[Trial]]:
    """Finished, with one plan, and no trial lost or doubled."""
    assert audited(database, [run.id]).faults == []
    found, tried = stored(database, run)
    assert (found.status, written_plans(database)) == (RunStatus.FINISHED, 1)
    assert confirmed(tried) == PROCESSES
    return found, tried


def test_everything_is_kept(database, machine):
    run = claimed(database)
    finished, conclusion = carried_out(database, run, machine)
    found, tried = assert_whole(database, run)
    assert found == finished
    assert (found.plan_id, words(conclusion.plan.knobs)) == (conclusion.plan.plan_id, GRAPH)
    assert len(left_out(tried)) == 2
    assert {part.knob for part in ablation_of(conclusion.plan.knobs, tried, found.inapplicable).contributions} == set(
        conclusion.plan.knobs
    )
    assert not conclusion.interrupted


def test_the_plan_is_there_for_everybody_before_its_choices_are_measured(database, machine):
    run = claimed(database)
    seen: list[tuple[Run, int]] = []

    def look() -> None:
        with database.read() as connection:
            seen.append((runs.get(connection, run.id), len(plans.find(connection, "f", ENVIRONMENT))))

    _, conclusion = carried_out(database, run, machine, at(0, look))
    ((current, found),) = seen
    assert (current.status, current.plan_id, found) == (RunStatus.RUNNING, conclusion.plan.plan_id, 1)
    assert current.verdict is conclusion.verdict


# What ends it early ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [KeyboardInterrupt(), StoppedError("the worker was asked to end")])
def test_an_interrupt_ends_the_run_well(database, machine, error):
    run = claimed(database)
    _, conclusion = carried_out(database, run, machine, at(1, raising(error)))
    _, tried = assert_whole(database, run)
    assert conclusion.interrupted
    assert len(left_out(tried)) == 1


def test_a_process_that_is_told_to_end_leaves_a_finished_run(database, machine):
    run = claimed(database, workload=runs.LIVE)
    with pytest.raises(SystemExit):
        carried_out(database, run, machine, at(0, raising(SystemExit(143))))
    _, tried = assert_whole(database, run)
    assert left_out(tried) == []


def test_an_error_that_nobody_foresaw_does_not_fail_the_run(database, machine, caplog):
    run = claimed(database)
    with caplog.at_level(logging.WARNING, "kitsune"):
        _, conclusion = carried_out(database, run, machine, at(0, raising(ZeroDivisionError("oops"))))
    assert_whole(database, run)
    assert not conclusion.interrupted
    assert "ZeroDivisionError" in caplog.text, "whoever mends it needs the traceback"


@pytest.mark.parametrize("how", [cancel, taken_over])
def test_who_lost_the_run_stops_and_the_plan_stays(database, machine, how):
    run = claimed(database)
    with pytest.raises(LeaseLostError, match=r"it is finished now|took it over"):
        carried_out(database, run, machine, at(0, lambda: how(database, run)))
    found, tried = stored(database, run)
    assert left_out(tried) == []
    assert written_plans(database) == 1
    with database.read() as connection:
        assert words(plans.get(connection, found.plan_id).knobs) == GRAPH


def test_one_that_is_cancelled_has_finished_and_tells_what_was_not_measured(database, machine):
    run = claimed(database)
    with pytest.raises(LeaseLostError, match="it is finished now"):
        carried_out(database, run, machine, at(1, lambda: cancel(database, run)))
    found, tried = assert_whole(database, run)
    assert len(left_out(tried)) == 1
    with database.read() as connection:
        plan = plans.get(connection, found.plan_id)
    told = ablation_of(plan.knobs, tried, found.inapplicable)
    assert (found.speedup, found.error) == (plan.evidence.speedup, None)
    assert set(told.unmeasured.values()) == {UNREACHED}
    assert len(told.contributions) + len(told.unmeasured) == len(plan.knobs)


# Taken over -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [0, 1])
def test_another_worker_goes_on_without_a_second_confirmation(database, machine, number):
    run = claimed(database)
    with pytest.raises(PowerCutError):
        carried_out(database, run, machine, at(number, raising(PowerCutError())))
    before, tried = stored(database, run)
    assert (before.status, len(left_out(tried)), before.plan_id is None) == (RunStatus.RUNNING, number, False)

    heir = a_machine()
    _, conclusion = carried_out(database, taken_over(database, run), heir)
    found, tried = assert_whole(database, run)
    assert (found.plan_id, found.attempt) == (before.plan_id, 2)
    assert left_out(tried)[number].failure == GIVEN_UP
    assert len(heir.jobs) == len(left_out(tried)) - number - 1, "nothing else was measured"
    assert len(ablation_of(conclusion.plan.knobs, tried, SMALL).contributions) == 4


def test_a_run_that_kills_every_worker_ends_with_its_plan(database):
    """Each attempt gives up what was under way, so none is in vain, and in the end there is nothing left."""
    run = claimed(database, workload="zoo:mlp")
    now = utcnow()
    attempts = 0
    while stored(database, run)[0].status is RunStatus.RUNNING:
        attempts += 1
        assert attempts < 20, "it never ends"

        def die(event: Event) -> None:
            if isinstance(event, Ablating):
                raise PowerCutError

        try:
            carried_out(database, run, a_machine(), die)
        except PowerCutError:
            now += timedelta(hours=1)
            with database.begin() as connection:
                run = runs.claim(connection, "heir", device="cpu", now=now)
            assert run is not None, "it was given up"
    found, tried = assert_whole(database, run)
    assert found.error is None
    assert attempts > DEATHS_OF_A_TRIAL
    assert [trial.failure for trial in left_out(tried)] == [GIVEN_UP] * 6


def test_a_worker_that_dies_before_the_plan_is_stored_confirms_again(database, machine):
    run = claimed(database)
    with pytest.raises(PowerCutError):
        carried_out(database, run, machine, on_confirmed(PROCESSES, raising(PowerCutError())))
    assert written_plans(database) == 0
    carried_out(database, taken_over(database, run), a_machine())
    found, tried = stored(database, run)
    assert (found.status, written_plans(database), len(left_out(tried))) == (RunStatus.FINISHED, 1, 2)
    assert confirmed(tried) == 2 * PROCESSES
    assert found.deaths == 0
