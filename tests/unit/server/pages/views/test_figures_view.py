"""The figures of a run: its charts' data, its trials, its noise, and where the time went."""

import pytest

from server.charts.drawing import words
from server.pages.views import contributions, figures_view, trials_view
from server.pages.views.budget_view import spent_view, untried_view
from server.pages.views.choices_view import ChoiceOutcome
from server.pages.views.run_view import RunView
from tests.unit.server.pages import stories
from tests.unit.server.pages.views.viewed import viewed
from tuner.planning.ablation import UNREACHED
from tuner.planning.time_spent import PARTS
from tuner.records import Failure, FailureKind, Phase, RunStatus, Source, Spent
from tuner.statistics.plan_evidence import EAGER
from tuner.statistics.plan_evidence import words as words_of_knobs

# The charts' data -----------------------------------------------------------------------------------------------------


def test_the_waterfall_leads_from_the_step_as_given_to_the_plan():
    bars = viewed(stories.with_a_gain()).bars
    assert [bar.kind for bar in bars] == ["total", *["step"] * 6, "remainder", "total"]
    assert [bar.label for bar in bars[1:-2]] == [
        "layout=channels_last",
        "precision=bf16",
        "compile=default",
        "update=fused",
        "capture=step",
        "streams=4",
    ]
    assert bars[0].ms + sum(bar.ms for bar in bars[1:-1]) == pytest.approx(bars[-1].ms)
    for bar in bars[1:-1]:
        assert bar.low_ms <= bar.ms <= bar.high_ms
    assert bars[2].ms == pytest.approx(-1.9, abs=0.05)


def test_a_choice_that_others_need_says_beside_what_it_was_measured():
    view = viewed(stories.with_a_gain())
    assert view.unmeasured == ()
    capture = next(bar for bar in view.bars if bar.label == "capture=step")
    assert capture.ms == pytest.approx(-0.36, abs=0.05)
    assert capture.note.startswith("beside a plan without streams; ")


def test_a_trial_says_what_was_left_out_and_when_it_was_cut_short():
    told = {row.number: row for row in viewed(stories.resnet18_on_an_h200()).trials}
    assert told[9].configuration.endswith("streams=4; without layout; without precision")
    assert told[7].verdict == "cut short", "three rounds, in which it was faster than the step as given"
    assert told[3].verdict == "ambiguous"


def test_without_leave_one_out_the_waterfall_is_one_step():
    run, trials, plan = stories.with_a_gain()
    view = viewed((run, [trial for trial in trials if trial.source != "ablation"], plan))
    assert [bar.kind for bar in view.bars] == ["total", "remainder", "total"]
    assert view.bars[1].low_ms <= view.bars[1].ms <= view.bars[1].high_ms < 0
    assert "was not measured" in view.bars_note


def ablated(outcome: Failure | None, **changes: object) -> RunView:
    """`with_a_gain`, of which every process that leaves choices out failed, or none of them began."""
    run, trials, plan = stories.with_a_gain()
    assert plan is not None
    others = [trial for trial in trials if trial.source is not Source.ABLATION]
    if outcome:
        others += [stories.trial(run, len(others) + more, Source.ABLATION, plan.knobs, outcome) for more in range(8)]
    return viewed((run.evolve(**changes), others, plan))


def test_while_the_choices_are_measured_the_page_says_so():
    going_on = {"status": RunStatus.RUNNING, "finished_at": None, "lease_until": stories.at(1e9)}
    assert ablated(None, **going_on).bars_note == "What each choice gives is being measured."
    run, trials, plan = stories.with_a_gain()
    reasons = dict(viewed((run.evolve(**going_on), trials[:-2], plan)).unmeasured)
    assert set(reasons.values()) == {"its turn has not come"}
    assert UNREACHED in dict(viewed((run, trials[:-2], plan)).unmeasured).values()


