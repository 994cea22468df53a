import math

import pytest

from kitsune.plan import Plan
from tests.unit.tuner.machine import (
    CLOSE,
    GRAPH,
    GRAPH_WINS,
    SMALL,
    Machine,
    a_run,
    drained,
    failure,
    interrupting,
    nothing_special,
    sources,
    trials_of,
)
from tuner.measuring.gpu_health import GIVEN_UP
from tuner.measuring.protocol import Job
from tuner.planning.ablation import UNREACHED, ablation_of
from tuner.records import Failure, FailureKind, Run, Source, Trial
from tuner.statistics.plan_evidence import CANDIDATE, EAGER, words
from tuner.tuning.events import Ablating, Event, Tried
from tuner.tuning.run import ABLATION_ROUNDS, Tuning

TIMES = {
    **GRAPH_WINS,
    "compile=default, update=fused, capture=step": 7.0,
    "precision=bf16, update=fused, capture=step": 6.0,
    "precision=bf16, compile=default, capture=step": 5.5,
}


def a_machine(**changes: object) -> Machine:
    return Machine(**{"step_ms": TIMES, "inapplicable": SMALL, "ablates": True, **changes})


def is_ablation(job: Job) -> bool:
    return any(arm.name.startswith("without ") for arm in job.arms)


def ablated(tuning: Tuning) -> tuple[list[Event], Plan]:
    """The events after the plan, and the plan."""
    _, conclusion = drained(tuning)
    return list(tuning.ablation(conclusion.plan)), conclusion.plan


def stored(machine: Machine, run: Run) -> tuple[list[Trial], Plan]:
    """The trials up to the plan."""
    tuning = machine.tuning(run)
    events, conclusion = drained(tuning)
    return trials_of(events), conclusion.plan


def told(trials: list[Trial], plan: Plan) -> dict[str, float]:
    found = ablation_of(plan.knobs, trials, SMALL)
    assert found is not None
    return {part.knob: part.saved_ms.median for part in found.contributions}


def test_each_choice_of_the_plan_is_left_out_in_fresh_processes_beside_the_plan():
    machine = a_machine()
    tuning = machine.tuning(a_run(budget_trials=8))
    events, plan = ablated(tuning)
    assert words(plan.knobs) == GRAPH
    assert [type(event) for event in events] == [Ablating, Tried] * 2
    assert [event.left_out for event in events[::2]] == [("precision", "compile"), ("update", "capture")]
    tried = trials_of(events)
    assert [(trial.source, trial.knobs) for trial in tried] == [(Source.ABLATION, plan.knobs)] * 2
    assert [trial.number for trial in tried] == [len(tuning.trials) - 2, len(tuning.trials) - 1]
    for job in machine.jobs[-2:]:
        assert (job.rounds, job.numerics, job.best_speedup) == (ABLATION_ROUNDS, False, None)
        assert (job.arms[0].name, job.arms[-1].name) == (EAGER, CANDIDATE)
    assert tried[0].comparison.speedup.median == pytest.approx(2, rel=0.01)
    expected = {"precision": 2.0, "compile": 1.0, "update": 0.5, "capture": 3.0}
    assert told(tuning.trials, plan) == pytest.approx(expected, abs=0.02)
    found = ablation_of(plan.knobs, tuning.trials, SMALL)
    assert found.interaction_ms.median == pytest.approx(5 - 6.5, abs=0.02)


def test_the_search_and_the_plan_are_as_they_would_be_without_it():
    run = a_run(budget_trials=8)
    trials, plan = stored(a_machine(), run)
    _, same = ablated(a_machine().tuning(run))
    assert same == plan
    quiet = a_machine(ablates=False)
    assert (ablated(quiet.tuning(run)), len(quiet.jobs)) == (([], plan), len(trials))


@pytest.mark.parametrize(
    "machine", [a_machine(step_ms={}), a_machine(step_ms={"precision=bf16": 5.0, "precision=fp16": 9.0})]
)
def test_nothing_is_measured_of_a_plan_of_one_choice_or_none(machine):
    tuning = machine.tuning(a_run(budget_trials=30))
    events, plan = ablated(tuning)
    assert events == []
    assert len(plan.knobs) == ("precision=bf16" in machine.step_ms)
    assert (ablation_of(plan.knobs, tuning.trials) is None) is not bool(plan.knobs)


# Time -----------------------------------------------------------------------------------------------------------------


def spent_s(run: Run) -> float:
    machine = a_machine(child_s=10)
    drained(machine.tuning(run))
    return machine.now_s


def test_it_is_measured_in_the_time_that_is_left():
    needed_s = spent_s(a_run(budget_trials=8))
    for spare_s, processes in ((40, 1), (76, 2)):
        machine = a_machine(child_s=10)
        tuning = machine.tuning(a_run(budget_trials=8, budget_s=needed_s + spare_s))
        events, plan = ablated(tuning)
        assert len(trials_of(events)) == processes, spare_s
        assert machine.now_s <= needed_s + spare_s
        if processes == 1:
            assert machine.limits[-1].total_s == spare_s
            found = ablation_of(plan.knobs, tuning.trials, SMALL)
            assert found.unmeasured == dict.fromkeys(("update", "capture"), UNREACHED)


