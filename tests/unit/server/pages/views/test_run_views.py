import ast
import shlex
from collections.abc import Callable
from datetime import timedelta

import pytest
import typer

from kitsune.cli import main
from kitsune.knobs import KNOBS
from kitsune.plan import Plan
from server.charts.drawing import words
from server.pages.render_charts import charts_of
from server.pages.views import (
    choices_view,
    contributions,
    facts_view,
    figures_view,
    headline_view,
    snippet_view,
    trials_view,
)
from server.pages.views.budget_view import spent_view, untried_view
from server.pages.views.choices_view import ChoiceOutcome
from server.pages.views.headline_view import Mood
from server.pages.views.run_view import RunView, run_view
from tests.store.samples import a_run
from tests.test_docs import misuse
from tests.unit.server.pages import stories
from tests.unit.server.pages.stories import Story
from tuner.planning.ablation import UNREACHED
from tuner.planning.time_spent import PARTS
from tuner.records import Failure, FailureKind, Phase, RunStatus, Source, Spent
from tuner.statistics.plan_evidence import EAGER
from tuner.statistics.plan_evidence import words as words_of_knobs
from tuner.store.queries import runs

SERVER = "http://localhost:8537"
STORIES = {
    story.__name__: story
    for story in (
        stories.measured_on_a_cpu,
        stories.with_a_gain,
        stories.without_a_gain,
        stories.measured_again,
        stories.too_noisy,
        stories.failed,
        stories.queued,
        stories.running,
        stories.cancelled,
        stories.of_one_trial,
        stories.of_many_samples,
        stories.of_hostile_names,
    )
}


def viewed(story: Story, server: str | None = SERVER, seconds: float = 300) -> RunView:
    return run_view(*story, stories.at(seconds), server)


@pytest.mark.parametrize("story", STORIES.values(), ids=STORIES)
def test_every_story_can_be_told_and_drawn(story: Callable[[], Story]):
    view = viewed(story())
    assert view.headline.sentence and not view.headline.sentence.endswith(".")
    drawn = charts_of(view)
    assert bool(drawn["search"]) == bool(view.tried)
    assert bool(drawn["waterfall"]) == bool(view.bars)
    assert "cannot be drawn" not in "".join(drawn.values())


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


# Choices --------------------------------------------------------------------------------------------------------------


def fate_of(story: Story, name: str) -> tuple[ChoiceOutcome, str]:
    run, trials, plan = story
    (row,) = [
        row
        for row in choices_view.choice_rows(run, trials, plan)
        if name in [f"{row.knob}={choice}" for choice in row.choices]
    ]
    return row.outcome, row.reason


@pytest.mark.parametrize(
    ("name", "outcome", "reason"),
    [
        ("precision=bf16", ChoiceOutcome.CHOSEN, "best measured configuration"),
        (
            "precision=fp16",
            ChoiceOutcome.FAILED,
            "trial 7 gave wrong numbers (numerics): gradients: relative error 0.4",
        ),
        ("compile=max-autotune-no-cudagraphs", ChoiceOutcome.FAILED, "trial 9 ran out of memory (warmup)"),
        ("compile=reduce-overhead", ChoiceOutcome.REJECTED, "its trial, number 3, came to 3.1"),
        ("streams=8", ChoiceOutcome.DECLINED, "5 streams are all"),
        ("attention=flash", ChoiceOutcome.INAPPLICABLE, "does not call scaled_dot_product_attention"),
        ("precision=tf32", ChoiceOutcome.UNTRIED, "the budget ended"),
    ],
)
def test_every_choice_has_its_fate_and_its_reason(name, outcome, reason):
    found = fate_of(stories.with_a_gain(), name)
    assert found[0] is outcome
    assert reason in found[1]


def test_a_choice_that_clashes_with_the_plan_says_with_what():
    run, trials, plan = stories.with_a_gain()
    assert plan is not None
    other = plan.model_copy(update={"knobs": {"compile": "reduce-overhead"}})
    outcome, reason = fate_of((run, trials[:1], other), "capture=segments")
    assert outcome is ChoiceOutcome.UNTRIED
    assert reason.startswith("cannot stand beside compile=reduce-overhead: this compile mode puts CUDA graphs")


def test_no_choice_that_a_search_tries_is_missing():
    run, trials, plan = stories.with_a_gain()
    told = [(row.knob, choice) for row in choices_view.choice_rows(run, trials, plan) for choice in row.choices]
    searched = [
        (knob.name, str(choice))
        for knob in KNOBS.values()
        for choice in knob.choices
        if choice != knob.default and knob.is_searched(choice)
    ]
    assert told == searched
    outcomes = viewed((run, trials, plan)).outcomes
    assert "4 do not apply" in outcomes and "1 declined" in outcomes
    assert sum(int(told.split()[0]) for told in outcomes) == len(searched)


def test_a_choice_whose_trial_says_nothing_was_not_measured():
    run, trials, plan = stories.with_a_gain()
    silent = [
        trial.model_copy(update={"failure": None}) if trial.knobs.get("precision") == "fp16" else trial
        for trial in trials
    ]
    assert fate_of((run, silent, plan), "precision=fp16") == (ChoiceOutcome.TRIED, "not measured")


def test_choices_with_one_reason_share_a_line():
    run, trials, plan = stories.with_a_gain()
    rows = [row for row in choices_view.choice_rows(run, trials, plan) if row.knob == "attention"]
    assert [row.choices for row in rows] == [("flash", "cudnn", "efficient", "math")]


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


