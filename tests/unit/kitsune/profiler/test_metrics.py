"""Known values in, the summary, the report and the shares of the time that follow from them out."""

import math
import random
import sys
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from kitsune.errors import SettingsError
from kitsune.profiler import MetricsCollector
from kitsune.profiler.metrics import TIMES_MS, Summary, quantile


def test_a_summary_is_computed_from_the_values():
    metrics = MetricsCollector()
    for value in (4.0, 1.0, 3.0, 2.0):
        metrics.record("loss", value)
    metrics.record("memory", torch.tensor(5.0, requires_grad=True), unit="MiB")
    loss, memory = metrics.summary().values()
    assert loss == Summary(count=4, mean=2.5, median=2.5, p90=loss.p90, min=1.0, max=4.0, unit="")
    assert loss.p90 == pytest.approx(3.7)
    assert memory == Summary(count=1, mean=5.0, median=5.0, p90=5.0, min=5.0, max=5.0, unit="MiB")
    assert metrics.series["loss"].values == (4.0, 1.0, 3.0, 2.0)


@pytest.mark.parametrize("count", [1, 2, 7, 100])
def test_the_quantile_is_that_of_numpy(count):
    chance = random.Random(count)
    values = sorted(chance.gauss() for _ in range(count))
    for share in (0.0, 0.1, 0.5, 0.9, 1.0):
        assert quantile(values, share) == pytest.approx(np.quantile(values, share))


def test_the_shares_of_nested_regions_are_one_together(host_clock):
    metrics = MetricsCollector("cpu")
    for _ in range(2):
        with metrics.measure_time("step"):
            host_clock[0] += 0.010
            with metrics.measure_time("forward"):
                host_clock[0] += 0.060
            metrics.record("loss", 0.5)
        with metrics.measure_time("data"):
            host_clock[0] += 0.030
    forward, data, step = metrics.analyze_bottlenecks()
    assert [one.name for one in (forward, data, step)] == ["forward", "data", "step"]
    assert [one.share for one in (forward, data, step)] == pytest.approx([0.6, 0.3, 0.1])
    assert (step.total_ms, step.own_ms, step.count) == pytest.approx((140.0, 20.0, 2))
    assert step.sentence == "step, without the regions inside it, takes 10.0% of the time: 20 ms in all, 2 times."
    assert data.sentence == "data takes 30.0% of the time: 60 ms in all, 2 times."


def test_a_region_inside_itself_is_counted_once(host_clock):
    metrics = MetricsCollector("cpu")
    with metrics.measure_time("step"):
        host_clock[0] += 1.0
        with metrics.measure_time("step"):
            host_clock[0] += 2.0
    (step,) = metrics.analyze_bottlenecks()
    assert (step.own_ms, step.share) == pytest.approx((3000.0, 1.0))


def test_recorded_times_have_a_share_in_any_unit_and_other_values_have_none():
    metrics = MetricsCollector()
    metrics.record("a", 1.0, "s")
    metrics.record("b", 500.0, "ms")
    metrics.record("c", 500_000.0, "us")
    metrics.record("loss", 1e9)
    assert {one.name: one.share for one in metrics.analyze_bottlenecks()} == {"a": 0.5, "b": 0.25, "c": 0.25}


def test_a_recorded_time_counts_as_part_of_the_open_region(host_clock):
    metrics = MetricsCollector("cpu")
    with metrics.measure_time("step"):
        host_clock[0] += 0.004
        metrics.record("kernel", 3.0, "ms")
        metrics.record("a guess", 8.0, "ms")
    assert {one.name: one.own_ms for one in metrics.analyze_bottlenecks()} == pytest.approx(
        {"kernel": 3.0, "a guess": 8.0, "step": 0.0}
    )


def test_regions_on_a_gpu_are_waited_for_once_when_asked_for(gpu):
    metrics = MetricsCollector()
    for took_ms in (1.0, 2.0):
        with metrics.measure_time("step"):
            gpu.run(took_ms)
    assert gpu.waits == 0
    assert metrics.summary()["step"].mean == 1.5
    metrics.generate_report()
    assert gpu.waits == 1


def test_a_region_that_raises_gives_no_value_and_ends(host_clock):
    metrics = MetricsCollector("cpu")
    with pytest.raises(KeyError), metrics.measure_time("step"):
        raise KeyError
    with metrics.measure_time("data"):
        host_clock[0] += 1.0
    assert list(metrics.summary()) == ["data"]
    assert metrics.series["data"].inside == (None,)


