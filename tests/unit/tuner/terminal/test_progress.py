"""Events in, what a terminal or a log shows of them."""

import io
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from kitsune.knobs import KNOBS
from kitsune.plan import Interval
from tests.store.samples import a_run
from tests.unit.tuner.sample_run import BF16, RUN, STREAMED, TRIALS, a_course, a_failure, a_trial, ablations
from tuner.records import Comparison, Source, Verdict
from tuner.statistics.plan_evidence import words
from tuner.terminal import progress, views
from tuner.terminal.progress import Lines, Live, Quiet, Standing, telling
from tuner.tuning.events import Ablating, Explaining, Started, Tried


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@given(
    st.lists(st.booleans(), max_size=8),
    st.none() | st.integers(min_value=1, max_value=8),
    st.none() | st.floats(min_value=1, max_value=1e4),
    st.lists(st.floats(min_value=0, max_value=100), min_size=25, max_size=25),
)
def test_a_standing_is_sane_whatever_happens(outcomes, budget_trials, budget_s, waits):
    run = a_run(budget_trials=budget_trials, budget_s=budget_s)
    tried = [a_trial(i, BF16) if good else a_failure(i) for i, good in enumerate(outcomes)]
    clock = Clock()
    standing = Standing(clock)
    share = 0.0
    for event, wait in zip(a_course(run, tried), waits, strict=False):
        clock.now += wait
        standing.update(event)
        assert share <= standing.share <= 1.0
        share = standing.share
        assert standing.left_s() is None or standing.left_s() >= 0
    assert standing.trials == tried
    assert bool(standing.best) == any(outcomes)


def test_the_time_left_is_that_of_the_trials_to_come_and_counts_down():
    clock = Clock()
    standing = Standing(clock)
    events = a_course(a_run(budget_trials=4), [a_trial(0, BF16)])
    for event in events[:4]:
        standing.update(event)
    assert standing.left_s() == (3 + progress.CONFIRMATION) * 10  # a trial of this test takes 10 s
    clock.now += 7
    assert standing.left_s() == (3 + progress.CONFIRMATION) * 10 - 7
    standing.update(events[4])
    assert standing.left_s() == progress.CONFIRMATION * 10
    standing.update(Ablating(("precision",)))
    assert standing.left_s() is None, "how many processes are to come depends on what fails"


def test_a_time_budget_is_the_longest_that_is_left():
    standing = Standing(Clock())
    standing.update(Started(a_run(budget_s=30.0)))
    assert standing.left_s() == 30.0
    standing.update(Tried(a_trial(0, BF16)))
    assert standing.left_s() == 30.0


def test_plain_lines_tell_each_trial_once():
    out = io.StringIO()
    tell = Lines(Console(file=out, width=40, markup=False))
    looks = [Explaining({"precision": "bf16"}), Ablating(("precision", "streams")), Tried(ablations(3)[0])]
    for event in [*a_course(RUN, list(TRIALS)), *looks]:
        tell(event)
    assert out.getvalue().splitlines() == [
        "run the-run: zoo:mlp on cpu",
        "as given: about 3.000 ms a step, 1,234,567 parameters; 1 choices do not apply here",
        "a note",
        "[1 of 2] eager: 3.000 ms, 1.00x (0.99-1.01), noise floor; tried in 10 s",
        "[2 of 2] compile=default: failed: out of memory, warmup: no luck; tried in 10 s",
        "measuring the best afresh: precision=bf16",
        "[confirm] precision=bf16: 2.000 ms, 1.50x (1.49-1.51), faster; tried in 10 s",
        "recording where the time of a step goes: precision=bf16",
        "measuring what each choice gives: the plan without precision and without streams",
        f"[ablation] {words(STREAMED.knobs)}: 4.000 ms, 2.50x (2.49-2.51), faster; tried in 10 s",
    ]


def test_what_is_confirmed_alone_has_no_gain_to_tell():
    alone = Comparison(speedup=Interval(median=1, low=1, high=1), p_value=1.0, verdict=Verdict.TOO_NOISY, blocks=15)
    trial = a_trial(3, {"compile": "reduce-overhead"}, Source.CONFIRM).model_copy(update={"comparison": alone})
    line = views.tried_line(trial, 4, None)
    assert line == "[confirm] compile=reduce-overhead: 2.000 ms, is the baseline, too noisy; tried in 10 s"


def test_the_live_line_shows_trial_best_and_time_left():
    out = io.StringIO()
    live = Live(Console(file=out, force_terminal=True, width=140, markup=False))
    live.standing.clock = Clock()
    with live.progress:
        for event in a_course(a_run(budget_trials=3), [a_trial(0, BF16), a_trial(1, {"update": "foreach"})])[:5]:
            live(event)
        live.progress.refresh()
    shown = out.getvalue()
    assert "trial 2 of 3: update=foreach" in shown
    assert "best 1.50x (precision=bf16)" in shown
    assert "0:50 left" in shown


@pytest.mark.parametrize(
    ("is_terminal", "term", "quiet", "kind"),
    [
        (True, "xterm", False, Live),
        (True, "dumb", False, Lines),
        (False, "xterm", False, Lines),
        (True, "x", True, Quiet),
    ],
)
def test_the_teller_fits_the_place(is_terminal, term, quiet, kind, monkeypatch):
    console = Console(file=io.StringIO(), force_terminal=is_terminal, _environ={"TERM": term})
    monkeypatch.setattr(progress, "stderr", lambda: console)
    with telling(quiet=quiet) as teller:
        assert type(teller) is kind


@given(
    st.dictionaries(st.sampled_from(list(KNOBS)), st.integers(0, 1), max_size=4), st.booleans(), st.text(max_size=50)
)
def test_every_trial_has_a_row(picked, good, reason):
    knobs = {name: list(KNOBS[name].choices)[index] for name, index in picked.items()}
    trial = a_trial(0, knobs) if good else a_failure(0, reason)
    out = io.StringIO()
    Console(file=out, width=400, markup=False).print(views.trial_table([trial]))
    for name, choice in trial.knobs.items():
        assert f"{name}={choice}" in out.getvalue()
    assert ("faster" in out.getvalue()) or not good


def test_a_day_of_trials_is_counted_in_hours():
    trial = a_trial(0, BF16)
    slow = trial.model_copy(update={"finished_at": trial.started_at + timedelta(hours=2)})
    standing = Standing(Clock())
    for event in (Started(a_run(budget_trials=2)), Tried(slow)):
        standing.update(event)
    assert standing.left_s() == (1 + progress.CONFIRMATION) * 7200
