from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kitsune.errors import SettingsError
from kitsune.launches.model.launch_graph import Launch, LaunchGraph, Span, Storage
from kitsune.memory import Lifetime, LifetimeAnalyzer, Moment

quick = settings(max_examples=120)


def analyzer_of(*uses, kept=()):
    """From (name, nbytes, *steps)."""
    analyzer = LifetimeAnalyzer()
    for name, nbytes, *steps in uses:
        for step in steps:
            analyzer.record_usage(name, nbytes, step)
    for name in kept:
        analyzer.keep(name)
    return analyzer


@st.composite
def analyzers(draw):
    sizes = draw(st.lists(st.integers(0, 5000), max_size=14))
    analyzer = LifetimeAnalyzer()
    for number, nbytes in enumerate(sizes):
        for step in draw(st.lists(st.integers(-3, 12), min_size=1, max_size=4)):
            analyzer.record_usage(f"t{number}", nbytes, step)
        if draw(st.booleans()):
            analyzer.keep(f"t{number}")
    return analyzer


# Who is alive when ----------------------------------------------------------------------------------------------------


def test_a_tensor_lives_from_its_first_to_its_last_touch_in_whatever_order_they_are_told():
    analyzer = analyzer_of(("x", 8, 5, 2, 9, 2), ("y", 4, 3))
    assert analyzer.lifetimes() == {"x": Lifetime(2, 9, 8), "y": Lifetime(3, 3, 4)}


def test_a_tensor_that_is_kept_lives_to_the_last_step_of_all():
    analyzer = analyzer_of(("loss", 4, 1), ("x", 8, 0, 6), kept=["loss"])
    assert analyzer.lifetimes()["loss"] == Lifetime(1, 6, 4)


def test_the_timeline_has_every_step_that_was_recorded():
    analyzer = analyzer_of(("a", 10, 0, 20), ("b", 5, 7), ("c", 1, 7, 9))
    assert analyzer.timeline() == (Moment(0, 10), Moment(7, 16), Moment(9, 11), Moment(20, 10))
    assert analyzer.peak_bytes() == 16
    assert [analyzer.live_at(step) for step in (-1, 0, 7, 8, 21)] == [(), ("a",), ("a", "b", "c"), ("a", "c"), ()]


def test_nothing_recorded_is_nothing_alive():
    analyzer = LifetimeAnalyzer()
    assert (analyzer.lifetimes(), analyzer.timeline(), analyzer.peak_bytes()) == ({}, (), 0)
    assert analyzer.compute_reuse_plan().arena_bytes == 0
    assert analyzer.get_optimization_suggestions() == ()


@given(analyzers())
@quick
def test_the_timeline_is_the_sum_of_who_is_alive(analyzer):
    lifetimes = analyzer.lifetimes()
    for moment in analyzer.timeline():
        assert moment.nbytes == sum(lifetimes[name].nbytes for name in analyzer.live_at(moment.step))
    assert analyzer.peak_bytes() == max((moment.nbytes for moment in analyzer.timeline()), default=0)


@pytest.mark.parametrize(("nbytes", "why"), [(-1, "negative"), (9, "it had 8 before")])
def test_bytes_that_cannot_be_are_refused(nbytes, why):
    analyzer = analyzer_of(("x", 8, 0))
    with pytest.raises(SettingsError, match=why):
        analyzer.record_usage("x" if nbytes > 0 else "y", nbytes, 1)
    assert analyzer.lifetimes() == {"x": Lifetime(0, 0, 8)}


def test_what_was_never_touched_cannot_be_kept():
    with pytest.raises(SettingsError, match="never recorded"):
        LifetimeAnalyzer().keep("x")


# From a recorded step -------------------------------------------------------------------------------------------------


def launch(name, reads, writes):
    return Launch(name, tuple(Span(s, 0, 4) for s in reads), tuple(Span(s, 0, 4) for s in writes))


GRAPH = LaunchGraph.of(
    [launch("mm", [0], [1]), launch("relu", [1], [2]), launch("sum", [2], [3]), launch("grad", [1, 2], [0])],
    [
        Storage(64, is_own=False, is_kept=True),
        Storage(100, is_own=True, is_kept=False),
        Storage(200, is_own=True, is_kept=False),
        Storage(4, is_own=True, is_kept=True),
        Storage(8, is_own=True, is_kept=False),  # no launch touches it
    ],
)


