"""What profile=True measures: true medians of steps as given and by the plan, or the reason why there is none."""

import dataclasses
import itertools
import json
import math

import pytest
import torch
from torch import nn

from kitsune import KitsuneOptimizer
from kitsune.errors import CaptureError, SettingsError
from kitsune.fusion import FusionConfig
from kitsune.fusion.stats import Benefit, FusionStats, Kept, Refused
from kitsune.optimizer import CLOSED, NO_PLAN, NO_PROFILE, UNFOUND
from kitsune.profiler.gauge import Gauge
from kitsune.profiler.step_counter import StepCount
from kitsune.profiler.streams import StreamProfile, StreamUse
from kitsune.runtime.report import Report
from kitsune.runtime.run_stats import summary_of, unmeasured
from kitsune.runtime.step_profile import (
    CALIBRATION_STEPS,
    COLD_STEPS,
    GIVEN,
    KEPT_STEPS,
    LEAST_STEPS,
    NO_COUNT,
    NO_LAUNCHES,
    NO_REQUEST,
    NO_STREAMS,
    ONE_STREAM,
    PLANNED,
    StepProfile,
)

CPU = torch.device("cpu")


def profile_of(monkeypatch, given_s, planned_s, planned_steps, settling_steps=3, why=""):
    """A loop whose steps took so long by a made-up clock; cold and settling steps take ten times as long."""
    clock = itertools.accumulate(
        itertools.chain(
            [0.0, *[10 * given_s] * COLD_STEPS],
            [given_s] * (CALIBRATION_STEPS - COLD_STEPS - 1),
            [10 * planned_s] * settling_steps,
            itertools.repeat(planned_s),
        )
    )
    monkeypatch.setattr("kitsune.profiler.clock.time.perf_counter", lambda: next(clock))
    profile = StepProfile(CPU, lambda: why)
    for _ in range(CALIBRATION_STEPS + settling_steps - 1):
        profile.mark(by_plan=False)
    for _ in range(planned_steps + 1):
        profile.mark(by_plan=True)
    return profile


def test_medians_of_settled_steps_make_the_speedup(monkeypatch):
    stats = profile_of(monkeypatch, 0.008, 0.002, 20).stats()
    assert stats.given_ms == pytest.approx(8.0)
    assert stats.planned_ms == pytest.approx(2.0)
    assert stats.speedup == pytest.approx(4.0)
    assert (stats.given_steps, stats.planned_steps) == (CALIBRATION_STEPS - COLD_STEPS - 1, 20)
    assert "4 x" in str(stats)


def test_a_slower_plan_is_said_to_be_slower(monkeypatch):
    assert profile_of(monkeypatch, 0.002, 0.004, 9).stats().speedup == pytest.approx(0.5)


def test_too_few_steps_by_the_plan_make_no_number(monkeypatch):
    stats = profile_of(monkeypatch, 0.008, 0.002, LEAST_STEPS - 1).stats()
    assert math.isnan(stats.speedup)
    few = f"{LEAST_STEPS - 1} steps ran by the plan; {LEAST_STEPS} are needed"
    assert (stats.missing["speedup"], stats.missing["planned_ms"]) == (few, few)
    assert "given_ms" not in stats.missing
    assert f"{stats.speedup:.2f}x" == "nanx"  # as the manual prints it


def test_a_plan_of_which_nothing_was_applied_says_why(monkeypatch):
    profile = profile_of(monkeypatch, 0.008, 0.002, 0, why="capture: no GPU")
    missing = profile.stats().missing
    assert (missing["speedup"], missing["planned_ms"]) == ("capture: no GPU", "capture: no GPU")
    assert profile.get_metrics()["missing"] == missing


def test_what_only_a_gpu_has_is_not_measured_on_a_cpu_and_says_so(monkeypatch):
    stats = profile_of(monkeypatch, 0.008, 0.002, 9).stats()
    assert math.isnan(stats.memory_saved_mb)
    memory = ("memory_saved_mb", "given_peak_bytes", "planned_peak_bytes", "given_hit_rate", "planned_hit_rate")
    launches = ("given_launches", "planned_launches")
    expected = {**dict.fromkeys(memory, NO_COUNT), **dict.fromkeys(launches, NO_LAUNCHES), "overlap": NO_STREAMS}
    assert stats.missing == expected
    assert f"not measured: given_launches, planned_launches: {NO_LAUNCHES}" in str(stats)


