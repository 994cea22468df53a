"""Runs whose difference is known, and the bootstrap against the one that draws value by value."""

import random
import statistics

import pytest

from kitsune.errors import SettingsError
from kitsune.profiler import MetricsCollector, Reporter, compare_runs
from kitsune.profiler.compare import RESAMPLES, Verdict, ratio_interval, resampled_median


def run(**values):
    """`step__ms=[...]` is the name "step" in ms."""
    made = MetricsCollector()
    for name, series in values.items():
        for value in series:
            made.record(name.partition("__")[0], value, name.partition("__")[2].replace("_per_", "/"))
    return made


def noisy(median, seed, count=40, spread=0.1):
    chance = random.Random(seed)
    return [median * chance.lognormvariate(0, spread) for _ in range(count)]


def test_half_the_time_is_twice_as_fast():
    (step,) = compare_runs(run(step__ms=noisy(10, 1)), run(step__ms=noisy(5, 2))).metrics
    assert step.verdict is Verdict.FASTER
    assert step.low < step.ratio < step.high
    assert step.low < 2.0 < step.high
    assert step.ratio == step.before / step.after
    assert (step.before, step.unit) == (pytest.approx(10, rel=0.1), "ms")


@pytest.mark.parametrize(
    ("unit", "verdict", "mirrored"),
    [
        ("ms", Verdict.FASTER, Verdict.SLOWER),
        ("s", Verdict.FASTER, Verdict.SLOWER),
        ("images_per_s", Verdict.SLOWER, Verdict.FASTER),
        ("MiB", Verdict.LOWER, Verdict.HIGHER),
        ("", Verdict.LOWER, Verdict.HIGHER),
    ],
)
def test_a_verdict_is_about_what_the_unit_says(unit, verdict, mirrored):
    high, low = run(**{f"x__{unit}": noisy(10, 1)}), run(**{f"x__{unit}": noisy(5, 2)})
    assert compare_runs(high, low).metrics[0].verdict is verdict
    assert compare_runs(low, high).metrics[0].verdict is mirrored


def test_a_run_is_the_same_as_itself_and_as_one_that_noise_alone_tells_apart():
    before = run(step__ms=noisy(10, 1))
    (itself,) = compare_runs(before, before).metrics
    assert (itself.ratio, itself.verdict) == (1.0, Verdict.SAME)
    (other,) = compare_runs(before, run(step__ms=noisy(10, 2))).metrics
    assert other.verdict is Verdict.SAME
    assert other.ratio != 1.0


def test_five_values_decide_nothing_and_six_do():
    for count, verdict in ((5, Verdict.TOO_FEW), (6, Verdict.FASTER)):
        (step,) = compare_runs(run(step__ms=[10.0] * count), run(step__ms=[5.0] * 9)).metrics
        assert (step.ratio, step.verdict) == (2.0, verdict)


def test_a_seed_settles_the_interval_of_a_name_whatever_else_is_there():
    before, after = noisy(10, 1), noisy(9, 2)
    (alone,) = compare_runs(run(step__ms=before), run(step__ms=after)).metrics
    with_others = compare_runs(run(a__ms=before, step__ms=before), run(a__ms=after, step__ms=after)).metrics
    assert with_others[1] == alone
    assert compare_runs(run(step__ms=before), run(step__ms=after), seed=1).metrics != (alone,)


def test_names_that_cannot_be_compared_are_listed_with_the_reason():
    before = run(old__ms=[1.0], step__ms=[1.0] * 6, unit__ms=[1.0], sign=[1.0, -1.0], zero=[1.0])
    after = run(new__ms=[1.0], step__ms=[1.0] * 6, unit__s=[1.0], sign=[1.0, 1.0], zero=[0.0])
    found = compare_runs(before, after)
    assert [one.name for one in found.metrics] == ["step"]
    assert (found.only_before, found.only_after) == (("old",), ("new",))
    assert found.incomparable == {
        "unit": "the unit is 'ms' before and 's' after",
        "sign": "a ratio needs values greater than 0",
        "zero": "a ratio needs values greater than 0",
    }
    lines = str(found).splitlines()
    assert lines[1].split() == ["step", "1", "1", "ms", "1.000", "1.000-1.000", "same"]
    assert lines[2:] == [
        "only before: old",
        "only after: new",
        *(f"not compared: {name}: {reason}" for name, reason in found.incomparable.items()),
    ]
    assert str(compare_runs(run(), run())) == "No name can be compared."


@pytest.mark.parametrize("value", [1.7e308, 1e-308])
def test_values_whose_ratio_may_be_no_number_are_not_compared(value):
    found = compare_runs(run(huge__ms=[value] * 2, step__ms=[1.0]), run(huge__ms=[1.0] * 2, step__ms=[1.0]))
    assert [one.name for one in found.metrics] == ["step"]
    assert found.incomparable == {"huge": "a ratio is taken of values between 1e-150 and 1e+150"}


def test_files_are_compared_as_the_runs_that_they_hold(tmp_path):
    before, after = run(step__ms=noisy(10, 1)), run(step__ms=noisy(9, 2))
    Reporter(before).save_json(tmp_path / "before.json")
    Reporter(after).save_json(tmp_path / "after.json")
    assert compare_runs(tmp_path / "before.json", str(tmp_path / "after.json")) == compare_runs(before, after)


def test_what_is_no_run_is_refused():
    with pytest.raises(SettingsError, match="not a dict"):
        compare_runs({}, run())


@pytest.mark.parametrize("count", [1, 2, 5, 8])
def test_resampled_medians_are_those_of_drawing_every_value(count):
    """The two ways draw from one distribution: shares and means of many draws agree."""
    chance, quick, slow = random.Random(count), random.Random(1), random.Random(2)
    ordered = sorted(chance.uniform(1, 2) for _ in range(count))
    draws = 20_000
    quickly = [resampled_median(ordered, quick) for _ in range(draws)]
    slowly = [statistics.median(slow.choices(ordered, k=count)) for _ in range(draws)]
    assert statistics.fmean(quickly) == pytest.approx(statistics.fmean(slowly), abs=0.01)
    for middle in {(low + high) / 2 for low in ordered for high in ordered}:  # all that a median can be
        shares = [sum(value <= middle for value in values) / draws for values in (quickly, slowly)]
        assert shares[0] == pytest.approx(shares[1], abs=0.025)  # 5 standard errors


def test_the_interval_holds_the_true_ratio_about_as_often_as_it_says():
    tries = 120
    held = 0
    for number in range(tries):
        low, high = ratio_interval(noisy(3, 2 * number), noisy(2, 2 * number + 1), random.Random(number))
        held += low <= 1.5 <= high
    assert 0.85 <= held / tries <= 1.0
    assert RESAMPLES % 40 == 0  # the same number is cut off at both ends
