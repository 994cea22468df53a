"""server/charts/search.py: every trial is drawn or mentioned, the best so far only grows, failures have marks."""

import math
import random
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kitsune.errors import ChartError
from server.charts.search import TrialPoint, best_so_far, history_of, search_history
from tests.unit.server.charts.drawings import LABELS, check_chart, check_told, description, found, texts, titles, widest

NBSP, TIMES = "\N{NO-BREAK SPACE}", "\N{MULTIPLICATION SIGN}"
SPEEDUPS = st.none() | st.floats(0.01, 1e4)
TRIALS = st.builds(
    TrialPoint, st.integers(0, 5000), SPEEDUPS, SPEEDUPS, SPEEDUPS, st.sampled_from("abcdefgh"), LABELS, LABELS
)
PLAIN = [
    TrialPoint(0, 1.0, 0.99, 1.01, "baseline", "as given"),
    TrialPoint(1, 1.5, 1.4, 1.6, "stock", "compile"),
    TrialPoint(2, None, None, None, "seed", "capture", "out of memory"),
    TrialPoint(3, 1.2, None, None, "tpe", "channels last"),
    TrialPoint(4, 2.0, 1.9, 2.1, "tpe", "amp"),
]


@given(st.lists(TRIALS, max_size=20))
def test_any_history_is_whole(trials):
    chart = search_history(trials)
    check_chart(chart)
    for trial in trials:
        check_told(chart, trial.label)


@given(st.lists(TRIALS, max_size=30, unique_by=lambda trial: trial.number))
def test_the_best_so_far_is_the_largest_of_all_before(trials):
    history = history_of(trials)
    best = {trial.number: trial.speedup for trial in best_so_far(history)}
    largest = list(accumulate((speedup for _, speedup in history.measured), max))
    so_far = None
    for (trial, _), most in zip(history.measured, largest, strict=True):
        so_far = best.get(trial.number, so_far)
        assert so_far == most


def test_marks_tell_who_proposed_what_came_of_it():
    root = widest(search_history(PLAIN))
    assert f"trial 1 (stock), compile: 1.50{TIMES}; 95 % interval 1.40{TIMES} to 1.60{TIMES}" in titles(root)
    assert "trial 2 (seed), capture: out of memory" in titles(root)
    assert description(root).startswith(f"5{NBSP}trials, 1 of them failed. The best is trial 4 with 2.00{TIMES}.")
    assert {"baseline", "stock", "tpe", "failed", "best so far", "95 % interval"} <= set(texts(root))
    assert "seed" not in texts(root)  # nothing of it was measured


def test_only_what_has_an_interval_has_a_whisker():
    assert len(found(widest(search_history(PLAIN)), "path", "whisker")) == 3 + 1  # and the legend's
    assert found(widest(search_history([PLAIN[3]])), "path", "whisker") == []


def test_eight_sources_look_different():
    looks = history_of([TrialPoint(n, 1.0, None, None, f"source {n}", "") for n in range(8)]).looks
    assert len(set(looks.values())) == 8


def test_failures_lie_below_the_plot():
    root = widest(search_history(PLAIN))
    crosses = [float(each.get("y1")) for each in found(root, "line", "failed")]
    level = float(found(root, "line", "reference")[0].get("y1"))
    assert crosses and min(crosses) > level


@pytest.mark.parametrize("trials", [[], PLAIN[:1], PLAIN[2:3], [PLAIN[1]] * 3])
def test_few_trials_are_drawn(trials):
    check_chart(search_history(trials))


def test_many_trials_are_thinned_and_that_is_said():
    rnd = random.Random(1)
    many = [
        TrialPoint(n, rnd.gauss(2, 0.3), None, None, "tpe", "x")
        if n % 9
        else TrialPoint(n, None, None, None, "tpe", "x")
        for n in range(5000)
    ]
    chart = search_history(many)
    check_chart(chart)
    assert len(chart) < 500_000
    assert "of 4,444 measured trials: each of the others lies within" in description(widest(chart))
    shown = " ".join(texts(widest(chart)))
    assert "of 4,444 measured trials" in shown and "of 556 failed trials" in shown


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_has_no_place_is_refused(value):
    with pytest.raises(ChartError, match="trial 3"):
        search_history([TrialPoint(3, 1.0, value, 1.1, "tpe", "x")])