@pytest.mark.parametrize(
    ("status", "why"),
    [
        (RunStatus.RUNNING, "its turn has not come"),
        (RunStatus.CANCELLED, "the run was cancelled before its turn came"),
        (RunStatus.FAILED, "the run failed before its turn came"),
    ],
)
def test_what_was_not_tried_says_whether_it_still_may_be(status, why):
    run, trials, plan = stories.running()
    rows = viewed((run.evolve(status=status), trials, plan)).choices
    assert why in {row.reason for row in rows if row.outcome is ChoiceOutcome.UNTRIED}


def test_where_all_of_leave_one_out_failed_the_page_says_why():
    wall = Failure(kind=FailureKind.OUT_OF_MEMORY, phase=Phase.WARMUP, reason="CUDA out of memory: 2.0 GiB")
    note = ablated(wall).bars_note
    assert note.startswith(
        "What each choice gives was not measured. layout, precision, compile, update, capture, streams: CUDA"
    )
    assert "the run ended" not in note
    timeout = wall.model_copy(update={"kind": FailureKind.TIMEOUT, "reason": "took 60 s"})
    assert "took 60 s" in ablated(timeout).bars_note


def test_a_plan_that_changes_nothing_has_no_waterfall():
    assert viewed(stories.measured_on_a_cpu()).bars == ()


def test_memory_is_drawn_where_it_is_counted():
    points = viewed(stories.with_a_gain()).points
    assert [point.label for point in points if point.is_chosen] == [
        "trial 6: layout=channels_last, precision=bf16, compile=default, update=fused, capture=step, streams=4"
    ]
    assert [point.href for point in points if point.is_baseline] == ["#trial-1"]
    assert viewed(stories.measured_on_a_cpu()).points == ()


def test_the_search_shows_failures_with_their_reason():
    tried = viewed(stories.with_a_gain()).tried
    assert [one.number for one in tried] == list(range(1, 10))
    assert [one.number for one in tried if one.speedup is None] == [7, 9]
    assert tried[6].failure.startswith("gave wrong numbers (numerics): gradients")


def test_the_samples_are_those_of_the_confirmation():
    strips = viewed(stories.with_a_gain()).strips
    assert [strip.label for strip in strips] == ["step as given", "best of plain torch", "best of the search"]
    assert [len(strip.values_ms) for strip in strips] == [20, 50, 50], "of five processes, two with the step as given"
    assert [strip.label for strip in viewed(stories.measured_on_a_cpu()).strips] == [
        "step as given",
        "step as given, again",
    ]
    assert figures_view.strips([]) == ()


def test_what_was_measured_again_before_the_search_is_another_confirmation():
    _, trials, _ = stories.with_a_gain()
    before = [trial for trial in trials if trial.source is Source.CONFIRM][:2]
    assert figures_view.strips([*before, *trials]) == figures_view.strips(trials)
    assert {len(strip.values_ms) for strip in figures_view.strips(before)} == {20}, "a run without a search"


def test_what_each_choice_gives_is_computed_once(monkeypatch):
    computed = []
    monkeypatch.setattr(contributions, "ablation_of", lambda *given: computed.append(given))
    run, trials, plan = stories.with_a_gain()
    for _ in range(3):
        contributions.contributions_of(run, trials, plan)
    assert len(computed) == 1
    contributions.contributions_of(run, trials[:-1], plan)
    assert len(computed) == 2
    for number in range(contributions.MOST + 10):
        contributions.contributions_of(run.evolve(id=f"other-{number}"), trials, plan)
    assert len(contributions._known) == contributions.MOST


# Trials and noise -----------------------------------------------------------------------------------------------------


def test_a_trial_is_a_line_with_its_samples():
    _, trials, plan = stories.with_a_gain()
    assert plan is not None
    rows = trials_view.trial_rows(trials, plan.knobs)
    assert [row.number for row in rows] == list(range(1, 20))
    baseline, failed, best = rows[0], rows[6], rows[5]
    assert (baseline.verdict, baseline.configuration) == ("noise floor", "eager")
    assert (failed.verdict, failed.step, failed.gain) == ("failed", "", "")
    assert best.is_plan and not failed.is_plan
    assert best.arms[1].samples.split() == [f"{value:.4g}" for value in trials[5].measurement.arms[1].step_ms]
    assert {row.source for row in rows} <= set(trials_view.MEANINGS)


