import math
from datetime import timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kitsune.errors import BaselineError, NoTrialError, UnfitError, WorkloadError
from tests.unit.tuner.machine import (
    CLOSE,
    CLOSE_GRAPHS,
    COMPILED,
    ENVIRONMENT,
    GRAPH,
    GRAPH_WINS,
    INSPECTION_S,
    SMALL,
    USUAL_MS,
    Machine,
    a_run,
    drained,
    failing,
    failure,
    interrupting,
    is_confirmation,
    is_playoff,
    nothing_special,
    only,
    run_out,
    sources,
    trials_of,
    until_it_raises,
)
from tuner.measuring.gpu_health import DEATHS_OF_A_TRIAL, GIVEN_UP
from tuner.measuring.protocol import Job, Limits
from tuner.planning.pace import MIN_CHILD_S, elapsed_s, limits_within
from tuner.planning.prior_runs import AGAIN
from tuner.planning.standings import searched
from tuner.records import Failure, FailureKind, Phase, Source, Verdict
from tuner.search.outcomes import best, speedup
from tuner.statistics.plan_evidence import CANDIDATE, EAGER, RIVAL, words
from tuner.statistics.process_statistics import PROCESSES
from tuner.tuning.events import Confirming, Inspected, Tried, Trying
from tuner.tuning.run import ENDED_EARLY, OVERTIME, SEARCH_ROUNDS, UNSEARCHED

# What happens, in which order -----------------------------------------------------------------------------------------


def test_the_order_of_events():
    machine = Machine(step_ms=GRAPH_WINS, inapplicable=SMALL)
    events, conclusion = drained(machine.tuning(a_run(budget_trials=4)))
    assert [type(event) for event in events] == [Inspected, *[Trying, Tried] * 4, Confirming, *[Tried] * PROCESSES]
    announced = [event for event in events if isinstance(event, Trying)]
    trials = trials_of(events)
    assert [event.number for event in announced] == [0, 1, 2, 3]
    assert {event.total for event in announced} == {4}
    assert [trial.number for trial in trials] == list(range(4 + PROCESSES))
    assert [trial.knobs for trial in trials[:4]] == [event.proposal.knobs for event in announced]
    assert sources(trials)[0] is Source.BASELINE
    assert sources(trials)[4:] == [Source.CONFIRM] * PROCESSES
    assert events[-PROCESSES - 1] == Confirming(trials[-1].knobs)
    assert not conclusion.interrupted


def test_the_run_goes_to_its_children():
    machine = Machine(inapplicable=SMALL)
    tuning = machine.tuning(a_run(workload="live", device="cuda:1", seed=7, budget_trials=2))
    tuning.spec = "somewhere/model.ksn"
    drained(tuning)
    assert machine.asked == [("somewhere/model.ksn", "cuda:1")]
    jobs = [*machine.inspected, *machine.jobs]
    assert {(job.workload, job.device, job.seed) for job in jobs} == {("somewhere/model.ksn", "cuda:1", 7)}


@pytest.mark.parametrize("budget", [1, 2, 7])
def test_a_budget_of_trials(budget):
    trials, _ = run_out(Machine(inapplicable=SMALL), a_run(budget_trials=budget))
    assert len([trial for trial in trials if trial.source.is_search]) == budget


def test_the_search_ends_when_nothing_is_left_to_try():
    trials, _ = run_out(Machine(inapplicable=only("precision=bf16")), a_run(budget_trials=100))
    assert [words(trial.knobs) for trial in searched(trials)] == ["eager", "precision=bf16"]


def test_only_what_the_search_chose_by_measurements_may_be_stopped_early():
    machine = Machine(step_ms=GRAPH_WINS, inapplicable=SMALL)
    trials, _ = run_out(machine, a_run(budget_trials=100))
    assert set(sources(trials)) >= {Source.BASELINE, Source.STOCK, Source.SEED, Source.MODEL, Source.CONFIRM}
    best = 0.0
    for trial, job in zip(trials, machine.jobs, strict=True):
        if trial.source in (Source.BASELINE, Source.STOCK) or not trial.source.is_search:
            assert job.best_speedup is None
        else:
            over_rival = best if job.arms[0].name == EAGER else 1.0
            assert job.best_speedup == pytest.approx(over_rival, rel=0.01)  # less what noise may do to the order
            assert job.best_speedup <= over_rival
        if trial.source.is_search:
            best = max(best, trial.comparison.speedup.median)


