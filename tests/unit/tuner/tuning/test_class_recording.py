"""When a run records where the time of its step goes, and what it says where it does not."""

from dataclasses import replace

import pytest

from kitsune.class_tables import ClassTable, ClassTables
from kitsune.plan import Plan
from kitsune.timeline import ClassTime
from tests.store.samples import a_timeline
from tests.unit.tuner.machine import GRAPH, GRAPH_WINS, SMALL, Machine, a_run, classes_of, drained, failure
from tuner.planning.pace import recording_s
from tuner.records import FailureKind, Run
from tuner.statistics.plan_evidence import CANDIDATE, EAGER, words
from tuner.tuning.class_recording import ENDED, NO_TIME, UNASKED, VANISHED, without
from tuner.tuning.confirmation import Conclusion
from tuner.tuning.events import Event, Explaining
from tuner.tuning.run import Tuning

RUN = a_run(budget_trials=8)


def a_machine(**changes: object) -> Machine:
    return Machine(**{"step_ms": GRAPH_WINS, "inapplicable": SMALL, "ablates": True, **changes})


def looked_at(tuning: Tuning, conclusion: Conclusion, **options: bool) -> tuple[list[Event], ClassTables]:
    events, steps = [], tuning.class_tables(conclusion, **options)
    while True:
        try:
            events.append(next(steps))
        except StopIteration as end:
            return events, end.value


def recorded(machine: Machine, run: Run = RUN) -> tuple[Plan, list[Event], ClassTables]:
    tuning = machine.tuning(run)
    _, conclusion = drained(tuning)
    return conclusion.plan, *looked_at(tuning, conclusion)


def test_one_process_records_the_step_under_the_plan_and_one_as_given():
    machine = a_machine()
    plan, events, found = recorded(machine)
    assert words(plan.knobs) == GRAPH
    assert found == ClassTables(given=classes_of({}), plan=classes_of(plan.knobs))
    assert events == [Explaining(plan.knobs), Explaining({})]
    assert [[(arm.name, arm.knobs) for arm in job.arms] for job in machine.explained] == [
        [(CANDIDATE, plan.knobs)],
        [(EAGER, {})],
    ]
    assert all(job.folder is None for job in machine.explained), "that of the search is gone"


def test_nothing_that_was_measured_changes():
    plan, _, _ = recorded(a_machine())
    _, without_it = drained(a_machine(ablates=False).tuning(RUN))
    assert plan == without_it.plan


def test_of_a_plan_without_choices_one_process_says_all():
    machine = a_machine(step_ms={})
    plan, events, found = recorded(machine)
    assert plan.knobs == {}
    assert found == ClassTables(given=classes_of({}), plan=classes_of({}))
    assert len(events) == len(machine.explained) == 1


def test_what_the_confirmation_recorded_is_not_recorded_again():
    known = (ClassTime("gaps", 3, 6.0, 0.0),)
    machine = a_machine()
    tuning = machine.tuning(RUN)
    _, conclusion = drained(tuning)
    events, found = looked_at(tuning, replace(conclusion, timeline=a_timeline(classes=known)))
    assert found == ClassTables(given=classes_of({}), plan=ClassTable(classes=known))
    assert events == [Explaining({})]


# Time -----------------------------------------------------------------------------------------------------------------


def spent_s() -> float:
    """What the search and the confirmation take."""
    machine = a_machine()
    drained(machine.tuning(RUN))
    return machine.now_s


def within(left_s: float, explain_s: float) -> tuple[Machine, ClassTables]:
    """What is recorded with so much time left; each recording takes `explain_s`."""
    machine = a_machine(explain_s=explain_s)
    tuning = machine.tuning(RUN)
    _, conclusion = drained(tuning)
    tuning._budget_s = machine.now_s + left_s
    return machine, looked_at(tuning, conclusion)[1]


def test_the_time_that_is_left_decides():
    tuning = a_machine().tuning(RUN)
    _, conclusion = drained(tuning)
    plan_s, given_s = (recording_s(knobs, tuning.trials) for knobs in (conclusion.plan.knobs, {}))
    assert 0 < plan_s <= 10 >= given_s > 0, "not more than a trial of this machine takes"
    enough, found = within(plan_s + given_s + 1.5, 1.0)
    assert found.plan.classes and found.given.classes
    assert enough.now_s == spent_s() + 2
    nothing, found = within(min(plan_s, given_s), 1.0)
    assert found == without(NO_TIME)
    assert nothing.explained == []
    one, found = within(plan_s + 0.5, plan_s)
    assert found.plan.classes and found.given == ClassTable(missing=NO_TIME)
    assert len(one.explained) == 1


def test_a_recording_that_takes_longer_than_is_left_ends_with_the_budget():
    machine, found = within(30.0, 31.0)
    assert found == without(NO_TIME)
    assert len(machine.explained) == 1
    assert machine.now_s == spent_s() + 30


def test_no_time_is_left_after_the_end():
    assert within(-1.0, 1.0)[1] == without(NO_TIME)


# Failures -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (FailureKind.OUT_OF_MEMORY, "out of memory, since a recorded step frees memory only at its end: 9 GiB"),
        (FailureKind.RAISED, "the launches of this step cannot be followed: it reads the host."),
        (FailureKind.TIMEOUT, "build took longer than its limit of 300 s; the process was killed"),
        (FailureKind.CRASHED, "the measuring process was killed by SIGKILL"),
    ],
)
def test_why_there_is_no_table_is_told(kind, reason):
    machine = a_machine(unexplained=failure(reason, kind))
    plan, _, found = recorded(machine)
    assert found == without(reason.removesuffix("."))
    assert plan.knobs, "which stays"


def test_where_nothing_is_to_be_measured_after_the_plan_nothing_is_recorded():
    machine = a_machine(ablates=False)
    _, events, found = recorded(machine)
    assert (events, found, machine.explained) == ([], without(UNASKED), [])


def test_whoever_ended_the_search_does_not_wait_for_it():
    machine = a_machine()
    tuning = machine.tuning(RUN)
    _, conclusion = drained(tuning)
    tuning.interrupted = True
    assert looked_at(tuning, conclusion) == ([], without(ENDED))


def test_what_may_have_taken_a_worker_down_is_not_tried_again():
    machine = a_machine()
    tuning = machine.tuning(RUN)
    _, conclusion = drained(tuning)
    assert looked_at(tuning, conclusion, is_taken_over=True) == ([], without(VANISHED))
    assert machine.explained == []