# Where it comes from, and what to do with it --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"workload": "zoo:mlp?batch=64&size=tiny", "budget_trials": 5},
        {"workload": "train.py:make_workload", "budget_s": 300.0, "seed": -3},
        {"workload": "a b/$(rm).py:f", "budget_s": 1.5e6},
        {"workload": "live", "budget_trials": 5, "budget_s": 60.0},
        {"workload": "archive", "archive": "c" * 64, "budget_trials": 5, "device": "cuda:3", "seed": 11},
        {"workload": "archive", "archive": "c" * 64, "budget_trials": 5, "device": ""},
    ],
)
def test_the_command_that_does_it_again_is_one(changes):
    run = a_run(**changes)
    line = shlex.split(facts_view.again(run))
    assert line[0] == "kitsune"
    assert misuse(typer.main.get_command(main.full_app()), line[1:]) is None
    options = dict(zip(line[3::2], line[4::2], strict=True))
    assert options["--seed"] == str(run.seed)
    assert options.get("--device", "") == run.device.partition(":")[0] or run.workload != "archive"
    if run.workload not in ("live", "archive"):
        assert run.workload in line


def test_the_origin_names_machine_and_work():
    facts = dict(viewed(stories.with_a_gain()).facts)
    for name in ("GPU", "driver", "CUDA", "torch", "triton", "Python", "seed", "budget", "worker", "took", "run"):
        assert facts[name]
    assert facts["worker"].endswith("1\N{NO-BREAK SPACE}attempt")


def a_plan(knobs: dict) -> Plan:
    return Plan.by_hand(**knobs)


@pytest.mark.parametrize(
    "workload", ["zoo:mlp", "train.py:make_workload", "live", "archive", stories.HOSTILE, 'a"\n.py:f']
)
def test_every_snippet_is_a_program(workload):
    run = a_run(workload=workload)
    knobs = {**stories.BEST_STREAMS, "attention": "flash", "fusion": "kitsune", "pool_bytes": 2**30}
    for snippet in snippet_view.snippets(run, a_plan(knobs), SERVER):
        if snippet.language == "python":
            tree = ast.parse(snippet.code)
            texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
            assert workload in texts or workload in ("live", "archive")
        for line in snippet.code.splitlines():
            assert len(line) <= 120


@pytest.mark.parametrize("server", [SERVER, None])
def test_the_commands_of_a_snippet_exist(server):
    command = typer.main.get_command(main.full_app())
    shell = snippet_view.snippets(a_run(workload="zoo:mlp"), a_plan({}), server)[-1]
    for line in shell.code.splitlines():
        words = shlex.split(line)
        assert words[0] == "kitsune"
        assert misuse(command, words[1:]) is None


def test_what_options_do_not_reach_is_said():
    knobs = {"attention": "flash", "compile": "max-autotune-no-cudagraphs", "precision": "bf16"}
    by_hand = snippet_view.snippets(a_run(workload="live"), a_plan(knobs), None)[2]
    assert "attention=flash" in by_hand.note
    assert "compile=max-autotune-no-cudagraphs, which becomes the default mode" in by_hand.note
    plain = snippet_view.snippets(a_run(workload="live"), a_plan({"precision": "bf16"}), None)[2]
    assert "do not reach" not in plain.note


def test_the_plan_in_a_snippet_is_the_plan():
    plan = a_plan({**stories.BEST_STREAMS, "pool_bytes": 2**30})
    code = snippet_view.snippets(a_run(workload="live"), plan, None)[0].code
    (call,) = [
        node
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "by_hand"
    ]
    assert {word.arg: ast.literal_eval(word.value) for word in call.keywords} == dict(plan.knobs)


def test_views_are_plain_text_that_templates_must_escape():
    """Views return plain text: hostile text is unchanged, for the template to escape."""
    view = viewed(stories.of_hostile_names())
    assert "<script>alert(1)</script>\"'&" in view.headline.sentence
    assert stories.HOSTILE in dict(view.facts)["driver"]


def test_no_name_turns_the_text_around_it():
    view = viewed(stories.of_hostile_names())
    assert "\u202e" not in view.title + view.headline.sentence + view.again


def test_while_a_run_goes_on_nothing_is_rejected():
    outcomes = {row.outcome for row in viewed(stories.running()).choices}
    assert ChoiceOutcome.TRIED in outcomes and ChoiceOutcome.REJECTED not in outcomes


def test_the_age_of_a_run_is_never_negative():
    run, trials, plan = stories.queued()
    early = run_view(run, trials, plan, run.created_at - timedelta(hours=1), None)
    assert "for 0.0" in early.headline.sentence


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


def test_what_the_budget_had_no_time_for_is_told_with_its_time():
    run, trials, _ = stories.with_a_gain(budget_trials=None, budget_s=300.0)
    found = untried_view(run, trials, None)
    assert found is not None
    fused = words_of_knobs({**stories.BEST, "fusion": "kitsune", "update": "kitsune", "streams": 4})
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


def test_only_times_of_the_step_as_given_are_compared_between_processes():
    _, trials, _ = stories.with_a_gain()
    facts = dict(viewed(stories.with_a_gain()).noise.facts)
    with_eager = [each for each in trials if each.measurement and each.measurement.arms[0].name == EAGER]
    assert len(with_eager) < sum(trial.measurement is not None for trial in trials)
    assert facts["between processes"].endswith(f"in the slowest of {len(with_eager)} as in the fastest")