@pytest.mark.parametrize("steps", [0, 1, COLD_STEPS, CALIBRATION_STEPS - 1, CALIBRATION_STEPS, 17, 40])
def test_every_number_that_is_missing_has_its_reason_and_no_other(monkeypatch, steps):
    profile = StepProfile(CPU)
    for number in range(steps):
        profile.mark(by_plan=number > CALIBRATION_STEPS)
    assert_reasons(profile.stats())


def assert_reasons(stats):
    numbers = {one.name: getattr(stats, one.name) for one in dataclasses.fields(stats) if one.name != "missing"}
    unknown = {name for name, number in numbers.items() if number is None or math.isnan(number)}
    assert stats.missing.keys() == unknown
    assert all(stats.missing.values())


# Counting: one step as given, one by the plan -------------------------------------------------------------------------


class Counting:
    """A GPU that is only pretended: which steps were counted, and what is found in each."""

    def __init__(self, monkeypatch):
        self.marks = self.begun = self.dropped = 0
        self.counted = []
        self.found = {}
        self.refusal = None
        monkeypatch.setattr("kitsune.runtime.step_profile.Clock", self.clock)
        monkeypatch.setattr("kitsune.runtime.step_profile.gauge_of", lambda device: Gauge(Level(), "a level"))
        monkeypatch.setattr("kitsune.runtime.step_profile.graph_pool_bytes", lambda device: 0)
        monkeypatch.setattr("kitsune.runtime.step_profile.StepCounter", self.counter)

    def clock(self, device):
        """A step takes 1 ms, one that is counted 100, and one after that 1.25: CUPTI stays attached."""
        self.now_ms = 0.0
        return self

    def mark(self):
        return self.now_ms

    def keep(self, begin, end, tell):
        tell(end - begin)

    def settle(self):
        pass

    def counter(self, device):
        if self.refusal is not None:
            raise self.refusal
        self.begun += 1
        return self

    def end(self):
        self.counted.append(self.marks)
        found = self.found.get(len(self.counted), counted())
        if isinstance(found, Exception):
            raise found
        return found

    def drop(self):
        self.dropped += 1

    def run(self, profile, steps, *, by_plan=False):
        for _ in range(steps):
            self.marks += 1
            self.now_ms += 100.0 if profile._counting else 1.25 if self.begun else 1.0
            profile.mark(by_plan=by_plan)


class Level:
    def now(self):
        return 2**20

    def peak(self):
        return 2**20

    def reset(self):
        return True


def counted(kernels=(10,), overlap_ms=0.0, allocations=8, hits=6):
    uses = tuple(StreamUse(number, 1.0, count, 1) for number, count in enumerate(kernels))
    return StepCount(StreamProfile(uses, 2.0, overlap_ms), allocations, hits)


@pytest.fixture
def gpu(monkeypatch):
    return Counting(monkeypatch)


GPU = torch.device("cuda", 0)


def test_one_step_as_given_and_one_by_the_plan_are_counted_and_neither_is_timed(gpu):
    gpu.found = {1: counted((60,)), 2: counted((30, 15), overlap_ms=0.5, allocations=4, hits=4)}
    profile = StepProfile(GPU)
    gpu.run(profile, CALIBRATION_STEPS + 3)
    gpu.run(profile, 12, by_plan=True)
    assert gpu.counted == [CALIBRATION_STEPS, CALIBRATION_STEPS + 5]
    stats = profile.stats()
    assert (stats.given_launches, stats.planned_launches) == (60, 45)
    assert (stats.given_hit_rate, stats.planned_hit_rate) == (0.75, 1.0)
    assert stats.overlap == 0.25
    assert profile.samples_ms(GIVEN) == [1.0] * (CALIBRATION_STEPS - COLD_STEPS - 2), "before the first look"
    assert (stats.planned_ms, stats.speedup, stats.planned_steps) == (1.25, 0.8, 10)
    assert stats.missing == {}
    assert profile.get_metrics()["streams"]["streams"][1]["kernels"] == 15
    assert "60 as given, 45 by plan" in str(stats)
    summary = summary_of(Report(), stats, profile.streams)
    assert "stream by stream" in summary and "Two or more streams are busy for 0.5 ms" in summary


def test_one_stream_has_no_overlap_and_a_step_without_requests_no_hit_rate(gpu):
    gpu.found = {2: counted((30,), allocations=0, hits=0)}
    profile = StepProfile(GPU)
    gpu.run(profile, CALIBRATION_STEPS)
    gpu.run(profile, 12, by_plan=True)
    assert profile.stats().missing == {"overlap": ONE_STREAM, "planned_hit_rate": NO_REQUEST}


