"""Searches with a memory limit: what was too large is made smaller, and what is known to be too large is not tried."""

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kitsune.knobs import KNOBS, Choice
from tests.unit.tuner.simulation import trial
from tuner.records import Failure, FailureKind, Phase, Source, Trial
from tuner.search.fitting import LADDER, RECOMPUTE, MemoryLimit, fitting, is_known_too_large, stronger
from tuner.search.presets import is_stock
from tuner.search.proposal import opening
from tuner.search.space import Space
from tuner.search.strategy import propose

SPACE = Space.of({}, is_limited=True)
LIMIT = MemoryLimit(100)
#: What each choice of a simulated step needs with its whole batch, in bytes.
PEAKS: Mapping[Choice, int] = {
    "off": 200,
    "keep-75": 170,
    "keep-50": 140,
    "keep-30": 120,
    "blocks-keep-attention": 110,
    "blocks": 90,
}


def outcome(number: int, knobs: Mapping[str, Choice], source: Source, peak_bytes: int) -> Trial:
    if peak_bytes <= LIMIT.limit_bytes:
        return trial(number, knobs, source)
    failure = Failure(kind=FailureKind.TOO_LARGE, phase=Phase.NUMERICS, reason="too large", peak_bytes=peak_bytes)
    return trial(number, knobs, source, failure=failure)


def searched(count: int, limit: MemoryLimit = LIMIT) -> list[Trial]:
    trials: list[Trial] = []
    while len(trials) < count and (found := propose(SPACE, trials, limit=limit)) is not None:
        trials.append(outcome(len(trials), found.knobs, found.source, peak_of(found.knobs)))
    return trials


def peak_of(knobs: Mapping[str, Choice]) -> int:
    """A third of the memory does not shrink with the batch."""
    return round(PEAKS[knobs.get(RECOMPUTE, "off")] * (1 + 2 / int(knobs.get("accumulation", 1))) / 3)


#: Of one sample, which cannot be split.
ONE_ROW = MemoryLimit(100, rows=1)


def test_a_search_finds_what_fits_early() -> None:
    trials = searched(9)
    assert trials[0].knobs == {}
    fit = [each for each in trials if each.failure is None]
    assert any(is_stock(each.knobs) for each in fit)
    assert any("fusion" in each.knobs for each in fit), "and the best guess"


def test_what_is_known_to_be_too_large_is_not_tried_again() -> None:
    trials = searched(40)
    for place, each in enumerate(trials):
        assert not is_known_too_large(each.knobs, trials[:place])


@given(st.sampled_from([choice for choice, _ in LADDER[:-1]]), st.floats(0.01, 1.5), st.booleans())
def test_stronger_choices_are_tried_once_each_and_the_strongest_is_among_them(now, left, is_random) -> None:
    found = stronger(now, left, is_random=is_random)
    assert len(set(found)) == len(found)
    assert "blocks" in found
    assert now not in found
    if is_random:
        assert not any(str(choice).startswith("keep-") for choice in found)
    else:
        assert len(found) == len(LADDER) - 1 - [choice for choice, _ in LADDER].index(now)


def test_the_first_guess_leaves_what_the_limit_leaves() -> None:
    assert stronger("off", 0.95, is_random=False)[0] == "keep-75"
    assert stronger("off", 0.8, is_random=False)[0] == "keep-50"
    assert stronger("off", 0.3, is_random=False)[0] == "blocks"
    assert stronger("off", 0.8, is_random=True)[0] == "blocks-keep-attention"


def test_one_stream_comes_first_where_it_may_do() -> None:
    knobs = {"precision": "bf16", "compile": "default", "capture": "step", "streams": 4}
    first = outcome(1, knobs, Source.SEED, 110)
    (found,) = fitting(SPACE, [first], ONE_ROW)
    assert found.knobs == {name: choice for name, choice in knobs.items() if name != "streams"}
    (found,) = fitting(SPACE, [outcome(1, knobs, Source.SEED, 300)], ONE_ROW)
    assert found.knobs == {**knobs, RECOMPUTE: "blocks"}


def test_the_rival_of_torchs_own_graphs_is_compiled_without_them() -> None:
    knobs = {"precision": "bf16", "compile": "reduce-overhead", "update": "fused"}
    (found,) = fitting(SPACE, [outcome(1, knobs, Source.STOCK, 130)], ONE_ROW)
    assert found.knobs == {**knobs, "compile": "default", RECOMPUTE: "keep-50"}
    assert found.source is Source.STOCK