def test_the_report_is_a_table_and_a_sentence_for_each_region():
    metrics = MetricsCollector()
    assert metrics.generate_report() == "Nothing was recorded."
    assert metrics.analyze_bottlenecks() == ()
    metrics.record("loss\x1b[2J\nstep", 0.125)
    metrics.record("step", 12.3456789, "ms")
    header, loss, step, blank, sentence = metrics.generate_report().splitlines()
    assert header.split() == ["name", "count", "mean", "median", "p90", "min", "max", "unit"]
    assert loss.split() == ["loss\N{REPLACEMENT CHARACTER}[2J", "step", "1", *["0.125"] * 5]
    assert step.split() == ["step", "1", *["12.3457"] * 5, "ms"]
    assert blank == ""
    assert sentence == "step takes 100.0% of the time: 12.3457 ms in all, once."


@pytest.mark.parametrize("value", [math.nan, math.inf, "fast", None, [1.0], torch.ones(2)])
def test_what_is_no_finite_number_is_refused(value):
    metrics = MetricsCollector()
    with pytest.raises(SettingsError, match="the value of 'loss'"):
        metrics.record("loss", value)
    assert metrics.summary() == {}


@pytest.mark.parametrize("value", [10**400, -(10**400), 10**5000, Fraction(10**400)], ids=range(4))
def test_a_number_that_no_float_holds_is_refused(value):
    with pytest.raises(SettingsError, match=r"the value of 'loss' is too large: a float holds 1\.8e\+308 at most"):
        MetricsCollector().record("loss", value)


def test_times_whose_sum_no_float_holds_have_a_summary_and_shares():
    metrics = MetricsCollector("cpu")
    for _ in range(8):
        metrics.record("a", 1e308, "ms")
        metrics.record("b", 1e308, "ms")
    summary = metrics.summary()["a"]
    assert (summary.mean, summary.median, summary.p90) == (1e308, 1e308, 1e308)
    assert [(one.total_ms, one.share) for one in metrics.analyze_bottlenecks()] == [(sys.float_info.max, 0.5)] * 2
    assert "b takes 50.0% of the time: 1.79769e+308 ms in all, 8 times." in metrics.generate_report()


ANY = st.floats(allow_nan=False, allow_infinity=False)


@given(
    rows=st.lists(st.tuples(st.sampled_from("abc"), ANY), min_size=1),
    units=st.tuples(*[st.sampled_from([*TIMES_MS, ""])] * 3),
    inside=ANY,
)
@example(rows=[("a", -1.7e308), ("a", 1.7e308)], units=("ms", "ms", "ms"), inside=1.7e308)
@example(rows=[("a", 1.7e308)] * 3, units=("s", "ms", "ms"), inside=-1.7e308)
def test_whatever_is_finite_has_a_report_of_finite_numbers(rows, units, inside):
    metrics = MetricsCollector("cpu")
    with metrics.measure_time("step"):
        metrics.record("part", inside, "ms")
        for name, value in rows:
            metrics.record(name, value, units["abc".index(name)])
    for name, one in metrics.summary().items():
        exact = sum(map(Fraction, metrics.series[name].values)) / one.count
        assert one.mean == pytest.approx(float(exact))
        assert one.min <= one.median <= one.p90 <= one.max
    regions = metrics.analyze_bottlenecks()
    assert all(math.isfinite(number) for one in regions for number in (one.total_ms, one.own_ms, one.share))
    assert math.fsum(one.share for one in regions) == pytest.approx(1.0)
    assert metrics.generate_report()


def test_one_name_has_one_unit():
    metrics = MetricsCollector("cpu")
    metrics.record("step", 1.0, "s")
    with pytest.raises(SettingsError, match="'step' is recorded in 's', not in 'ms'"):
        metrics.record("step", 1.0, "ms")
    with pytest.raises(SettingsError, match="use another name"), metrics.measure_time("step"):
        pass


def test_a_name_that_the_package_has_not():
    import kitsune.profiler

    with pytest.raises(AttributeError, match="no attribute 'Profiler'"):
        _ = kitsune.profiler.Profiler
    assert all(getattr(kitsune.profiler, name).__name__ == name for name in kitsune.profiler.__all__)
