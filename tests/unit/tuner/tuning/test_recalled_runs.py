"""A run whose step was searched before, with an equal torch, driver and GPU."""

from dataclasses import replace
from typing import Any

import pytest

from tests.unit.tuner.machine import (
    GRAPH,
    GRAPH_WINS,
    PROOF,
    SMALL,
    Machine,
    a_run,
    drained,
    failing,
    failure,
    is_confirmation,
    run_out,
    sources,
    trials_of,
)
from tuner.planning.prior_runs import AGAIN, Knowledge, Proven
from tuner.planning.standings import searched
from tuner.records import FailureKind, Source, Verdict
from tuner.search.outcomes import best_stock
from tuner.statistics.plan_evidence import prior_of, words
from tuner.statistics.process_statistics import PROCESSES
from tuner.tuning.events import Recalled


@pytest.fixture(scope="module")
def proven() -> Proven:
    """What a first run came to."""
    trials, conclusion = run_out(Machine(step_ms=GRAPH_WINS, inapplicable=SMALL), a_run(id="before", budget_trials=8))
    (first,) = [trial for trial in searched(trials) if words(trial.knobs) == GRAPH]
    evidence = conclusion.plan.evidence
    return Proven("before", first, best_stock(trials), prior_of(evidence), evidence.proof)


def again(machine: Machine, proven: Proven, **given: Any) -> Any:
    run = a_run(budget_trials=8)
    return drained(machine.make(run=run, spec=run.workload, knows=lambda *_: Knowledge(proven=proven), **given))


def test_what_was_proven_is_measured_again_and_nothing_is_searched(proven):
    machine = Machine(step_ms=GRAPH_WINS, inapplicable=SMALL)
    events, conclusion = again(machine, proven)
    assert [event.run_id for event in events if isinstance(event, Recalled)] == ["before"]
    assert sources(trials_of(events)) == [Source.CONFIRM] * AGAIN
    assert (words(conclusion.plan.knobs), conclusion.verdict) == (GRAPH, Verdict.FASTER)
    evidence = conclusion.plan.evidence
    assert (evidence.run_id, evidence.processes, evidence.proof) == ("run", AGAIN, PROOF)
    assert evidence.numerics.loss_error == proven.first.measurement.numerics.loss_error
    assert machine.proven == [], "its numbers were looked at before"


def test_processes_that_lie_further_apart_than_was_known_are_as_many_as_where_nothing_is_known(proven):
    machine = Machine(step_ms=GRAPH_WINS, inapplicable=SMALL, noise=0.03)
    assert proven.prior is not None
    tight = replace(proven, prior=replace(proven.prior, deviation=1e-4))
    events, conclusion = again(machine, tight)
    assert sources(trials_of(events)) == [Source.CONFIRM] * PROCESSES
    assert (words(conclusion.plan.knobs), conclusion.verdict) == (GRAPH, Verdict.FASTER)
    assert conclusion.plan.evidence.process_degrees == PROCESSES - 1, "and what was known is left out"


def test_a_plan_that_loses_now_is_not_measured_further_and_what_was_known_is_not_used_again(proven):
    slower = {**GRAPH_WINS, GRAPH: 1.3 * max(GRAPH_WINS.values())}
    machine = Machine(step_ms=slower, inapplicable=SMALL, noise=0.03)
    events, _ = again(machine, replace(proven, prior=replace(proven.prior, deviation=1e-4)))
    found = sources(trials_of(events))
    assert found[: AGAIN + 1] == [*[Source.CONFIRM] * AGAIN, Source.BASELINE]


def test_where_time_is_short_a_search_comes_before_more_processes(proven):
    machine = Machine(step_ms=GRAPH_WINS, inapplicable=SMALL, noise=0.03, child_s=20.0)
    tight = replace(proven, prior=replace(proven.prior, deviation=1e-4))
    run = a_run(budget_s=60.0)
    knows = Knowledge(proven=tight)
    events, _ = drained(machine.make(run=run, spec=run.workload, knows=lambda *_: knows))
    found = sources(trials_of(events))
    assert found[:AGAIN] == [Source.CONFIRM] * AGAIN
    assert found[AGAIN : AGAIN + 1] != [Source.CONFIRM], "there was time for one more of 16 s, but not for a search too"


def test_that_nothing_gained_is_measured_again_too():
    machine = Machine(inapplicable=SMALL)  # everything takes equally long
    trials, conclusion = run_out(machine, a_run(id="before", budget_trials=4))
    assert conclusion.plan.knobs == {}
    first = best_stock(trials)
    events, conclusion = again(machine, Proven("before", first, first))
    assert sources(trials_of(events)) == [Source.CONFIRM]
    assert (conclusion.plan.knobs, conclusion.verdict) == ({}, Verdict.SAME)


def test_what_its_choices_give_is_not_measured_again(proven):
    machine = Machine(step_ms=GRAPH_WINS, inapplicable=SMALL, ablates=True)
    run = a_run(budget_trials=8)
    tuning = machine.make(run=run, spec=run.workload, knows=lambda *_: Knowledge(proven=proven))
    _, conclusion = drained(tuning)
    assert list(tuning.ablation(conclusion.plan)) == []


def test_what_was_not_looked_at_for_long_is_now(proven):
    machine = Machine(step_ms=GRAPH_WINS, inapplicable=SMALL)
    _, conclusion = again(machine, Proven("before", proven.first, proven.stock, proven.prior))
    assert len(machine.proven) == 1
    assert conclusion.plan.evidence.proof == PROOF


def test_what_does_not_hold_any_more_is_searched_for(proven):
    machine = Machine(inapplicable=SMALL)  # everything takes equally long now
    events, conclusion = again(machine, proven)
    found = sources(trials_of(events))
    assert found[:AGAIN] == [Source.CONFIRM] * AGAIN
    assert Source.BASELINE in found[AGAIN:]
    assert conclusion.verdict is Verdict.SAME


@pytest.mark.parametrize("is_wrong", [True, False])
def test_what_fails_now_is_not_published(proven, is_wrong):
    wrong = failure("gradient of a.weight", FailureKind.WRONG) if is_wrong else None
    answer = {} if is_wrong else {"answer": failing(is_confirmation)}
    machine = Machine(step_ms=GRAPH_WINS, inapplicable=SMALL, wrong=wrong, **answer)
    unseen = Proven("before", proven.first, proven.stock, proven.prior)
    if is_wrong:
        events, conclusion = again(machine, unseen)
        assert words(conclusion.plan.knobs) != GRAPH
        assert trials_of(events)[0].failure == wrong
    else:
        with pytest.raises(Exception, match="it broke"):
            again(machine, unseen)


def test_a_run_that_goes_on_elsewhere_searches(proven):
    machine = Machine(step_ms=GRAPH_WINS, inapplicable=SMALL)
    run = a_run(budget_trials=3, deaths=1)
    events, _ = drained(machine.make(run=run, spec=run.workload, knows=lambda *_: Knowledge(proven=proven)))
    assert sources(trials_of(events))[0] is Source.BASELINE
