"""What there was no time for."""

from datetime import timedelta

from tests.unit.tuner.machine import NOON, a_run, failure
from tests.unit.tuner.search.test_space import EVERYTHING
from tests.unit.tuner.simulation import trial
from tuner.planning.untried import LONGER, untried
from tuner.records import FailureKind, Source, Trial
from tuner.search.presets import OPENING, resolved
from tuner.terminal.views import untried_screen

HALF = {"layout": "channels_last", "precision": "bf16"}
OURS = {"weights": "bf16_copies", "activations": "bf16", "masks": "dropped", "fusion": "products", "update": "kitsune"}
GRAPH = {**HALF, **OURS, "compile": "default", "capture": "step", "streams": 4}
OVERHEAD = {**HALF, "compile": "reduce-overhead", "update": "fused"}


def lasting(found: Trial, took_s: float) -> Trial:
    return found.model_copy(update={"started_at": NOON, "finished_at": NOON + timedelta(seconds=took_s)})


BASELINE = lasting(trial(0, {}, Source.BASELINE), 10)
SLOW = lasting(trial(1, OVERHEAD, Source.STOCK, 2.0), 100)
LATE = lasting(trial(2, GRAPH, failure=failure("too long", FailureKind.TIMEOUT)), 200)


def test_what_was_not_begun_and_what_was_cut_off_is_told_with_its_time():
    found = {each.name: each for each in untried(a_run(budget_s=300.0), [BASELINE, SLOW, LATE])}
    assert "reduce_overhead" not in found, "it was measured"
    cut_off = found["best guess"]
    assert (cut_off.knobs, cut_off.expected_s) == (GRAPH, LONGER * 200)
    fused = found["best guess, our kernels"]
    assert fused.knobs == {**GRAPH, "fusion": "kitsune"}
    assert fused.expected_s == 100, "as long as another that compiles"


def test_what_alone_has_a_choice_and_was_cut_off_is_still_told():
    presets = resolved(OPENING, EVERYTHING)
    worked = [lasting(trial(at + 1, each.knobs, Source.SEED, 2.0), 60) for at, each in enumerate(presets[:-1])]
    last = presets[-1]
    assert last.knobs["compile"] == "coordinate-descent"
    late = lasting(trial(9, last.knobs, failure=failure("too long", FailureKind.TIMEOUT)), 200)
    found = untried(a_run(budget_s=300.0), [BASELINE, *worked, late])
    assert [(each.name, each.expected_s) for each in found] == [(last.name, LONGER * 200)]


def test_what_failed_or_cannot_work_here_is_no_matter_of_time():
    failed = trial(2, GRAPH, failure=failure("declined", FailureKind.DECLINED))
    assert "best guess" not in {each.name for each in untried(a_run(), [BASELINE, failed])}
    run = a_run(inapplicable={"streams=4": "no GPU"})
    assert not any("streams" in each.knobs for each in untried(run, [BASELINE]))
    times = {"compile" in each.knobs: each.expected_s for each in untried(run, [BASELINE])}
    assert times[True] is None, "what compiling takes is not known yet"
    assert times.get(False, 10) == 10


def test_of_no_trial_that_worked_no_time_is_known():
    failed = trial(0, {}, Source.BASELINE, failure=failure("broke", FailureKind.CRASHED))
    found = untried(a_run(inapplicable={"compile=default": "no compiler"}), [failed])
    assert found
    assert {each.expected_s for each in found} == {None}


def test_a_budget_of_trials_and_a_plan_that_was_measured_again_leave_nothing_untried():
    assert untried(a_run(budget_trials=1), [BASELINE]) == []
    assert untried(a_run(budget_s=300.0), [trial(0, GRAPH, Source.CONFIRM, 2.0)]) == []
    assert untried(a_run(budget_s=300.0), []) == []


def test_a_reader_is_told_how_much_more_time_it_takes():
    assert untried_screen([]) == []
    shown = untried_screen([("compile=default", 90.0), ("streams=4", None)])
    assert shown[1] == "Not measured for want of time. They take about 1:30, and confirming the best comes on top."
    assert untried_screen([("streams=4", None)])[1] == "Not measured for want of time."