def test_what_ran_out_of_memory_begins_with_the_strongest() -> None:
    failure = Failure(kind=FailureKind.OUT_OF_MEMORY, phase=Phase.NUMERICS, reason="CUDA out of memory")
    (found,) = fitting(SPACE, [trial(1, {"precision": "bf16"}, failure=failure)], ONE_ROW)
    assert found.knobs == {"precision": "bf16", RECOMPUTE: "blocks"}


@pytest.mark.parametrize("kind", [FailureKind.RAISED, FailureKind.WRONG, FailureKind.TIMEOUT])
def test_other_failures_are_not_made_smaller(kind: FailureKind) -> None:
    failure = Failure(kind=kind, phase=Phase.NUMERICS, reason="other")
    assert list(fitting(SPACE, [trial(1, {"precision": "bf16"}, failure=failure)], LIMIT)) == []


@pytest.mark.parametrize("kind", [FailureKind.DECLINED, FailureKind.WRONG, FailureKind.TIMEOUT])
def test_a_choice_that_fails_otherwise_is_followed_by_the_next(kind: FailureKind) -> None:
    """All but the strongest fail."""
    trials: list[Trial] = []
    while len(trials) < 20 and (found := propose(SPACE, trials, limit=LIMIT)) is not None:
        choice = found.knobs.get(RECOMPUTE, "off")
        if choice in ("off", "blocks"):
            trials.append(outcome(len(trials), found.knobs, found.source, PEAKS[choice]))
        else:
            failure = Failure(kind=kind, phase=Phase.NUMERICS, reason="other")
            trials.append(trial(len(trials), found.knobs, found.source, failure=failure))
    assert any(each.failure is None for each in trials)


def test_one_that_fits_ends_it() -> None:
    knobs = {"precision": "bf16", "compile": "default"}
    large = outcome(1, knobs, Source.SEED, 140)
    (first,) = fitting(SPACE, [large], ONE_ROW)
    assert list(fitting(SPACE, [large, trial(2, first.knobs)], ONE_ROW)) == [first]


@pytest.mark.parametrize(
    ("peak_bytes", "rows", "parts"),
    [(130, None, 2), (160, None, 4), (190, 64, 8), (400, None, 8), (160, 3, 2), (130, 1, None)],
)
def test_a_batch_is_split_as_far_as_the_limit_asks_for_and_its_rows_allow(peak_bytes, rows, parts) -> None:
    knobs = {"precision": "bf16", "compile": "default"}
    found = list(fitting(SPACE, [outcome(1, knobs, Source.SEED, peak_bytes)], MemoryLimit(100, rows=rows)))
    counts = [each.knobs["accumulation"] for each in found if "accumulation" in each.knobs]
    assert counts == ([] if parts is None else [parts])
    assert sum(RECOMPUTE in each.knobs for each in found) == 1


def test_what_is_too_large_in_two_parts_is_tried_in_more() -> None:
    knobs = {"precision": "bf16", "accumulation": 2}
    found = [each.knobs for each in fitting(SPACE, [outcome(1, knobs, Source.SEED, 110)], LIMIT)]
    assert {**knobs, "accumulation": 4} in found
    assert is_known_too_large({"precision": "bf16"}, [outcome(1, knobs, Source.SEED, 110)])
    assert not is_known_too_large({"precision": "bf16", "accumulation": 4}, [outcome(1, knobs, Source.SEED, 110)])


def test_an_earlier_limit_does_not_make_a_free_run_recompute() -> None:
    known = [{"compile": "default", RECOMPUTE: "blocks"}]
    free, limited = (
        {each.source: each.knobs for each in opening(space, [], known, frozenset())} for space in (Space.of({}), SPACE)
    )
    assert free == {Source.KNOWN: {"compile": "default"}}
    assert limited == {Source.KNOWN: known[0]}


def test_memory_is_saved_under_a_limit_only() -> None:
    saving = {name for name, knob in KNOBS.items() if knob.saves_memory}
    assert saving == {"recompute"}
    assert saving <= set(SPACE.searchable())
    assert not saving & set(Space.of({}).searchable())