@pytest.mark.parametrize("recorded", [GRAPH, SimpleNamespace(graph=GRAPH)])
def test_a_launch_graph_tells_lifetimes_by_its_launches(recorded):
    analyzer = LifetimeAnalyzer.of(recorded)
    assert analyzer.lifetimes() == {
        "1 mm": Lifetime(0, 3, 100),
        "2 relu": Lifetime(1, 3, 200),
        "3 sum": Lifetime(2, 3, 4),  # kept
    }
    assert analyzer.peak_bytes() == 304


def test_what_is_used_last_is_told_by_the_order_of_launches_and_not_by_their_names():
    """The namesake compared the ids of tasks."""
    graph = LaunchGraph.of(
        [launch("9", [], [0]), launch("1", [0], [1]), launch("0", [0], [1])], [Storage(4, True, False)] * 2
    )
    assert LifetimeAnalyzer.of(graph).lifetimes()["0 9"] == Lifetime(0, 2, 4)


# The arena ------------------------------------------------------------------------------------------------------------


def conflicts(analyzer, plan):
    """Pairs that are alive together and share a byte."""
    spans = [
        (plan.offsets[name], plan.offsets[name] + each.nbytes, each) for name, each in analyzer.lifetimes().items()
    ]
    return [
        (one, two)
        for number, one in enumerate(spans)
        for two in spans[:number]
        if one[2].first <= two[2].last and two[2].first <= one[2].last and max(one[0], two[0]) < min(one[1], two[1])
    ]


@given(analyzers(), st.sampled_from([1, 4, 512]))
@quick
def test_no_two_that_are_alive_together_share_a_byte(analyzer, alignment_bytes):
    plan = analyzer.compute_reuse_plan(alignment_bytes)
    assert set(plan.offsets) == set(analyzer.lifetimes())
    assert all(offset >= 0 and offset % alignment_bytes == 0 for offset in plan.offsets.values())
    assert conflicts(analyzer, plan) == []