def test_trials_are_timed_against_the_best_so_far_and_compared_with_the_step_as_given():
    machine = Machine(step_ms=GRAPH_WINS, inapplicable=SMALL)
    trials, _ = run_out(machine, a_run(budget_trials=6))
    rivals = [words(job.arms[0].knobs) for job in machine.jobs[:6]]
    assert [job.arms[0].name for job in machine.jobs[:6]] == [EAGER if each == "eager" else RIVAL for each in rivals]
    assert rivals[:2] == ["eager"] * 2
    assert rivals[-1] == GRAPH
    for trial, job in zip(searched(trials), machine.jobs, strict=False):
        assert (job.arms[-1].name, job.arms[-1].knobs) == (CANDIDATE, trial.knobs)
        assert job.rounds == SEARCH_ROUNDS
        expected = USUAL_MS / GRAPH_WINS.get(words(trial.knobs), USUAL_MS)
        assert trial.comparison.speedup.median == pytest.approx(expected, rel=0.01)


# A budget of time -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("budget_s", "is_tried"), [(160, False), (600, True)])
def test_what_compiles_for_minutes_is_tried_when_there_is_time_for_it(budget_s, is_tried):
    machine = Machine(inapplicable=only("compile=default", "compile=max-autotune", "update=fused"), child_s=20)
    trials, _ = run_out(machine, a_run(budget_s=budget_s))
    assert len(trials) >= 5
    assert any("max-autotune" in trial.knobs.values() for trial in trials) is is_tried


@settings(max_examples=25)
@given(st.floats(1, 60), st.floats(150, 900))
def test_a_run_ends_within_its_time(child_s, budget_s):
    machine = Machine(step_ms=GRAPH_WINS, inapplicable=only("precision=bf16", "compile=default"), child_s=child_s)
    if budget_s < INSPECTION_S + 7 * child_s:  # for less than a trial and its confirmation there is no promise
        budget_s += 7 * child_s
    run_out(machine, a_run(budget_s=budget_s))
    assert machine.now_s <= budget_s


def test_no_trial_begins_that_cannot_end_before_the_confirmation_must_begin():
    machine = Machine(step_ms=GRAPH_WINS, inapplicable=SMALL, child_s=40)
    trials, _ = run_out(machine, a_run(budget_s=400))
    # 5 s for the inspection; for the confirmation 5 * 28 s, and 17 s for the proof: 238 s for five trials of 40 s
    assert [trial.source is Source.CONFIRM for trial in trials] == [False] * 5 + [True] * PROCESSES
    assert not [trial for trial in trials if trial.failure]
    assert machine.now_s == 5 + 5 * 40 + PROCESSES * 32


def test_a_trial_that_failed_at_once_says_nothing_of_how_long_one_takes():
    machine = Machine(step_ms=GRAPH_WINS, inapplicable=SMALL, child_s=40)

    def decline(number: int, job: Job) -> Failure | None:
        machine.child_s = 1 if number == 0 else 40  # of the next one
        return failure("declined", FailureKind.DECLINED) if number == 1 else None

    machine.answer = decline
    run_out(machine, a_run(budget_s=272))
    # 5 s for the inspection, 1 s for what failed, 5 * 24 s for the confirmation: three trials, and 26 s for its proof
    assert machine.now_s == 5 + 1 + 3 * 40 + PROCESSES * 24  # the best is a stock configuration: two arms


def test_a_clock_that_was_set_back_gives_no_time():
    (first, *_), _ = run_out(Machine(inapplicable=SMALL), a_run(budget_trials=1))
    assert first.took_s == 10
    back = {"finished_at": first.started_at + timedelta(seconds=-100)}
    assert first.model_copy(update=back).took_s == 10, "by a monotonic clock"
    assert first.model_copy(update={**back, "spent": None}).took_s == 0
    assert elapsed_s([first.model_copy(update=back)]) == 0


