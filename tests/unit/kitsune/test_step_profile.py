"""What profile=True measures: true medians of steps as given and by the plan, or the reason why there is none."""

import itertools
import json
import math

import pytest
import torch
from torch import nn

from kitsune import KitsuneOptimizer
from kitsune.errors import SettingsError
from kitsune.optimizer import NO_PROFILE
from kitsune.step_profile import CALIBRATION_STEPS, COLD_STEPS, GIVEN, KEPT_STEPS, LEAST_STEPS, PLANNED, StepProfile

CPU = torch.device("cpu")


def profile_of(monkeypatch, given_s, planned_s, planned_steps, settling_steps=3):
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
    profile = StepProfile(CPU)
    for _ in range(CALIBRATION_STEPS + settling_steps - 1):
        profile.mark(by_plan=False)
    for _ in range(planned_steps + 1):
        profile.mark(by_plan=True)
    return profile


def test_medians_of_settled_steps_make_the_speedup(monkeypatch):
    stats = profile_of(monkeypatch, 0.008, 0.002, 20).stats("")
    assert stats.given_ms == pytest.approx(8.0)
    assert stats.planned_ms == pytest.approx(2.0)
    assert stats.speedup == pytest.approx(4.0)
    assert (stats.given_steps, stats.planned_steps) == (CALIBRATION_STEPS - COLD_STEPS - 1, 20)
    assert "4 x" in str(stats)


def test_a_slower_plan_is_said_to_be_slower(monkeypatch):
    assert profile_of(monkeypatch, 0.002, 0.004, 9).stats("").speedup == pytest.approx(0.5)


def test_too_few_steps_by_the_plan_make_no_number(monkeypatch):
    profile = profile_of(monkeypatch, 0.008, 0.002, LEAST_STEPS - 1)
    stats = profile.stats("")
    assert math.isnan(stats.speedup)
    assert stats.missing["planned_ms"] == f"{LEAST_STEPS - 1} steps ran by the plan; {LEAST_STEPS} are needed"
    assert profile.stats("capture: no GPU").missing["planned_ms"] == "capture: no GPU"
    assert f"{stats.speedup:.2f}x" == "nanx"  # as the manual prints it


def test_memory_of_a_cpu_is_not_counted_and_says_so(monkeypatch):
    stats = profile_of(monkeypatch, 0.008, 0.002, 9).stats("")
    assert math.isnan(stats.memory_saved_mb)
    assert stats.missing == {"memory_saved_mb": "torch does not count memory on a CPU"}


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
    assert set(optimizer.get_stats().missing.values()) == {NO_PROFILE}
    with pytest.raises(SettingsError, match="profile=True"):
        optimizer.save_profile()
    optimizer.close()