@given(analyzers(), st.sampled_from([1, 4, 512]))
@quick
def test_the_arena_lies_between_the_peak_and_the_sum(analyzer, alignment_bytes):
    plan = analyzer.compute_reuse_plan(alignment_bytes)
    lifetimes = analyzer.lifetimes()
    ends = [plan.offsets[name] + each.nbytes for name, each in lifetimes.items()]
    assert plan.arena_bytes == max(ends, default=0)
    assert plan.peak_bytes == analyzer.peak_bytes() <= plan.arena_bytes <= plan.naive_bytes
    assert plan.naive_bytes == sum(-(-each.nbytes // alignment_bytes) * alignment_bytes for each in lifetimes.values())


@given(st.lists(st.integers(0, 999), max_size=8))
@quick
def test_a_chain_needs_no_more_than_its_peak(sizes):
    analyzer = analyzer_of(*((f"t{step}", nbytes, step) for step, nbytes in enumerate(sizes)))
    assert analyzer.compute_reuse_plan(1).arena_bytes == max(sizes, default=0)


def three_branches():
    """A three-branch MLP: the namesake's layout had 2 pairs of these 13 tensors overlap while both were alive."""
    uses, step = [("input", 4096, 0, 1, 4, 7)], 1
    for branch in "abc":
        uses += [
            (f"{branch} hidden", 16384, step, step + 1),
            (f"{branch} relu", 16384, step + 1, step + 2),
            (f"{branch} output", 2048, step + 2, 10),
        ]
        step += 3
    return analyzer_of(*uses, ("joined", 6144, 10, 11), ("head", 1024, 11, 12), ("loss", 4, 12))


def test_a_three_branch_network_has_no_conflict_and_reuses():
    analyzer = three_branches()
    plan = analyzer.compute_reuse_plan()
    assert len(plan.offsets) == 13
    assert conflicts(analyzer, plan) == []
    assert (plan.peak_bytes, plan.arena_bytes, plan.naive_bytes) == (38_912, 40_960, 116_224)


def test_a_tensor_goes_into_the_smallest_gap_that_is_large_enough():
    """Two gaps are free when `small` comes, of 40 and of 12 bytes."""
    analyzer = analyzer_of(
        ("wall 1", 100, 0, 9), ("gap 40", 40, 0), ("wall 2", 39, 0, 9), ("gap 12", 12, 0), ("wall 3", 11, 0, 9),
        ("small", 10, 5),
    )  # fmt: skip
    offsets = analyzer.compute_reuse_plan(1).offsets
    assert (offsets["gap 12"], offsets["wall 3"]) == (179, 191)
    assert offsets["small"] == offsets["gap 12"]


def test_a_tensor_goes_into_a_gap_that_it_just_fits_into():
    analyzer = analyzer_of(
        ("wall 1", 100, 0, 9), ("gap", 40, 0), ("wall 2", 39, 0, 9), ("part", 20, 5), ("rest", 20, 5)
    )
    plan = analyzer.compute_reuse_plan(1)
    assert (plan.offsets["part"], plan.offsets["rest"], plan.arena_bytes) == (100, 120, 179)


@pytest.mark.parametrize("alignment_bytes", [0, -4])
def test_an_alignment_below_one_is_refused(alignment_bytes):
    with pytest.raises(SettingsError, match="alignment_bytes is"):
        analyzer_of(("x", 4, 0)).compute_reuse_plan(alignment_bytes)


# What could be better -------------------------------------------------------------------------------------------------


def by_kind(analyzer, kind):
    return [each for each in analyzer.get_optimization_suggestions() if each.kind == kind]


def test_the_largest_at_the_peak_are_named():
    analyzer = analyzer_of(("a", 10, 0, 2), ("b", 3000, 1, 2), ("c", 20, 2), ("d", 30, 2), ("late", 2000, 5))
    (peak,) = by_kind(analyzer, "peak")
    assert (peak.names, peak.nbytes) == (("b", "d", "c"), 3050)
    assert "at step 2: 3,060 bytes in 4 tensors" in peak.text and "b (3,000 bytes)" in peak.text


def test_an_idle_tensor_at_the_peak_is_named_with_what_it_would_save():
    analyzer = analyzer_of(("saved", 1000, 0, 1, 8), ("big", 500, 4), ("other", 300, 1, 2))
    (idle,) = by_kind(analyzer, "idle")
    assert (idle.names, idle.nbytes) == (("saved",), 200)  # without it, the peak is 1,300 at step 1
    assert "not touched between steps 1 and 8" in idle.text and "by 200 bytes" in idle.text


def test_what_is_kept_is_idle_after_its_last_touch():
    (idle,) = by_kind(analyzer_of(("loss", 100, 0), ("big", 500, 4), ("end", 1, 9), kept=["loss"]), "idle")
    assert (idle.names, idle.nbytes) == (("loss",), 100)
    assert "after step 0, and kept to the end" in idle.text


@pytest.mark.parametrize(
    "uses",
    [
        [("saved", 1000, 0, 4, 8), ("big", 500, 4)],  # it is touched at the peak
        [("saved", 1000, 0, 8), ("big", 500, 4), ("twin", 500, 0)],  # without it, the peak is elsewhere just as high
        [("saved", 1000, 3, 4), ("big", 500, 4)],
    ],
)
def test_no_idle_tensor_is_invented(uses):
    assert by_kind(analyzer_of(*uses), "idle") == []


@given(analyzers())
@quick
def test_an_idle_tensor_saves_just_what_is_said(analyzer):
    for idle in by_kind(analyzer, "idle"):
        (name,) = idle.names
        peak = max(analyzer.timeline(), key=lambda moment: moment.nbytes)
        steps = analyzer._touched[name]
        before = max(step for step in steps if step < peak.step)
        after = min((step for step in steps if step > peak.step), default=99)
        gone = [moment.step for moment in analyzer.timeline() if before < moment.step < after]
        sizes = {moment.step: moment.nbytes for moment in analyzer.timeline()}
        size = analyzer.lifetimes()[name].nbytes
        without = max(nbytes - size * (step in gone) for step, nbytes in sizes.items())
        assert idle.nbytes == peak.nbytes - without > 0


def test_an_arena_is_suggested_where_it_saves():
    analyzer = analyzer_of(("a", 1024, 0), ("b", 1024, 1), ("c", 512, 1))
    (reuse,) = by_kind(analyzer, "reuse")
    assert (reuse.nbytes, set(reuse.names)) == (1024, {"a", "b", "c"})
    assert "one arena of 1,536 bytes holds what takes 2,560 bytes" in reuse.text
    assert by_kind(analyzer_of(("a", 1024, 0), ("b", 512, 0)), "reuse") == []
