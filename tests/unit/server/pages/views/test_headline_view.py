"""The headline of a run, and its progress while it goes on."""

from datetime import timedelta

import pytest

from server.pages.views import headline_view
from server.pages.views.headline_view import Mood
from server.pages.views.run_view import run_view
from tests.store.samples import a_run
from tests.unit.server.pages import stories
from tests.unit.server.pages.views.viewed import viewed
from tuner.store.queries import runs

# The headline ---------------------------------------------------------------------------------------------------------


def test_a_gain_is_told_in_one_sentence():
    view = viewed(stories.with_a_gain())
    assert view.headline.mood is Mood.GOOD
    sentence = view.headline.sentence.replace("\N{NO-BREAK SPACE}", " ")
    assert sentence.startswith(
        "Training step of resnet18 (batch 128) on NVIDIA H200: 2.503 ms with the plan against 3.3"
    )
    assert "with the best mode of torch.compile (precision=bf16, compile=reduce-overhead, update=fused)" in sentence
    assert sentence.endswith("1.32 times as fast (1.32 to 1.32), 12 % less memory")
    again, over_eager, first_step, numbers = (text.replace("\N{NO-BREAK SPACE}", " ") for text in view.headline.details)
    assert again == (
        "Measured in 5 fresh processes. Measured in one more on this machine, the gain lies within 1.30 to 1.34 times "
        "95 % of the time."
    )
    assert "4.14 times as fast" in over_eager, "by the two processes that timed the step as given"
    assert "steps earn that back" in first_step
    assert "gradients by 3.4e-03 (2.0e-02)" in numbers


def test_no_gain_is_told_as_plainly():
    stock = viewed(stories.without_a_gain()).headline
    assert stock.mood is Mood.PLAIN
    assert "no gain over plain torch. The plan is its best stock configuration" in stock.sentence
    assert "was measured afresh: 1.00 times as fast" in stock.details[0]
    assert stock.details[0].endswith("which is not faster beyond doubt.")
    nothing = viewed(stories.measured_on_a_cpu()).headline
    assert "no gain. Keep the step as it is: 194.0" in nothing.sentence
    assert "memory" not in nothing.sentence  # not counted on a CPU


def test_a_machine_that_is_too_noisy_is_told_with_the_cause_and_the_way_out():
    view = viewed(stories.too_noisy())
    told = view.headline
    assert told.mood is Mood.PLAIN
    assert told.sentence.endswith(
        "too noisy to tell: the best stock configuration took 1.5 times as long in one process as in another, while "
        "other processes kept 12.0 of 16 cores busy; end what else runs here, or tune when this machine is idle"
    )
    assert "no gain" not in told.sentence.lower()
    kept = told.details[0].replace("\N{NO-BREAK SPACE}", " ")
    assert kept.startswith("Until that is known the plan is the best stock configuration (precision=bf16, ")
    assert {row.verdict for row in view.trials if row.source == "confirm"} <= {"ambiguous", "same", "too noisy"}
    assert view.trials[-1].verdict == "too noisy"


def test_what_alone_fits_into_the_memory_is_told_with_what_does_not():
    _, _, plan = stories.with_a_gain()
    changes = {"verdict": "fits", "memory_limit_bytes": 2**32, "baseline": "eager"}
    found = plan.evidence.model_copy(update={**changes, "note": "no stock configuration that was tried fits"})
    told = headline_view.of_evidence("Training step", plan, found)
    assert told.mood is Mood.GOOD
    sentence = told.sentence.replace("\N{NO-BREAK SPACE}", " ")
    assert sentence.startswith("Training step: fits into 4 GiB: ")
    assert "no stock configuration that was tried fits, and " in sentence
    assert not any("the gain lies" in text for text in told.details)


def test_an_open_question_is_no_answer():
    run, trials, plan = stories.without_a_gain()
    found = plan.evidence.model_copy(update={"verdict": "ambiguous", "note": "one process alone cannot tell"})
    told = viewed((run, trials, plan.model_copy(update={"evidence": found, "knobs": {}}))).headline
    assert told.sentence.endswith("undecided: one process alone cannot tell")
    assert told.details[0].startswith("Until that is known the plan changes nothing: ")


@pytest.mark.parametrize(
    ("story", "mood", "words"),
    [
        (stories.failed, Mood.BAD, "the run failed, the workload fails as given: CUDA error"),
        (stories.queued, Mood.WAITING, "waiting for a worker for 5"),
        (stories.running, Mood.WAITING, "being tuned, 4"),
        (stories.cancelled, Mood.PLAIN, "cancelled after 4"),
        (stories.of_one_trial, Mood.PLAIN, "the run ended without a plan"),
    ],
)
def test_a_run_without_a_plan_says_where_it_stands(story, mood, words):
    found = viewed(story()).headline
    assert found.mood is mood
    assert words in found.sentence


def test_a_run_whose_worker_fell_silent_says_so():
    run, trials, plan = stories.running()
    lost = run.evolve(lease_until=stories.at(10))
    view = viewed((lost, trials, plan))
    assert (view.standing, view.headline.mood) == ("lost", Mood.BAD)
    assert view.progress is not None and "another worker" in view.progress.doing
    assert "does not respond" in view.headline.sentence


def test_what_is_best_so_far_is_told_while_a_run_goes_on():
    (best,) = viewed(stories.running()).headline.details
    assert best.startswith("Best so far: precision=bf16, compile=reduce-overhead, update=fused, 3.1")
    assert headline_view.so_far(stories.running(1)[1]) == ()


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"workload": "zoo:gpt2_small?batch=8&seq=512"}, "gpt2_small (batch 8, seq 512)"),
        ({"workload": "zoo:googlenet"}, "googlenet"),
        ({"workload": "zoo:googlenet", "name": "my net"}, "my net"),
        ({"workload": "train.py:make_workload"}, "train.py:make_workload"),
        ({"workload": "live"}, "a live model"),
        ({"workload": "archive", "archive": "c" * 64}, "a submitted model (cccccccccccc)"),
    ],
)
def test_a_workload_has_a_name_for_people(changes, name):
    assert runs.label_of(a_run(**changes)) == name


def test_the_age_of_a_run_is_never_negative():
    run, trials, plan = stories.queued()
    early = run_view(run, trials, plan, run.created_at - timedelta(hours=1), None)
    assert "for 0.0" in early.headline.sentence


def test_no_name_turns_the_text_around_it():
    view = viewed(stories.of_hostile_names())
    assert "\u202e" not in view.title + view.headline.sentence + view.again


# Progress -------------------------------------------------------------------------------------------------------------


def test_progress_counts_what_is_spent():
    found = viewed(stories.running()).progress
    assert found is not None
    assert found.doing == "Measuring trial 5 of 9."
    assert found.share == pytest.approx(4 / 9)
    assert found.seen == 4
    assert viewed(stories.with_a_gain()).progress is None


def test_progress_knows_what_comes_after_the_search():
    run, trials, _ = stories.running()
    more = stories.searched(run)
    assert "Looking at the step" in viewed((run, [], None)).progress.doing
    assert "in fresh processes" in viewed((run, more, None)).progress.doing
    planned = run.evolve(plan_id="d" * 64)
    assert "each of its choices" in viewed((planned, more, None)).progress.doing
    of_time = run.evolve(budget_trials=None, budget_s=600.0)
    assert viewed((of_time, trials, None), seconds=302).progress.share == pytest.approx(0.5)
