import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kitsune.errors import NoTrialError
from kitsune.plan import Plan
from tests.unit.tuner.machine import (
    COMPILED,
    GRAPH,
    GRAPH_WINS,
    PROOF,
    SMALL,
    USUAL_MS,
    Machine,
    a_run,
    confirmations,
    drained,
    failing,
    failure,
    is_confirmation,
    only,
    run_out,
    sources,
    trials_of,
    until_it_raises,
)
from tuner.measuring.protocol import Job
from tuner.planning.ablation import ablation_of
from tuner.planning.pace import WITH_EAGER
from tuner.planning.prior_runs import AGAIN
from tuner.planning.standings import searched
from tuner.records import Failure, FailureKind, Source, Verdict
from tuner.statistics.block_statistics import samples_digest
from tuner.statistics.plan_evidence import CANDIDATE, EAGER, STOCK, words
from tuner.statistics.process_statistics import LEAST_PROCESSES, PROCESSES, ROUNDS
from tuner.tuning.confirmation import OUT_OF_TIME
from tuner.tuning.events import Confirming, Tried
from tuner.tuning.run import UNSEARCHED

TWO_CAPTURES = only("precision=bf16", "precision=fp16", "capture=step", "capture=segments")


def test_the_winner_is_measured_afresh_and_only_those_samples_are_the_evidence():
    machine = Machine(step_ms=GRAPH_WINS, inapplicable=SMALL)
    trials, conclusion = run_out(machine, a_run(budget_trials=8))
    plan, processes = conclusion.plan, [trial.measurement for trial in trials[-PROCESSES:]]
    assert words(plan.knobs) == GRAPH
    assert conclusion.verdict is Verdict.FASTER
    evidence = plan.evidence
    assert sources(trials)[8:] == [Source.CONFIRM] * PROCESSES
    assert evidence.samples_sha256 == samples_digest(processes)
    assert evidence.processes == PROCESSES
    assert [(arm.name, words(arm.knobs)) for arm in processes[0].arms] == [
        (EAGER, "eager"),
        (STOCK, COMPILED),
        (CANDIDATE, GRAPH),
    ]
    last = len(machine.jobs) - 1
    assert {job.rounds for job in machine.jobs[-PROCESSES:]} == {ROUNDS}
    assert evidence.blocks == PROCESSES * ROUNDS
    assert (evidence.baseline_peak_bytes, evidence.peak_bytes) == (100 * last + 1, 100 * last + 2)
    assert evidence.first_step_s == pytest.approx((last - PROCESSES // 2 + 0.2) / 1000)
    (first,) = [trial for trial in searched(trials) if words(trial.knobs) == GRAPH]
    assert evidence.numerics.loss_error == first.measurement.numerics.loss_error
    assert (evidence.run_id, evidence.baseline, plan.fingerprint) == ("run", COMPILED, "f")
    assert evidence.speedup.median == pytest.approx(8 / 5, rel=0.01)
    assert evidence.speedup_over_eager.median == pytest.approx(2, rel=0.01)
    assert trials[-1].comparison.speedup == evidence.speedup


def test_only_a_confirmation_asks_for_the_launches_of_its_last_arm():
    machine = Machine(step_ms=GRAPH_WINS, inapplicable=SMALL)
    run_out(machine, a_run(budget_trials=8))
    assert [job.timeline for job in machine.jobs] == [False] * 8 + [True] + [False] * (PROCESSES - 1)
    assert is_confirmation(machine.jobs[8])


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
    (first,) = [trial for trial in searched(trials) if words(trial.knobs) == COMPILED]
    assert evidence.numerics.loss_error == first.measurement.numerics.loss_error


def test_where_confirming_fails_the_next_best_has_its_turn():
    machine = Machine(step_ms=GRAPH_WINS, inapplicable=SMALL)
    machine.answer = failing(lambda job: is_confirmation(job) and words(job.arms[-1].knobs) == GRAPH, "numbers differ")
    events, conclusion = drained(machine.tuning(a_run(budget_trials=8)))
    trials = trials_of(events)
    assert sources(trials)[-1 - PROCESSES :] == [Source.CONFIRM] * (1 + PROCESSES)
    assert trials[-1 - PROCESSES].failure.reason == "numbers differ"
    told = [type(event) for event in events[-3 - PROCESSES :]]
    assert told == [Confirming, Tried, Confirming, *[Tried] * PROCESSES]
    assert words(conclusion.plan.knobs) == COMPILED, "the second best of these"
    processes = [trial.measurement for trial in trials[-PROCESSES:]]
    assert conclusion.plan.evidence.samples_sha256 == samples_digest(processes)


def test_after_three_failed_confirmations_there_is_no_plan():
    machine = Machine(step_ms=GRAPH_WINS, inapplicable=SMALL, answer=failing(is_confirmation, "gone"))
    match = "the best 3 failed when they were measured afresh; the first: gone"
    trials = until_it_raises(machine, a_run(budget_trials=8), NoTrialError, match)
    tried = [words(trial.knobs) for trial in trials if trial.source is Source.CONFIRM]
    assert len(tried) == len(set(tried)) == 3


def test_the_last_try_is_the_stock_configuration_which_needs_one_arm_less():
    better = {"precision=fp16, capture=step": 5.5, "precision=bf16, capture=step": 5.6}
    machine = Machine(step_ms={**GRAPH_WINS, **better}, inapplicable=SMALL)
    machine.answer = failing(lambda job: is_confirmation(job) and len(job.arms) > 2, "out of memory")
    trials, conclusion = run_out(machine, a_run(budget_trials=30))
    assert [trial.failure is None for trial in confirmations(trials)] == [False, False, *[True] * PROCESSES]
    assert words(conclusion.plan.knobs) == COMPILED
    assert conclusion.verdict is Verdict.SAME


def test_a_stock_configuration_that_could_not_be_confirmed_is_no_rival_any_more():
    machine = Machine(step_ms={COMPILED: 5.0, GRAPH: 6.0}, inapplicable=SMALL)
    machine.answer = failing(lambda job: is_confirmation(job) and job.arms[-1].name == STOCK)
    _, conclusion = run_out(machine, a_run(budget_trials=8))
    assert words(conclusion.plan.knobs) == GRAPH
    assert COMPILED not in [words(arm.knobs) for arm in machine.jobs[-1].arms]


def test_a_gain_that_stays_open_is_kept_as_ambiguous():
    """And not looked at again until it shows."""
    machine = Machine(step_ms={"precision=bf16": 9.8}, inapplicable=only("precision=bf16"))
    machine.answer = lambda _, job: setattr(machine, "drift", 0.06 * is_confirmation(job))
    trials, conclusion = run_out(machine, a_run(budget_trials=2))
    assert len(confirmations(trials)) == PROCESSES
    assert conclusion.verdict is Verdict.AMBIGUOUS
    assert "more may tell" in conclusion.plan.evidence.note


def test_the_winner_is_proven_at_length_and_the_proof_goes_with_its_plan():
    machine = Machine(step_ms=GRAPH_WINS, inapplicable=SMALL)
    _, conclusion = run_out(machine, a_run(budget_trials=8))
    (job,) = machine.proven
    assert (words(job.arms[-1].knobs), job.workload) == (GRAPH, "zoo:mlp")
    assert conclusion.plan.evidence.proof == PROOF
    assert Plan.from_json(conclusion.plan.to_json()) == conclusion.plan


def test_a_winner_whose_numbers_are_wrong_at_length_is_refused():
    machine = Machine(step_ms=GRAPH_WINS, inapplicable=SMALL, wrong=failure("gradient of a.weight", FailureKind.WRONG))
    trials, conclusion = run_out(machine, a_run(budget_trials=8))
    refused = [trial for trial in confirmations(trials) if trial.failure is not None]
    assert words(refused[0].knobs) == GRAPH
    assert [trial.failure.reason for trial in refused] == ["gradient of a.weight"] * 2
    assert conclusion.plan.knobs == {}, "which needs no proof"


def test_what_computes_the_same_as_a_plan_with_wrong_numbers_is_refused_too():
    graphs = {"precision=fp16, capture=step": 5.0, "precision=fp16, capture=segments": 5.5}
    wrong = failure("gradient of a.weight", FailureKind.WRONG)
    machine = Machine(step_ms={**graphs, "precision=bf16": 8.0}, inapplicable=TWO_CAPTURES, wrong=wrong)
    trials, conclusion = run_out(machine, a_run(budget_trials=12))
    assert {*graphs} <= {words(trial.knobs) for trial in trials if trial.source.is_search}
    refused = [words(trial.knobs) for trial in confirmations(trials) if trial.failure is not None]
    assert refused == ["precision=fp16, capture=step", "precision=bf16"]
    assert conclusion.plan.knobs == {}


def test_wrong_numbers_without_a_choice_that_changes_numbers_refuse_that_configuration_only():
    graphs = {"capture=step": 5.0, "capture=segments": 5.5}
    wrong = failure("gradient of a.weight", FailureKind.WRONG)
    machine = Machine(step_ms=graphs, inapplicable=only("capture=step", "capture=segments"), wrong=wrong)
    trials, _ = run_out(machine, a_run(budget_trials=12))
    refused = [words(trial.knobs) for trial in confirmations(trials) if trial.failure is not None]
    assert refused == ["capture=step", "capture=segments"]


def test_where_there_is_no_time_for_a_proof_the_plan_says_so():
    machine = Machine(step_ms=GRAPH_WINS, inapplicable=SMALL, wrong=failure("too slow", FailureKind.TIMEOUT))
    _, conclusion = run_out(machine, a_run(budget_trials=8))
    assert words(conclusion.plan.knobs) == GRAPH
    assert conclusion.plan.evidence.proof is None
    assert "not looked at for longer: too slow" in conclusion.plan.evidence.note


def test_the_step_as_given_needs_no_proof():
    machine = Machine(inapplicable=only())
    run_out(machine, a_run(budget_trials=2))
    assert machine.proven == []


def test_where_time_ends_a_confirmation_those_that_have_ended_decide():
    machine = Machine(step_ms=GRAPH_WINS, inapplicable=SMALL, child_s=20)

    def late(number: int, job: Job) -> None:
        machine.now_s += 60 * is_confirmation(job)

    machine.answer = late
    trials, conclusion = run_out(machine, a_run(budget_s=300))
    confirmed = [trial for trial in confirmations(trials) if trial.failure is None]
    assert 2 <= len(confirmed) == len(confirmations(trials)) < PROCESSES
    assert conclusion.plan.evidence.processes == len(confirmed)
    assert words(conclusion.plan.knobs) == GRAPH
    assert machine.now_s <= 300 + 80, "the last one of them was as late"


def endless(machine: Machine) -> Callable[[int, Job], None]:
    """Trials never end, but for those of the step as given and of GRAPH."""

    def answer(_: int, job: Job) -> None:
        if words(job.arms[-1].knobs) not in ("eager", GRAPH) and job.numerics:
            for _ in range(1000):
                machine.now_s += 1
                machine.check()

    return answer


def test_what_is_at_work_is_given_up_for_the_confirmation_of_what_was_found():
    machine = Machine(step_ms=GRAPH_WINS, inapplicable=SMALL, child_s=20)

    machine.answer = endless(machine)
    trials, conclusion = run_out(machine, a_run(budget_s=300))
    assert 300 - 40 < machine.now_s <= 1.1 * 300
    assert [words(trial.knobs) for trial in trials if trial.source.is_search] == ["eager", GRAPH]
    evidence = conclusion.plan.evidence
    assert words(conclusion.plan.knobs) == GRAPH
    assert LEAST_PROCESSES <= evidence.processes < PROCESSES
    assert (len(machine.proven), evidence.proof, evidence.note) == (1, PROOF, "")


def test_what_cannot_end_in_time_is_not_waited_for(monkeypatch):
    machine = Machine(step_ms=GRAPH_WINS, inapplicable=SMALL, child_s=20)
    monkeypatch.setattr("tuner.tuning.run.is_in_vain", lambda at_work, *_: any(seconds > 30 for _, seconds in at_work))

    machine.answer = endless(machine)
    trials, conclusion = run_out(machine, a_run(budget_s=300))
    assert [words(trial.knobs) for trial in trials if trial.source.is_search] == ["eager", GRAPH]
    assert (words(conclusion.plan.knobs), conclusion.plan.evidence.processes) == (GRAPH, PROCESSES)
    assert machine.now_s < 200


def test_where_processes_take_less_than_was_expected_there_are_more_of_them():
    machine = Machine(step_ms=GRAPH_WINS, inapplicable=SMALL, child_s=20)

    def endless(_: int, job: Job) -> None:
        if words(job.arms[-1].knobs) not in ("eager", GRAPH) and job.numerics:
            machine.child_s = 14  # of those that confirm
            for _ in range(1000):
                machine.now_s += 1
                machine.check()

    machine.answer = endless
    _, conclusion = run_out(machine, a_run(budget_s=300))
    assert AGAIN < conclusion.plan.evidence.processes < PROCESSES
    assert 300 - 14 < machine.now_s <= 300


STRONG = {COMPILED: 2.0, GRAPH: 1.5}


def test_the_step_as_given_is_timed_only_in_as_many_processes_as_its_own_interval_needs():
    trials, conclusion = run_out(Machine(step_ms=STRONG, inapplicable=SMALL), a_run(budget_trials=8))
    arms = [[arm.name for arm in trial.measurement.arms] for trial in confirmations(trials)]
    assert arms == [[EAGER, STOCK, CANDIDATE]] * WITH_EAGER + [[STOCK, CANDIDATE]] * (PROCESSES - WITH_EAGER)
    evidence = conclusion.plan.evidence
    assert (words(conclusion.plan.knobs), evidence.baseline, evidence.processes) == (GRAPH, COMPILED, PROCESSES)
    assert evidence.speedup.median == pytest.approx(2 / 1.5, rel=0.01)
    assert evidence.speedup_over_eager.median == pytest.approx(10 / 1.5, rel=0.01)
    assert evidence.samples_sha256 == samples_digest([trial.measurement for trial in confirmations(trials)])


def test_a_plan_of_one_choice_is_told_by_a_process_that_timed_the_step_as_given():
    halves = {"precision=bf16": 6.0, "precision=fp16": 5.0}
    trials, conclusion = run_out(Machine(step_ms=halves, inapplicable=only(*halves)), a_run(budget_trials=6))
    assert conclusion.plan.knobs == {"precision": "fp16"}
    assert all(arm.name != EAGER for arm in confirmations(trials)[-1].measurement.arms)
    assert ablation_of(conclusion.plan.knobs, trials).eager_ms == pytest.approx(USUAL_MS, rel=0.01)


def test_processes_without_the_step_as_given_alone_confirm_nothing():
    def late(_: int, job: Job) -> Failure | None:
        is_beside = is_confirmation(job) and job.arms[0].name == EAGER and len(job.arms) == 3
        return failure("too large", FailureKind.OUT_OF_MEMORY) if is_beside else None

    machine = Machine(step_ms=STRONG, inapplicable=SMALL, answer=late)
    trials, conclusion = run_out(machine, a_run(budget_trials=8))
    assert words(conclusion.plan.knobs) != GRAPH, "the best, by every process without the step as given"
    assert any("too large" in trial.failure.reason for trial in confirmations(trials) if trial.failure)


def test_the_step_as_given_is_timed_again_where_the_machine_was_disturbed():
    def busy(_: int, job: Job) -> None:
        machine.disturbed = is_confirmation(job) and len(asked()) == 1

    def asked() -> list[Job]:
        return [job for job in machine.jobs if is_confirmation(job)]

    machine = Machine(step_ms=STRONG, inapplicable=SMALL, answer=busy)
    trials, conclusion = run_out(machine, a_run(budget_trials=8))
    measured = [trial.measurement for trial in confirmations(trials)]
    assert [found.disturbed for found in measured] == [True, False, False, False, False]
    assert [found.arms[0].name == EAGER for found in measured] == [True, True, True, False, False]
    assert conclusion.plan.evidence.processes == PROCESSES - 1


def test_where_time_ended_before_the_step_as_given_was_timed_the_candidate_has_no_plan():
    """Those that time it run out of memory beside one that does not, which takes all the time that is left."""

    def late(_: int, job: Job) -> Failure | None:
        if not is_confirmation(job) or words(job.arms[-1].knobs) != GRAPH:
            return None
        if job.arms[0].name == EAGER:
            return failure("too large", FailureKind.OUT_OF_MEMORY)
        machine.now_s += 400
        return None

    machine = Machine(step_ms=STRONG, inapplicable=SMALL, child_s=5, answer=late)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("tuner.tuning.run.at_once", lambda *_: 3)
        trials, conclusion = run_out(machine, a_run(budget_s=300))
    (given_up,) = [trial for trial in confirmations(trials) if trial.failure == OUT_OF_TIME]
    assert words(given_up.knobs) == GRAPH
    assert words(conclusion.plan.knobs) == COMPILED


@pytest.mark.minutes
@settings(max_examples=25)
@given(st.integers(0, 10**6), st.integers(1, 4), st.sampled_from([60, 120, 300, None]))
def test_however_processes_end_the_answer_knows_the_step_as_given(seed, at_once, budget_s):
    chance = random.Random(seed)
    kinds = (FailureKind.OUT_OF_MEMORY, FailureKind.TIMEOUT, FailureKind.CRASHED)
    often = chance.choice([0.0, 0.2, 0.6])

    def answer(_: int, job: Job) -> Failure | None:
        is_struck = is_confirmation(job) and chance.random() < often
        return failure("struck", chance.choice(kinds)) if is_struck else None

    machine = Machine(step_ms=STRONG, inapplicable=SMALL, child_s=chance.choice([1, 20]), answer=answer)
    run = a_run(budget_s=budget_s) if budget_s else a_run(budget_trials=6)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("tuner.tuning.run.at_once", lambda *_: at_once)
        patched.setattr("tuner.planning.memory_fit.MemoryFit.fits", lambda *_: chance.random() < 0.5)
        try:
            trials, conclusion = run_out(machine, run)
        except NoTrialError:
            assert often
            return
    evidence = conclusion.plan.evidence
    assert evidence.eager_step_ms == pytest.approx(USUAL_MS, rel=0.01)
    gain = USUAL_MS / STRONG.get(words(conclusion.plan.knobs), USUAL_MS)
    assert evidence.speedup_over_eager.median == pytest.approx(gain, rel=0.01)
    assert evidence.processes <= max(1, sum(trial.measurement is not None for trial in confirmations(trials)))


def test_nothing_is_given_up_for_the_step_as_given():
    machine = Machine(step_ms=GRAPH_WINS, inapplicable=SMALL, child_s=20)

    def slow(_: int, job: Job) -> None:
        if words(job.arms[-1].knobs) == GRAPH and job.numerics:
            for _ in range(60):
                machine.now_s += 1
                machine.check()

    machine.answer = slow
    _, conclusion = run_out(machine, a_run(budget_s=120))
    assert words(conclusion.plan.knobs) == GRAPH


def test_a_run_that_had_time_for_the_step_as_given_alone_says_so():
    trials, conclusion = run_out(Machine(inapplicable=SMALL, child_s=45), a_run(budget_s=70))
    assert {words(trial.knobs) for trial in trials} == {"eager"}
    assert (conclusion.plan.knobs, conclusion.verdict) == ({}, Verdict.AMBIGUOUS)
    assert conclusion.plan.evidence.verdict == "ambiguous"
    assert conclusion.plan.evidence.note == UNSEARCHED


def test_neither_does_one_that_had_too_little_time_for_every_candidate_call_them_the_same():
    def late(_: int, job: Job) -> Failure | None:
        is_candidate = job.numerics and job.arms[-1].knobs
        return failure("no time was left", FailureKind.TIMEOUT) if is_candidate else None

    trials, conclusion = run_out(Machine(inapplicable=SMALL, answer=late), a_run(budget_s=200))
    assert len({words(trial.knobs) for trial in trials}) > 1
    assert (conclusion.plan.knobs, conclusion.verdict) == ({}, Verdict.AMBIGUOUS)
    assert conclusion.plan.evidence.note == UNSEARCHED


def test_no_process_is_begun_that_would_be_ended_before_it_answers():
    machine = Machine(step_ms=GRAPH_WINS, inapplicable=SMALL, child_s=20)

    def slower(_: int, job: Job) -> None:
        if not job.numerics:
            machine.now_s += 100

    machine.answer = slower
    trials, conclusion = run_out(machine, a_run(budget_s=300))
    assert len([trial for trial in trials if trial.source is Source.CONFIRM]) == 1
    assert conclusion.verdict is Verdict.AMBIGUOUS
    assert "one process alone cannot tell" in conclusion.plan.evidence.note
    assert machine.now_s <= 1.1 * 300


def test_a_machine_on_which_nothing_applies_keeps_the_step_as_given():
    trials, conclusion = run_out(Machine(inapplicable=only()), a_run(budget_trials=25))
    assert {words(trial.knobs) for trial in trials} == {"eager"}
    assert len(confirmations(trials)) == 1, "a step is surely as fast as itself"
    evidence = conclusion.plan.evidence
    assert (conclusion.plan.knobs, conclusion.verdict, evidence.baseline) == ({}, Verdict.SAME, "eager")
    assert evidence.step_ms == evidence.baseline_step_ms == evidence.eager_step_ms
    assert evidence.speedup.median == evidence.speedup_over_eager.median == 1.0
    assert evidence.numerics.note == "the step as given"
    assert Plan.from_json(conclusion.plan.to_json()) == conclusion.plan
