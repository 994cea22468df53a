"""Which configuration is next, as far as time allows."""

import math
from collections.abc import Sequence

import pytest

from tests.unit.tuner.search.test_space import EVERYTHING
from tests.unit.tuner.simulation import trial
from tuner.planning.next_trial import next_trial
from tuner.records import Failure, FailureKind, Phase, Source, Spent, Trial
from tuner.search.proposal import Proposal
from tuner.search.space import Configuration


def lasting(found: Trial, took_s: float) -> Trial:
    return found.model_copy(update={"spent": Spent(build_s=took_s)})


BASELINE = lasting(trial(0, {}, Source.BASELINE), 10)
COMPILED = lasting(trial(1, {"compile": "default"}, speedup=2.0), 60)


NOT_COMPILED = lasting(trial(1, {"capture": "step"}, speedup=2.0), 15)


def following(
    *trials: Trial,
    left_s: float = math.inf,
    trials_within: float = 6.0,
    at_work: Sequence[tuple[Configuration, float]] = (),
) -> Proposal | None:
    more = {"at_work": at_work, "trials_within": trials_within}
    return next_trial(EVERYTHING, trials, 0, left_s=left_s, compile_s=30, known=(), **more)


@pytest.mark.parametrize("left_s", [-5, 0, 300])
def test_the_step_as_given_is_measured_whatever_time_is_left(left_s):
    found = following(left_s=left_s)
    assert found is not None
    assert found.source is Source.BASELINE


def test_while_nothing_is_better_what_there_is_time_for_is_tried():
    guess, quick = following(BASELINE, left_s=41), following(BASELINE, left_s=39)
    assert guess is not None
    assert "compile" in guess.knobs
    assert quick is not None
    assert "compile" not in quick.knobs
    assert following(BASELINE, left_s=9) is None


def test_once_something_compiled_is_best_it_is_the_next_one_or_none():
    after = following(BASELINE, COMPILED, left_s=61)
    assert after is not None
    assert "compile" in after.knobs
    assert following(BASELINE, COMPILED, left_s=15) is None, "what is not compiled would fit, and does not win"


def test_where_what_is_best_is_not_compiled_what_there_is_time_for_is_tried():
    guess, quick = (following(BASELINE, NOT_COMPILED, left_s=left_s) for left_s in (41, 39))
    assert guess is not None
    assert "compile" in guess.knobs
    assert quick is not None
    assert "compile" not in quick.knobs
    assert following(BASELINE, NOT_COMPILED, left_s=9) is None


def test_what_compiles_for_longer_than_was_guessed_tells_what_the_next_one_takes():
    first = following(BASELINE, NOT_COMPILED)
    assert first is not None
    for since_s, compiles in ((5, True), (32, True), (51, False)):
        found = following(BASELINE, NOT_COMPILED, left_s=60, at_work=[(first.knobs, since_s)])
        assert found is not None
        assert found.knobs != first.knobs
        assert ("compile" in found.knobs) == compiles
    plain = following(BASELINE, NOT_COMPILED, left_s=60, at_work=[({"capture": "segments"}, 51)])
    assert plain is not None
    assert "compile" in plain.knobs
    both = [({**first.knobs, "precision": "fp16"}, 1), (first.knobs, 51)]
    for at_work in (both, both[::-1]):
        found = following(BASELINE, NOT_COMPILED, left_s=60, at_work=at_work)
        assert found is not None
        assert "compile" not in found.knobs, "the longest tells"
    slow = following(BASELINE, NOT_COMPILED, left_s=60, at_work=[({"compile": "max-autotune"}, 51)])
    assert slow is not None
    assert "compile" in slow.knobs, "what is slow takes several times as long as the others"
    guessed = following(BASELINE, NOT_COMPILED, left_s=39, at_work=[(first.knobs, 1)])
    assert guessed is not None
    assert "compile" not in guessed.knobs, "the guess counts until one takes longer"
    compiled = following(BASELINE, COMPILED, left_s=70, at_work=[(first.knobs, 500)])
    assert compiled is not None
    assert "compile" in compiled.knobs, "what one took that has ended is known"


def test_a_compilation_that_ran_out_of_time_tells_what_the_next_one_takes():
    first = following(BASELINE, NOT_COMPILED)
    assert first is not None
    for kind, compiles in ((FailureKind.TIMEOUT, False), (FailureKind.RAISED, True)):
        failure = Failure(phase=Phase.NUMERICS, kind=kind, reason="it took longer than its limit")
        failed = lasting(trial(2, dict(first.knobs), failure=failure), 51)
        found = following(BASELINE, NOT_COMPILED, failed, left_s=60)
        assert found is not None
        assert ("compile" in found.knobs) == compiles


def test_a_short_run_begins_with_the_best_guess_on_one_stream():
    usual, short = following(BASELINE), following(BASELINE, trials_within=2.4)
    assert usual is not None
    assert short is not None
    assert usual.knobs == {**short.knobs, "streams": 4}
    later = following(BASELINE, COMPILED, left_s=1000, trials_within=2.4)
    assert later is not None
    assert later.knobs["streams"] == 4, "there was time for more than was thought"
    late = following(BASELINE, NOT_COMPILED, left_s=39, trials_within=2.4)
    assert late is not None
    assert late.knobs.get("streams") == 4, "something is better than the step as given"


@pytest.mark.parametrize(("trials_within", "compiles"), [(6.0, True), (4.0, False), (2.4, False)])
def test_where_time_is_tight_a_third_is_begun_that_does_not_compile(trials_within, compiles):
    at_work = []
    for _ in range(3):
        found = following(BASELINE, trials_within=trials_within, at_work=at_work)
        assert found is not None
        at_work.append((found.knobs, 1.0))
    assert ["compile" in knobs for knobs, _ in at_work] == [True, True, compiles]