@pytest.mark.parametrize("error", [CaptureError("torch.profiler is running"), RuntimeError("no CUPTI\nat all")])
@pytest.mark.parametrize("at", ["begin", "end"])
def test_a_step_that_cannot_be_counted_leaves_the_reason_and_is_tried_once(gpu, error, at):
    if at == "begin":
        gpu.refusal = error
    else:
        gpu.found = {1: error, 2: error}
    profile = StepProfile(GPU)
    gpu.run(profile, CALIBRATION_STEPS)
    gpu.run(profile, 12, by_plan=True)
    stats = profile.stats()
    names = {"given_launches", "planned_launches", "given_hit_rate", "planned_hit_rate", "overlap"}
    assert stats.missing == dict.fromkeys(names, str(error).splitlines()[0])
    assert gpu.begun == (0 if at == "begin" else 2)
    assert stats.speedup == (1.0 if at == "begin" else 0.8)


def test_a_step_that_did_not_run_by_the_plan_after_all_is_counted_again(gpu):
    gpu.found = {2: counted((99,)), 3: counted((45,))}
    profile = StepProfile(GPU)
    gpu.run(profile, CALIBRATION_STEPS)
    gpu.run(profile, 1, by_plan=True)
    gpu.run(profile, 2)
    assert_reasons(profile.stats())
    gpu.run(profile, 12, by_plan=True)
    assert profile.stats().planned_launches == 45


def test_closing_ends_the_counting_of_a_step(gpu):
    profile = StepProfile(GPU)
    gpu.run(profile, CALIBRATION_STEPS - 1)
    profile.close()
    gpu.run(profile, 3)
    assert (gpu.begun, gpu.dropped, gpu.counted) == (1, 1, [])
    assert_reasons(profile.stats())


# In a loop ------------------------------------------------------------------------------------------------------------


def test_only_the_newest_steps_are_kept(monkeypatch):
    profile = profile_of(monkeypatch, 0.008, 0.002, KEPT_STEPS + 50)
    assert len(profile.samples_ms(PLANNED)) == KEPT_STEPS
    assert len(profile.samples_ms(GIVEN)) == CALIBRATION_STEPS - COLD_STEPS - 1


def loop(optimizer, model, steps):
    x, y = torch.randn(8, 4), torch.randint(3, (8,))
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def test_a_loop_is_measured_as_given_first_and_then_by_the_plan(tmp_path, capsys):
    model = nn.Linear(4, 3)
    optimizer = KitsuneOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), enable_amp=True, profile=True)
    loop(optimizer, model, CALIBRATION_STEPS)
    assert optimizer.report.applied == {}
    assert "run as given" in str(optimizer.report)
    loop(optimizer, model, 30)
    assert optimizer.report.applied == {"precision": "bf16"}
    stats = optimizer.get_stats()
    assert stats.speedup == pytest.approx(stats.given_ms / stats.planned_ms)
    assert stats.planned_steps > LEAST_STEPS
    metrics = optimizer.profiler.get_metrics()
    assert len(metrics["step_ms"][PLANNED]) == stats.planned_steps
    assert min(metrics["step_ms"][GIVEN]) > 0
    assert_reasons(stats)
    assert metrics["missing"] == stats.missing
    optimizer.print_summary()
    assert "speedup" in capsys.readouterr().out
    optimizer.save_profile(tmp_path / "profile.json")
    saved = json.loads((tmp_path / "profile.json").read_text())
    assert saved["speedup"] == pytest.approx(stats.speedup)
    assert saved["memory_saved_mb"] is None
    assert saved["applied"] == {"precision": "bf16"}
    with pytest.raises(SettingsError, match="cannot be written"):
        optimizer.save_profile(tmp_path / "nowhere" / "profile.json")
    optimizer.close()
    assert optimizer.get_stats().planned_steps == stats.planned_steps


def test_the_same_steps_are_trained_with_and_without_a_profile():
    def weights(**options):
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        optimizer = KitsuneOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), **options)
        loop(optimizer, model, CALIBRATION_STEPS + 5)
        optimizer.close()
        return model.weight

    assert torch.equal(weights(profile=True), weights())


def test_a_loop_that_closes_early_is_left_alone():
    model = nn.Linear(4, 3)
    optimizer = KitsuneOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), enable_amp=True, profile=True)
    loop(optimizer, model, 3)
    optimizer.close()
    loop(optimizer, model, CALIBRATION_STEPS)
    assert model._compiled_call_impl is None
    assert optimizer.report.applied == {}


