import pytest

from kitsune.errors import NoTrialError
from kitsune.plan import Plan
from tests.unit.tuner.machine import (
    COMPILED,
    GRAPH,
    GRAPH_WINS,
    SMALL,
    Machine,
    a_run,
    drained,
    failing,
    failure,
    interrupting,
    is_confirmation,
    only,
    run_out,
    sources,
    trials_of,
    until_it_raises,
)
from tuner.events import Confirming, Tried
from tuner.records import Source, Verdict
from tuner.stats import samples_digest
from tuner.tune import CONFIRM_ROUNDS, SEARCH_ROUNDS
from tuner.verdicts import CANDIDATE, EAGER, STOCK, words


def test_the_winner_is_measured_afresh_and_only_those_samples_are_the_evidence():
    machine = Machine(step_ms=GRAPH_WINS, inapplicable=SMALL)
    trials, conclusion = run_out(machine, a_run(budget_trials=8))
    plan, confirmed = conclusion.plan, trials[-1].measurement
    assert words(plan.knobs) == GRAPH
    assert conclusion.verdict is Verdict.FASTER
    evidence = plan.evidence
    assert evidence.samples_sha256 == samples_digest(confirmed)
    assert evidence.samples_sha256 not in {samples_digest(trial.measurement) for trial in trials[:-1]}
    assert [(arm.name, words(arm.knobs)) for arm in confirmed.arms] == [
        (EAGER, "eager"),
        (STOCK, COMPILED),
        (CANDIDATE, GRAPH),
    ]
    child = len(machine.jobs) - 1
    assert machine.jobs[child].rounds == evidence.blocks == CONFIRM_ROUNDS
    assert (evidence.baseline_peak_bytes, evidence.peak_bytes) == (100 * child + 1, 100 * child + 2)
    assert evidence.first_step_s == child + 0.2
    assert evidence.numerics.loss_error == pytest.approx((child + 1) * 1e-6)
    assert (evidence.run_id, evidence.baseline, plan.fingerprint) == ("run", COMPILED, "f")
    assert evidence.speedup.median == pytest.approx(8 / 5, rel=0.01)
    assert evidence.speedup_over_eager.median == pytest.approx(2, rel=0.01)
    assert trials[-1].comparison.speedup == evidence.speedup


def test_only_a_confirmation_asks_for_the_launches_of_its_last_arm():
    machine = Machine(step_ms=GRAPH_WINS, inapplicable=SMALL)
    run_out(machine, a_run(budget_trials=8))
    assert [job.timeline for job in machine.jobs] == [is_confirmation(job) for job in machine.jobs]
    assert machine.jobs[-1].timeline


def test_a_plan_is_the_same_for_the_same_measurements_and_survives_json():
    first, again = (
        run_out(Machine(step_ms=GRAPH_WINS, inapplicable=SMALL), a_run(budget_trials=8))[1].plan for _ in range(2)
    )
    assert first.plan_id == again.plan_id
    assert Plan.from_json(first.to_json()) == first


def test_a_best_stock_configuration_is_its_own_baseline():
    machine = Machine(step_ms={COMPILED: 5.0}, inapplicable=SMALL)
    trials, conclusion = run_out(machine, a_run(budget_trials=6))
    assert [arm.name for arm in trials[-1].measurement.arms] == [EAGER, STOCK]
    evidence = conclusion.plan.evidence
    assert words(conclusion.plan.knobs) == evidence.baseline == COMPILED
    assert conclusion.verdict is Verdict.SAME
    assert (evidence.verdict, evidence.speedup.low, evidence.speedup.high) == ("same", 1.0, 1.0)
    assert evidence.speedup_over_eager.median == pytest.approx(2, rel=0.01)
    assert evidence.numerics == trials[-1].measurement.numerics


def test_the_noise_of_the_step_against_itself_is_the_margin_of_every_verdict():
    quiet = Machine(step_ms={"precision=bf16": 9.5}, inapplicable=only("precision=bf16"))
    assert run_out(quiet, a_run(budget_trials=2))[1].plan.knobs == {"precision": "bf16"}
    noisy = Machine(step_ms={"precision=bf16": 9.5}, inapplicable=only("precision=bf16"))
    noisy.answer = lambda number, _: setattr(noisy, "noise", 0.0005 if number else 0.2)
    trials, conclusion = run_out(noisy, a_run(budget_trials=2))
    assert trials[0].comparison.speedup.high > 1.06
    assert trials[1].comparison.speedup.low > 1.04
    assert [trial.comparison.verdict for trial in trials[1:]] == [Verdict.SAME] * 2
    assert (conclusion.plan.knobs, conclusion.verdict) == ({}, Verdict.SAME)


def test_where_confirming_fails_the_next_best_has_its_turn():
    machine = Machine(step_ms=GRAPH_WINS, inapplicable=SMALL)
    machine.answer = failing(lambda job: is_confirmation(job) and words(job.arms[-1].knobs) == GRAPH, "numbers differ")
    events, conclusion = drained(machine.tuning(a_run(budget_trials=8)))
    trials = trials_of(events)
    assert sources(trials)[-2:] == [Source.CONFIRM, Source.CONFIRM]
    assert trials[-2].failure.reason == "numbers differ"
    assert [type(event) for event in events[-4:]] == [Confirming, Tried] * 2
    assert words(conclusion.plan.knobs) == COMPILED, "the second best of these"
    assert conclusion.plan.evidence.samples_sha256 == samples_digest(trials[-1].measurement)


def test_after_three_failed_confirmations_there_is_no_plan():
    machine = Machine(step_ms=GRAPH_WINS, inapplicable=SMALL, answer=failing(is_confirmation, "gone"))
    match = "the best 3 failed when they were measured afresh; the first: gone"
    trials = until_it_raises(machine, a_run(budget_trials=8), NoTrialError, match)
    tried = [words(trial.knobs) for trial in trials if trial.source is Source.CONFIRM]
    assert len(tried) == len(set(tried)) == 3


