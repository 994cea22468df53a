"""Processes that run out of memory beside others."""

import pytest

from tests.unit.tuner.machine import (
    GRAPH,
    GRAPH_WINS,
    SMALL,
    Machine,
    a_run,
    confirmations,
    drained,
    failure,
    is_confirmation,
    trials_of,
)
from tuner.planning.budget import SHORT
from tuner.planning.next_trial import next_trial
from tuner.planning.standings import searched
from tuner.records import FailureKind
from tuner.statistics.plan_evidence import words
from tuner.statistics.process_statistics import PROCESSES
from tuner.terminal.progress import opening
from tuner.tuning.events import Crowded


@pytest.fixture(autouse=True)
def two_at_a_time(monkeypatch):
    monkeypatch.setattr("tuner.tuning.run.at_once", lambda *_: 2)


def crowded(at, of=lambda job: True):
    """The `at`-th of these children finds no memory."""
    seen = []

    def answer(_number, job):
        seen.extend([job] * of(job))
        return failure("too large", FailureKind.OUT_OF_MEMORY) if of(job) and len(seen) == at else None

    return answer


def test_a_trial_is_tried_again_with_fewer_at_a_time_and_nothing_is_lost():
    machine = Machine(step_ms=GRAPH_WINS, inapplicable=SMALL, answer=crowded(2))
    events, conclusion = drained(machine.tuning(a_run(budget_trials=6)))
    (told,) = [event for event in events if isinstance(event, Crowded)]
    tried = searched(trials_of(events))
    assert len(tried) == 6
    assert [trial.knobs for trial in tried].count(told.knobs) == 1
    assert all(trial.failure is None for trial in tried)
    assert words(conclusion.plan.knobs) == GRAPH
    assert list(opening(told)) == [
        f"ran out of memory beside other processes, and is to be tried again with fewer: {words(told.knobs)}"
    ]


def test_processes_that_confirm_are_begun_as_they_have_room(monkeypatch):
    asked = []

    def alone(_room, job, beside):
        asked.append((job.kind, [each.kind for each in beside]))
        return job.kind == "prove"

    monkeypatch.setattr("tuner.planning.memory_fit.MemoryFit.fits", alone)
    _, conclusion = drained(Machine(step_ms=GRAPH_WINS, inapplicable=SMALL).tuning(a_run(budget_trials=6)))
    assert conclusion.plan.evidence.processes == PROCESSES
    assert conclusion.plan.evidence.proof is not None
    assert ("measure", ["prove"]) in asked
    assert ("measure", ["measure"]) in asked


def test_so_is_a_process_that_confirms():
    machine = Machine(step_ms=GRAPH_WINS, inapplicable=SMALL, answer=crowded(1, is_confirmation))
    events, conclusion = drained(machine.tuning(a_run(budget_trials=6)))
    (told,) = [event for event in events if isinstance(event, Crowded)]
    assert words(told.knobs) == GRAPH
    assert len(confirmations(trials_of(events))) == PROCESSES
    assert all(trial.failure is None for trial in trials_of(events))
    assert conclusion.plan.evidence.processes == PROCESSES


def test_the_launches_are_told_by_another_process_where_the_first_ran_out_of_memory(monkeypatch):
    monkeypatch.setattr("tuner.tuning.run.at_once", lambda *_: 3)
    machine = Machine(step_ms=GRAPH_WINS, inapplicable=SMALL, answer=crowded(1, is_confirmation))
    drained(machine.tuning(a_run(budget_trials=6)))
    asked = [job.timeline for job in machine.jobs if is_confirmation(job)]
    assert (len(asked), asked[0], asked[1:].count(True)) == (1 + PROCESSES, True, 1)


def test_what_is_at_work_and_for_how_long_is_told_to_what_proposes(monkeypatch):
    told = []

    def watched(*arguments, at_work, **more):
        told.append([round(since_s) for _, since_s in at_work])
        return next_trial(*arguments, at_work=at_work, **more)

    monkeypatch.setattr("tuner.tuning.run.at_once", lambda *_: 3)
    monkeypatch.setattr("tuner.tuning.run.next_trial", watched)
    machine = Machine(step_ms=GRAPH_WINS, inapplicable=SMALL)
    events, _ = drained(machine.tuning(a_run(budget_trials=6)))
    assert told[:4] == [[], [0], [0, 0], [10, 10]]
    assert len([trial for trial in trials_of(events) if trial.source.is_search]) == 6


@pytest.mark.parametrize("budget_s", [60, 50])
def test_a_short_run_makes_three_at_a_time(monkeypatch, budget_s):
    most = []

    def watched(*arguments, at_work, trials_within, **more):
        most.append(len(at_work) + 1)
        assert (trials_within < SHORT) == (budget_s == 50)
        return next_trial(*arguments, at_work=at_work, trials_within=trials_within, **more)

    monkeypatch.setattr("tuner.tuning.run.at_once", lambda *_: 4)
    monkeypatch.setattr("tuner.tuning.run.next_trial", watched)
    drained(Machine(step_ms=GRAPH_WINS, inapplicable=SMALL, child_s=1.0).tuning(a_run(budget_s=budget_s)))
    assert max(most) == (3 if budget_s == 50 else 4)