def test_without_a_profile_nothing_is_measured():
    model = nn.Linear(4, 3)
    optimizer = KitsuneOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    assert optimizer.profiler is None
    stats = optimizer.get_stats()
    assert set(stats.missing.values()) == {NO_PROFILE}
    assert_reasons(stats)
    assert f"Speedup: {stats.speedup:.2f}x {stats.memory_saved_mb:.1f} MB" == "Speedup: nanx nan MB"  # as the manual
    with pytest.raises(SettingsError, match="profile=True"):
        optimizer.save_profile()
    optimizer.close()


def test_the_reason_why_nothing_was_applied_is_the_same_everywhere():
    model = nn.Linear(4, 3)
    optimizer = KitsuneOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), profile=True)
    loop(optimizer, model, 30)
    stats = optimizer.get_stats()
    assert stats.missing["speedup"] == "capture: CUDA graphs need a GPU"
    assert optimizer.profiler.get_metrics()["missing"] == stats.missing
    optimizer.close()


@pytest.mark.parametrize("steps", [0, 3, CALIBRATION_STEPS - 2, CALIBRATION_STEPS, 40])
@pytest.mark.parametrize("is_closed", [False, True])
def test_where_nothing_was_asked_for_no_number_of_steps_is_said_to_help(steps, is_closed):
    model = nn.Linear(4, 3)
    optimizer = KitsuneOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), profile=True, capture_graph=False)
    loop(optimizer, model, steps)
    if is_closed:
        optimizer.close()
    stats = optimizer.get_stats()
    assert (stats.missing["speedup"], stats.missing["planned_ms"]) == (NO_PLAN, NO_PLAN)
    assert_reasons(stats)
    optimizer.close()


@pytest.mark.parametrize("later", [0, 40])
@pytest.mark.parametrize("steps", [0, 3, CALIBRATION_STEPS - 1, CALIBRATION_STEPS])
def test_closing_before_anything_was_applied_is_the_reason(steps, later):
    model = nn.Linear(4, 3)
    # What is declined beside it is no reason why the rest of it did not run.
    options = {"enable_amp": True, "capture_graph": False, "fusion_config": FusionConfig()}
    optimizer = KitsuneOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), profile=True, **options)
    loop(optimizer, model, steps)
    short = f"the loop ran {steps} steps; {CALIBRATION_STEPS} are needed"
    few = f"0 steps ran by the plan; {LEAST_STEPS} are needed"
    assert optimizer.get_stats().missing["speedup"] == (short if steps < 10 else few)
    optimizer.close()
    loop(optimizer, model, later)
    stats = optimizer.get_stats()
    assert f"precision: {CLOSED}" in stats.missing["speedup"]
    assert stats.missing["planned_ms"] == stats.missing["speedup"]
    assert optimizer.report.declined["precision"] == CLOSED
    assert_reasons(stats)


def test_closing_after_all_was_declined_leaves_that_reason():
    model = nn.Linear(4, 3)
    optimizer = KitsuneOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), profile=True)
    loop(optimizer, model, 30)
    optimizer.close()
    assert optimizer.get_stats().missing["speedup"] == "capture: CUDA graphs need a GPU"


@pytest.mark.parametrize("is_closed", [False, True])
def test_a_plan_that_no_model_asked_for_says_why(is_closed):
    """plan="auto" is asked for by the model's forward, which never comes."""
    optimizer = KitsuneOptimizer(torch.optim.SGD(nn.Linear(4, 3).parameters(), lr=0.1), profile=True, plan="auto")
    for _ in range(2 if is_closed else 40):
        optimizer.step()
    if is_closed:
        optimizer.close()
    reason = CLOSED if is_closed else UNFOUND
    assert optimizer.report.declined == {"plan": reason}
    assert optimizer.get_stats().missing["speedup"] == f"plan: {reason}"
    optimizer.close()


def test_a_summary_tells_what_was_fused_and_what_each_is_worth():
    fusion = FusionStats(
        kept=(Kept("rms_norm", 6, Benefit(0.3, 0.1)), Kept("own", 2, None)), refused=(Refused("softmax", "too slow"),)
    )
    lines = summary_of(Report(fusion=fusion), unmeasured("no profile"), None).splitlines()
    assert "rms_norm: 6 operations, 3.00 times as fast: 0.300 ms became 0.100" in lines
    assert "own: 2 operations" in lines
    assert "softmax stays: too slow" in lines