def test_time_bounds_the_children():
    machine = Machine(inapplicable=SMALL, child_s=40)
    run_out(machine, a_run(budget_s=300))
    first, second, *_ = machine.limits
    assert first.total_s == 295
    assert second.total_s == pytest.approx(300 - 45 - AGAIN * (0.4 + 0.2) * 40, abs=0.01), "the baseline leads"
    assert machine.limits[-1].total_s == pytest.approx(300 - (machine.now_s - 24) + OVERTIME * 300)


def test_a_budget_counts_from_when_the_command_began():
    machine = Machine(inapplicable=SMALL, child_s=40)
    drained(machine.make(run=a_run(budget_s=300), spec="zoo:mlp", begun_s=machine.now_s - 12))
    assert machine.limits[0].total_s == 300 - 12 - 5


def test_without_a_budget_of_time_only_the_phases_are_limited():
    machine = Machine(inapplicable=SMALL)
    run_out(machine, a_run(budget_trials=3))
    assert set(machine.limits) == {Limits()}


def test_a_trial_that_hangs_is_ended_by_what_is_left():
    machine = Machine(inapplicable=SMALL, child_s=20)

    def hang(number: int, job: Job) -> Failure | None:
        if number != 2:
            return None
        machine.now_s += machine.limits[2].total_s - 20
        return failure("took longer than its limit", FailureKind.TIMEOUT)

    machine.answer = hang
    trials, _ = run_out(machine, a_run(budget_s=300))
    assert [trial.failure is None for trial in searched(trials)] == [True, True, False]
    assert machine.now_s <= 300


def test_a_child_always_has_the_time_to_start():
    assert limits_within(math.inf) == Limits()
    assert limits_within(-5).total_s == limits_within(1).total_s == MIN_CHILD_S
    assert limits_within(100).total_s == 100


def test_a_budget_that_ends_with_the_inspection_leaves_the_step_as_given():
    trials, conclusion = run_out(Machine(), a_run(budget_s=4))
    assert sources(trials) == [Source.BASELINE]
    assert (conclusion.plan.knobs, conclusion.verdict) == ({}, Verdict.AMBIGUOUS)
    assert conclusion.plan.evidence.note == UNSEARCHED


def test_where_no_compilation_fits_what_is_not_compiled_is_tried():
    """The first look takes 5 s, a trial 10, and one that compiles 8 s more at least."""
    quick = "layout=channels_last, precision=bf16, update=kitsune, capture=step"
    trials, conclusion = run_out(Machine(step_ms={quick: 5.0}), a_run(budget_s=40))
    assert [words(trial.knobs) for trial in searched(trials)] == ["eager", quick]
    assert words(conclusion.plan.knobs) == quick


# Failures -------------------------------------------------------------------------------------------------------------


def test_a_failed_trial_is_kept_with_its_reason_and_the_search_goes_on():
    compiled = failing(lambda job: "compile" in job.arms[-1].knobs, "no compiler")
    trials, conclusion = run_out(Machine(inapplicable=SMALL, answer=compiled), a_run(budget_trials=8))
    assert len([trial for trial in trials if trial.source.is_search]) == 8
    failed = [trial for trial in trials if trial.failure is not None]
    assert failed
    for trial in failed:
        assert "compile" in trial.knobs
        assert (trial.failure.reason, trial.measurement, trial.comparison) == ("no compiler", None, None)
    assert conclusion.verdict is Verdict.SAME


def test_when_every_trial_fails_the_first_reason_is_told():
    def answer(number: int, job: Job) -> Failure:
        return failure(f"reason {number}")

    machine = Machine(inapplicable=SMALL, answer=answer)
    trials = until_it_raises(machine, a_run(budget_trials=5), NoTrialError, "all 5 trials failed; the first: reason 0")
    assert len(trials) == 5
    assert Source.CONFIRM not in sources(trials)


def test_a_workload_that_fails_as_given():
    machine = Machine()
    machine.as_given = failure("no such luck")
    tuning = machine.tuning(a_run(budget_trials=5))
    with pytest.raises(BaselineError, match="fails as given: no such luck"):
        drained(tuning)
    assert machine.jobs == []