def test_thousands_of_samples_are_not_all_written_out():
    ((arm, _),) = [row.arms for row in viewed(stories.of_many_samples()).trials]
    assert arm.blocks == 5000
    assert len(arm.samples.split()) == trials_view.MAX_SAMPLES
    assert arm.left_out == 5000 - trials_view.MAX_SAMPLES


def test_the_noise_is_that_of_the_step_against_itself():
    noise = viewed(stories.with_a_gain()).noise
    assert noise is not None
    assert "measured against itself, came to 0.998 times as fast" in noise.sentence
    assert dict(noise.facts)["rounds dropped"] == "3, as the machine was disturbed"
    assert viewed(stories.failed()).noise is None


def test_only_times_of_the_step_as_given_are_compared_between_processes():
    _, trials, _ = stories.with_a_gain()
    facts = dict(viewed(stories.with_a_gain()).noise.facts)
    with_eager = [each for each in trials if each.measurement and each.measurement.arms[0].name == EAGER]
    assert len(with_eager) < sum(trial.measurement is not None for trial in trials)
    assert facts["between processes"].endswith(f"in the slowest of {len(with_eager)} as in the fastest")


# Where the time went --------------------------------------------------------------------------------------------------


def test_the_time_of_a_run_is_told_by_its_parts():
    _, trials, _ = stories.with_a_gain()
    known = [trial.model_copy(update={"spent": None}) if trial.number in (1, 2) else trial for trial in trials]
    found = spent_view(known)
    assert found is not None
    times = len(trials) - 2
    assert found.sentence.startswith(f"Sums over {times} of {len(trials)} trials; of the others it is not known. As ")
    told = {part: (row.took, row.share) for part, row in zip(PARTS, found.rows, strict=True)}
    total_s = stories.SPENT.total_s
    for part, (took, share) in told.items():
        spent_s = getattr(stories.SPENT, part)
        assert took == words.lasted(times * spent_s)
        assert share == words.percent(spent_s / total_s)
    assert found.total == words.lasted(times * total_s)
    every = spent_view(trials)
    assert every is not None and every.sentence.startswith(f"Sums over {len(trials)} trials. ")


def test_every_part_of_a_trial_has_a_name():
    assert list(PARTS) == list(Spent.model_fields)
    assert len(set(PARTS.values())) == len(PARTS)


def test_where_no_trial_knows_its_parts_nothing_is_told():
    _, trials, _ = stories.lenet5_on_a_cpu()
    assert trials and spent_view(trials) is None
    assert spent_view([]) is None
    _, (first, *_), _ = stories.of_one_trial()
    assert spent_view([first.model_copy(update={"spent": Spent()})]) is None


def test_what_the_budget_had_no_time_for_is_told_with_its_time():
    run, trials, _ = stories.with_a_gain(budget_trials=None, budget_s=300.0)
    found = untried_view(run, trials, None)
    assert found is not None
    ours = {
        "weights": "bf16_copies",
        "activations": "bf16",
        "masks": "dropped",
        "fusion": "kitsune",
        "update": "kitsune",
    }
    fused = words_of_knobs({**stories.BEST, **ours, "streams": 4})
    assert fused in {row.knobs for row in found.rows}
    assert found.sentence.startswith("The budget had no time to measure these. They take about ")
    assert all(row.about != "not known" for row in found.rows)


def test_a_run_that_counts_trials_or_was_ended_had_time_for_all():
    run, trials, _ = stories.with_a_gain()
    assert untried_view(run, trials, None) is None
    run, trials, _ = stories.cancelled()
    assert untried_view(run.evolve(budget_trials=None, budget_s=300.0), trials, None) is None
    run, trials, plan = stories.with_a_gain(budget_trials=None, budget_s=300.0)
    ended = plan.model_copy(update={"evidence": plan.evidence.model_copy(update={"interrupted": True})})
    assert untried_view(run, trials, ended) is None