def test_without_a_budget_of_time_it_is_always_measured():
    machine = a_machine(child_s=1000)
    events, _ = ablated(machine.tuning(a_run(budget_trials=8)))
    assert len(trials_of(events)) == 2
    assert machine.limits[-1].total_s is None


# Interrupts and failures ----------------------------------------------------------------------------------------------


def test_an_interrupt_ends_it_and_the_plan_stays():
    trials, plan = stored(a_machine(), a_run(budget_trials=8))
    machine = a_machine(answer=interrupting(len(trials) + 1))
    tuning = machine.tuning(a_run(budget_trials=8))
    events, same = ablated(tuning)
    assert same == plan
    assert tuning.interrupted
    assert [type(event) for event in events] == [Ablating, Tried, Ablating]
    assert sorted(told(tuning.trials, plan)) == ["compile", "precision"]


def test_whoever_interrupted_the_search_does_not_wait_for_it():
    machine = a_machine(answer=interrupting(6))
    tuning = machine.tuning(a_run(budget_trials=25))
    events, plan = ablated(tuning)
    assert events == []
    assert plan.knobs


def test_two_that_do_not_fit_into_memory_together_are_measured_alone():
    def answer(_: int, job: Job) -> Failure | None:
        return failure("out of memory", FailureKind.OUT_OF_MEMORY) if len(job.arms) > 3 else None

    machine = a_machine(answer=answer)
    tuning = machine.tuning(a_run(budget_trials=8))
    events, plan = ablated(tuning)
    left_out = [event.left_out for event in events if isinstance(event, Ablating)]
    both, others = ("precision", "compile"), ("update", "capture")
    assert left_out == [both, both[:1], both[1:], others, others[:1], others[1:]]
    assert len(told(tuning.trials, plan)) == 4


def test_where_all_of_it_fails_nothing_is_told_and_the_plan_stays():
    machine = a_machine(answer=lambda _, job: failure("a wall") if is_ablation(job) else None)
    tuning = machine.tuning(a_run(budget_trials=8))
    _, plan = ablated(tuning)
    assert words(plan.knobs) == GRAPH
    assert ablation_of(plan.knobs, tuning.trials, SMALL) is None


# Going on -------------------------------------------------------------------------------------------------------------


def test_a_run_that_is_taken_over_gives_up_what_was_under_way_and_goes_on():
    run = a_run(budget_trials=8)
    trials, plan = stored(a_machine(), run)
    heir = a_machine().tuning(run.evolve(inapplicable=SMALL), trials)
    events = list(heir.ablation(plan, is_taken_over=True))
    given_up, *others = trials_of(events)
    assert given_up.failure == GIVEN_UP
    assert given_up.number == trials[-1].number + 1
    assert [type(event) for event in events] == [Tried, *[Ablating, Tried] * 3]
    assert [len(trial.measurement.arms) for trial in others] == [3, 3, 4], "two that took a worker down go alone"
    assert len(told(heir.trials, plan)) == 4


def test_what_is_stored_is_not_measured_again():
    run = a_run(budget_trials=8)
    tuning = a_machine().tuning(run)
    _, plan = ablated(tuning)
    machine = a_machine()
    assert list(machine.tuning(run.evolve(inapplicable=SMALL), tuning.trials).ablation(plan, is_taken_over=True)) == []
    assert machine.jobs == []


def test_workers_that_die_one_after_another_come_to_an_end():
    """Each stores a trial before it begins anything, so that it counts as one that came forward."""
    run = a_run(budget_trials=8)
    trials, plan = stored(a_machine(), run)
    run = run.evolve(inapplicable=SMALL)
    for _ in range(20):
        events = a_machine().tuning(run, trials).ablation(plan, is_taken_over=True)
        first = next(events, None)
        if first is None:
            break
        assert isinstance(first, Tried)
        trials = [*trials, first.trial]
        events.close()  # and the process with it
    assert [trial.failure for trial in trials if trial.source is Source.ABLATION] == [GIVEN_UP] * 6
    assert math.isclose(sum(trial.took_s for trial in trials[-6:]), 0)


@pytest.mark.parametrize("answer", [nothing_special, lambda _, job: failure() if is_ablation(job) else None])
def test_what_is_searched_after_it_has_no_second_playoff(answer):
    """A run may be given a larger budget: what was measured of the old plan is no trial of the search."""
    machine = a_machine(step_ms=CLOSE, drift=0.2, answer=answer)
    run = a_run(budget_trials=24)
    tuning = machine.tuning(run)
    ablated(tuning)
    assert Source.PLAYOFF in sources(tuning.trials)
    assert Source.ABLATION in sources(tuning.trials)
    events, _ = drained(a_machine(step_ms=CLOSE, drift=0.2).tuning(run, tuning.trials))
    assert set(sources(trials_of(events))) == {Source.CONFIRM}