def test_a_first_look_that_cannot_begin_is_not_the_workloads_fault():
    machine = Machine()
    machine.as_given = failure("No space left on device", FailureKind.CRASHED).model_copy(update={"phase": Phase.START})
    with pytest.raises(UnfitError, match="this machine cannot look at the workload: No space left"):
        drained(machine.tuning(a_run(budget_trials=5)))


@pytest.mark.parametrize("kind", [FailureKind.RAISED, FailureKind.WRONG, FailureKind.NOT_FINITE])
def test_a_step_that_fails_against_itself_ends_the_run(kind):
    machine = Machine(answer=lambda *_: failure("no two steps are alike", kind))
    trials = until_it_raises(machine, a_run(budget_trials=5), BaselineError, "against itself: no two steps")
    assert sources(trials) == [Source.BASELINE], "it is told of, so that it can be stored"


def test_a_baseline_for_which_memory_or_time_is_missing_does_not_end_the_run():
    machine = Machine(step_ms={"precision=bf16": 5.0}, inapplicable=only("precision=bf16"))
    machine.answer = lambda number, _: failure("too large", FailureKind.OUT_OF_MEMORY) if number == 0 else None
    trials, conclusion = run_out(machine, a_run(budget_trials=2))
    assert [trial.failure is None for trial in searched(trials)] == [False, True]
    assert conclusion.plan.knobs == {"precision": "bf16"}


# Interrupts -----------------------------------------------------------------------------------------------------------


def test_an_interrupt_ends_the_search_and_the_best_so_far_is_confirmed():
    machine = Machine(step_ms=GRAPH_WINS, inapplicable=SMALL, answer=interrupting(5))
    events, conclusion = drained(machine.tuning(a_run(budget_trials=25)))
    assert conclusion.interrupted
    assert conclusion.plan.evidence.interrupted
    assert words(conclusion.plan.knobs) == GRAPH
    assert [type(event) for event in events[-3 - PROCESSES :]] == [Tried, Trying, Confirming, *[Tried] * PROCESSES]
    assert [trial.number for trial in trials_of(events)] == list(range(5 + PROCESSES))


def test_an_interrupt_before_anything_was_compared_is_no_want_of_time():
    _, conclusion = run_out(Machine(answer=interrupting(1)), a_run(budget_s=300))
    evidence = conclusion.plan.evidence
    assert (conclusion.verdict, evidence.note) == (Verdict.AMBIGUOUS, ENDED_EARLY)
    assert (evidence.budget_s, evidence.interrupted) == (300, True)


def test_an_interrupt_before_anything_was_measured():
    machine = Machine(answer=interrupting(0))
    assert until_it_raises(machine, a_run(budget_trials=25), NoTrialError, "interrupted before anything") == []


def test_an_interrupt_of_the_confirmation_propagates():
    def answer(_: int, job: Job) -> None:
        if is_confirmation(job):
            raise KeyboardInterrupt

    machine = Machine(inapplicable=SMALL, answer=answer)
    with pytest.raises(KeyboardInterrupt):
        drained(machine.tuning(a_run(budget_trials=3)))


# The playoff ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("run_id", ["a", "b", "c"])
def test_the_best_few_play_off_where_the_baseline_is_noisy(run_id):
    """Over a baseline that drifts by 20 % from process to process the better of two configurations may look worse."""
    machine = Machine(step_ms=CLOSE, inapplicable=SMALL, drift=0.2)
    trials, conclusion = run_out(machine, a_run(id=run_id, budget_trials=24))
    (playoff,) = [trial for trial in trials if trial.source is Source.PLAYOFF]
    (job,) = filter(is_playoff, machine.jobs)
    assert 2 <= len(job.arms) <= 3
    best_ms = min(CLOSE.get(words(arm.knobs), USUAL_MS) for arm in job.arms)
    assert CLOSE[words(playoff.knobs)] == best_ms
    assert conclusion.plan.knobs == playoff.knobs


