"""Whole views of runs: the fate of each choice, where a run comes from, and what to do with it."""

import ast
import shlex
from collections.abc import Callable

import pytest
import typer

from kitsune.cli import main
from kitsune.knobs import KNOBS
from kitsune.plan import Plan
from server.pages.render_charts import charts_of
from server.pages.views import choices_view, facts_view, snippet_view
from server.pages.views.choices_view import ChoiceOutcome
from tests.store.samples import a_run
from tests.test_docs import misuse
from tests.unit.server.pages import stories
from tests.unit.server.pages.stories import Story
from tests.unit.server.pages.views.viewed import SERVER, viewed

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


@pytest.mark.parametrize("story", STORIES.values(), ids=STORIES)
def test_every_story_can_be_told_and_drawn(story: Callable[[], Story]):
    view = viewed(story())
    assert view.headline.sentence and not view.headline.sentence.endswith(".")
    drawn = charts_of(view)
    assert bool(drawn["search"]) == bool(view.tried)
    assert bool(drawn["waterfall"]) == bool(view.bars)
    assert "cannot be drawn" not in "".join(drawn.values())


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


def test_while_a_run_goes_on_nothing_is_rejected():
    outcomes = {row.outcome for row in viewed(stories.running()).choices}
    assert ChoiceOutcome.TRIED in outcomes and ChoiceOutcome.REJECTED not in outcomes