def test_the_last_try_is_the_stock_configuration_which_needs_one_arm_less():
    better = {"precision=fp16, capture=step": 5.5, "precision=bf16, capture=step": 5.6}
    machine = Machine(step_ms={**GRAPH_WINS, **better}, inapplicable=SMALL)
    machine.answer = failing(lambda job: len(job.arms) > 2, "out of memory")
    trials, conclusion = run_out(machine, a_run(budget_trials=30))
    assert [trial.failure is None for trial in trials[-3:]] == [False, False, True]
    assert words(conclusion.plan.knobs) == COMPILED
    assert conclusion.verdict is Verdict.SAME


def test_a_stock_configuration_that_could_not_be_confirmed_is_no_rival_any_more():
    machine = Machine(step_ms={COMPILED: 5.0, GRAPH: 6.0}, inapplicable=SMALL)
    machine.answer = failing(lambda job: is_confirmation(job) and job.arms[-1].name == STOCK)
    _, conclusion = run_out(machine, a_run(budget_trials=8))
    assert words(conclusion.plan.knobs) == GRAPH
    assert COMPILED not in [words(arm.knobs) for arm in machine.jobs[-1].arms]


def test_a_gain_that_is_left_open_is_looked_at_again_with_twice_the_rounds():
    machine = Machine(step_ms={"precision=bf16": 9.8}, inapplicable=only("precision=bf16"))

    machine.answer = lambda _, job: setattr(machine, "noise", 0.15 if job.rounds == CONFIRM_ROUNDS else 0.0005)
    trials, conclusion = run_out(machine, a_run(budget_trials=2))
    first, second = trials[-2:]
    assert [first.source, second.source] == [Source.CONFIRM] * 2
    assert first.comparison.verdict is Verdict.AMBIGUOUS
    assert [job.rounds for job in machine.jobs[-2:]] == [CONFIRM_ROUNDS, 2 * CONFIRM_ROUNDS]
    assert conclusion.plan.knobs == {"precision": "bf16"}
    assert conclusion.plan.evidence.samples_sha256 == samples_digest(second.measurement)
    assert conclusion.plan.evidence.blocks == 2 * CONFIRM_ROUNDS


def open_forever(**changes: object) -> Machine:
    """A machine on which every confirmation leaves a gain open."""
    machine = Machine(step_ms={"precision=bf16": 9.8}, inapplicable=only("precision=bf16"), **changes)
    machine.answer = lambda _, job: setattr(machine, "noise", 0.15 if is_confirmation(job) else 0.0005)
    return machine


def test_a_gain_that_stays_open_is_no_gain():
    trials, conclusion = run_out(open_forever(), a_run(budget_trials=2))
    assert sources(trials)[-3:] == [Source.STOCK, Source.CONFIRM, Source.CONFIRM], "twice is enough"
    assert (conclusion.plan.knobs, conclusion.verdict) == ({}, Verdict.SAME)


def test_a_second_look_that_fails_leaves_the_first():
    machine = open_forever()
    blur = machine.answer
    machine.answer = lambda number, job: failure() if job.rounds == 2 * CONFIRM_ROUNDS else blur(number, job)
    trials, conclusion = run_out(machine, a_run(budget_trials=2))
    assert conclusion.plan.evidence.samples_sha256 == samples_digest(trials[-2].measurement)


def test_there_is_no_second_look_without_the_time_for_it():
    machine = open_forever(child_s=20)
    run_out(machine, a_run(budget_s=5 + 40 + 40 + 80))  # the second look takes 80 s: exactly too little
    assert [job.rounds for job in machine.jobs] == [SEARCH_ROUNDS] * 2 + [CONFIRM_ROUNDS]
    machine = open_forever(child_s=20)
    run_out(machine, a_run(budget_s=5 + 40 + 40 + 81))
    assert machine.jobs[-1].rounds == 2 * CONFIRM_ROUNDS


def test_there_is_no_second_look_where_time_ended_the_first():
    """Steps of many seconds: asking for more rounds would not bring any."""
    machine = open_forever(most_rounds=CONFIRM_ROUNDS - 1)
    trials, _ = run_out(machine, a_run(budget_trials=2))
    assert sources(trials) == [Source.BASELINE, Source.STOCK, Source.CONFIRM]
    assert trials[-1].comparison.verdict is Verdict.AMBIGUOUS


def test_a_machine_on_which_nothing_applies_keeps_the_step_as_given():
    trials, conclusion = run_out(Machine(inapplicable=only()), a_run(budget_trials=25))
    assert [words(trial.knobs) for trial in trials] == ["eager", "eager"]
    evidence = conclusion.plan.evidence
    assert (conclusion.plan.knobs, conclusion.verdict, evidence.baseline) == ({}, Verdict.SAME, "eager")
    assert evidence.step_ms == evidence.baseline_step_ms == evidence.eager_step_ms
    assert evidence.speedup.median == evidence.speedup_over_eager.median == 1.0
    assert evidence.numerics.note == "the step as given"
    assert Plan.from_json(conclusion.plan.to_json()) == conclusion.plan


def test_after_an_interrupt_nobody_waits_for_a_second_look():
    machine = open_forever()
    blur = machine.answer
    machine.answer = lambda number, job: interrupting(2)(number, job) or blur(number, job)
    machine.inapplicable = only("precision=bf16", "update=fused")
    _, conclusion = run_out(machine, a_run(budget_trials=25))
    assert conclusion.interrupted
    assert [is_confirmation(job) for job in machine.jobs] == [False] * 3 + [True]