@pytest.mark.parametrize("run_id", ["a", "b", "c"])
def test_captured_steps_need_none_for_that(run_id):
    machine = Machine(step_ms=CLOSE_GRAPHS, inapplicable=SMALL, drift=0.2)
    trials, conclusion = run_out(machine, a_run(id=run_id, budget_trials=24))
    assert Source.PLAYOFF not in sources(trials)
    assert words(conclusion.plan.knobs) == min(CLOSE_GRAPHS, key=CLOSE_GRAPHS.get)
    graphs = {speedup(trial) * CLOSE_GRAPHS.get(words(trial.knobs), USUAL_MS) for trial in trials if is_graph(trial)}
    assert len(graphs) > 2
    assert max(graphs) / min(graphs) == pytest.approx(1, abs=0.02), "speedups go by the times"


def is_graph(trial):
    return trial.source.is_search and trial.knobs.get("capture") == "step" and trial.failure is None


def test_a_playoff_that_fails_leaves_the_order_as_it_was():
    machine = Machine(step_ms=CLOSE, inapplicable=SMALL, drift=0.2, answer=failing(is_playoff, "out of memory"))
    trials, conclusion = run_out(machine, a_run(budget_trials=24))
    (playoff,) = [trial for trial in trials if trial.source is Source.PLAYOFF]
    assert playoff.failure.reason == "out of memory"
    assert conclusion.plan.knobs == best(trials).knobs


def test_nothing_plays_off_where_the_order_is_clear():
    machine = Machine(step_ms={GRAPH: 1.0}, inapplicable=SMALL)
    trials, _ = run_out(machine, a_run(budget_trials=8))
    assert not any(map(is_playoff, machine.jobs))
    assert Source.PLAYOFF not in sources(trials)


@pytest.mark.parametrize("answer", [nothing_special, failing(is_playoff, "out of memory")])
def test_a_stored_playoff_is_not_repeated(answer):
    """However often the confirmation takes its worker down: else each attempt would seem to have come forward."""
    run = a_run(budget_trials=24)
    whole, conclusion = run_out(Machine(step_ms=CLOSE, inapplicable=SMALL, drift=0.2, answer=answer), run)
    stored = whole[: sources(whole).index(Source.PLAYOFF) + 1]
    machine = Machine(step_ms=CLOSE, inapplicable=SMALL, drift=0.2, answer=answer)
    events, again = drained(machine.tuning(run, stored))
    assert sources(trials_of(events)) == [Source.CONFIRM] * PROCESSES == sources(whole[len(stored) :])
    assert again.plan.knobs == conclusion.plan.knobs


def test_what_is_searched_after_a_playoff_has_one_of_its_own():
    run = a_run(budget_trials=22)
    whole, _ = run_out(Machine(step_ms=CLOSE, inapplicable=SMALL, drift=0.2), run)
    stored = whole[: sources(whole).index(Source.PLAYOFF) + 1]
    machine = Machine(step_ms=CLOSE, inapplicable=SMALL, drift=0.2)
    events, _ = drained(machine.tuning(run.evolve(budget_trials=23), stored))
    assert sources(trials_of(events))[1:] == [Source.PLAYOFF, *[Source.CONFIRM] * PROCESSES]


# Going on -------------------------------------------------------------------------------------------------------------


@settings(max_examples=20)
@given(st.integers(0, 9))
def test_a_run_goes_on_where_it_stopped(stored):
    run = a_run(budget_trials=8)
    whole, _ = run_out(Machine(step_ms=GRAPH_WINS, inapplicable=SMALL), run)
    machine = Machine(step_ms=GRAPH_WINS, inapplicable=SMALL)
    events, conclusion = drained(machine.tuning(run, whole[:stored]))
    both = [*whole[:stored], *trials_of(events)]
    tried = [words(trial.knobs) for trial in searched(both)]
    assert len(set(tried)) == len(tried) == 8, "what had been tried is not tried again"
    assert tried[:6] == [words(trial.knobs) for trial in searched(whole)][:6], "then the times decide, which vary"
    assert [trial.number for trial in both] == list(range(len(both)))
    assert words(conclusion.plan.knobs) == GRAPH
    assert len(machine.jobs) == max(PROCESSES, 8 + PROCESSES - stored)


def test_a_stored_confirmation_is_no_trial_of_the_search():
    run = a_run(budget_trials=8)
    machine = Machine(step_ms=GRAPH_WINS, inapplicable=SMALL, answer=interrupting(4))
    interrupted, _ = run_out(machine, run)  # four trials, and a confirmation of five processes
    assert sources(interrupted)[-1] is Source.CONFIRM
    events, _ = drained(Machine(step_ms=GRAPH_WINS, inapplicable=SMALL).tuning(run, interrupted))
    rest = trials_of(events)
    assert [trial.number for trial in rest] == list(range(9, 9 + 4 + PROCESSES))
    undisturbed, _ = run_out(Machine(step_ms=GRAPH_WINS, inapplicable=SMALL), run)
    assert [trial.knobs for trial in rest] == [trial.knobs for trial in undisturbed[4:]]


def test_a_stored_confirmation_that_failed_is_not_repeated():
    run = a_run(budget_trials=8)
    machine = Machine(step_ms=GRAPH_WINS, inapplicable=SMALL)
    machine.answer = failing(is_confirmation)
    died = until_it_raises(machine, run, NoTrialError, "afresh")[:9]
    assert (sources(died)[-1], words(died[-1].knobs)) == (Source.CONFIRM, GRAPH)
    events, conclusion = drained(Machine(step_ms=GRAPH_WINS, inapplicable=SMALL).tuning(run, died))
    assert [words(event.knobs) for event in events if isinstance(event, Confirming)] == [COMPILED]
    assert words(conclusion.plan.knobs) == COMPILED


@pytest.mark.parametrize(("deaths", "given_up"), [(DEATHS_OF_A_TRIAL - 1, 0), (DEATHS_OF_A_TRIAL, 1), (9, 1)])
def test_what_workers_in_a_row_vanished_over_is_given_up_once_and_the_search_goes_on(deaths, given_up):
    machine = Machine(step_ms=GRAPH_WINS, inapplicable=SMALL)
    baseline = Machine(inapplicable=SMALL).tuning(a_run(budget_trials=1))
    drained(baseline)
    tuning = machine.tuning(a_run(budget_trials=6, deaths=deaths), baseline.trials[:1])
    drained(tuning)
    assert [trial.failure for trial in tuning.trials].count(GIVEN_UP) == given_up
    assert (tuning.trials[1].failure == GIVEN_UP) is bool(given_up)
    assert tuning.trials[2].failure is None


def test_the_step_as_given_is_measured_however_many_workers_vanished():
    tuning = Machine(step_ms=GRAPH_WINS, inapplicable=SMALL).tuning(a_run(budget_trials=6, deaths=9))
    drained(tuning)
    assert tuning.trials[0].failure is None
    assert tuning.trials[1].failure == GIVEN_UP


def test_time_that_was_spent_before_counts():
    run = a_run(budget_s=300)
    whole, _ = run_out(Machine(inapplicable=SMALL, child_s=40), run)
    machine = Machine(inapplicable=SMALL, child_s=40, now_s=1e6)
    events, _ = drained(machine.tuning(run, whole[:3]))
    assert len(trials_of(events)) == len(whole) - 3


def test_trials_of_another_workload_are_not_gone_on_with():
    run = a_run(budget_trials=8, fingerprint="f")
    whole, _ = run_out(Machine(inapplicable=SMALL), run)
    machine = Machine(inapplicable=SMALL, fingerprint="g")
    with pytest.raises(WorkloadError, match="zoo:mlp has changed since 3 trials of run run were made"):
        drained(machine.tuning(run, whole[:3]))
    assert machine.jobs == []


def test_trials_of_another_machine_are_not_gone_on_with():
    elsewhere = ENVIRONMENT.model_copy(update={"gpu": "another CPU"})
    run = a_run(budget_trials=8, environment=elsewhere)
    whole, _ = run_out(Machine(inapplicable=SMALL), run)
    machine = Machine(inapplicable=SMALL)
    with pytest.raises(WorkloadError, match="the run has moved from another CPU to a CPU since 3 trials"):
        drained(machine.tuning(run, whole[:3]))
    assert machine.jobs == []
