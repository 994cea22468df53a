import pytest

from kitsune.knobs import Choice
from tests.unit.tuner.machine import ENVIRONMENT, numerics
from tests.unit.tuner.simulation import trial
from tuner.planning.playoff import FEW, MANY, MAX_RANKING_NOISE, contenders_of, ranking_noise, yardstick_noise
from tuner.records import Arm, Measurement, Trial

COMPILED: dict[str, Choice] = {"compile": "default"}


def timed(number: int, baseline: dict[str, Choice], baseline_ms: float, speedup: float = 2.0) -> Trial:
    """A trial whose baseline is this configuration."""
    knobs: dict[str, Choice] = {"precision": "bf16"}
    arms = tuple(
        Arm(name=name, knobs=chosen, step_ms=(ms, ms, ms), peak_bytes=1, first_step_s=1.0)
        for name, chosen, ms in (("baseline", baseline, baseline_ms), ("candidate", knobs, baseline_ms / speedup))
    )
    found = Measurement(arms=arms, steps_per_block=(1, 1), numerics=numerics(1e-6), environment=ENVIRONMENT)
    return trial(number, knobs, speedup=speedup).model_copy(update={"measurement": found})


def test_noise_is_the_widest_spread_of_one_yardstick() -> None:
    eager = [timed(0, {}, 10.0), timed(1, {}, 10.2)]
    assert yardstick_noise(eager) == pytest.approx(0.02)
    assert yardstick_noise([*eager, timed(2, COMPILED, 2.0)]) == pytest.approx(0.02), "of another configuration"
    assert yardstick_noise([*eager, timed(2, COMPILED, 2.0), timed(3, COMPILED, 2.2)]) == pytest.approx(0.1)
    assert yardstick_noise([timed(0, {}, 10.0), timed(1, {}, 99.0)]) == MAX_RANKING_NOISE
    assert yardstick_noise([timed(0, {}, 10.0), timed(1, COMPILED, 2.0)]) == yardstick_noise([]) == 0.0


def test_what_the_host_launches_makes_little_noise_among_captured_steps() -> None:
    captured: dict[str, Choice] = {"capture": "step"}
    trials = [timed(0, {}, 10.0), timed(1, {}, 12.0), timed(2, captured, 2.0), timed(3, captured, 2.002)]
    assert ranking_noise(trials, timed(4, {}, 10.0)) == yardstick_noise(trials) == pytest.approx(0.2)
    leader = trials[0].model_copy(update={"knobs": captured})
    assert ranking_noise(trials, leader) < 0.01
    assert ranking_noise([*trials, timed(5, captured, 2.3)], leader) == pytest.approx(0.15), "captured steps differ too"


def test_contenders_are_those_that_noise_may_have_put_in_the_wrong_order() -> None:
    trials = [timed(0, {}, 10.0, 2.0), timed(1, {}, 10.2, 2.01), timed(2, COMPILED, 5.0, 1.5)]
    assert [each.number for each in contenders_of(trials)] == [1, 0]
    alike = [timed(number, {}, 10.0 + number / 100, 2.0) for number in range(12)]
    assert len(contenders_of(alike)) == FEW
    assert len(contenders_of(alike, lambda some: 2.0 * len(some), within_s=11.0)) == 5, "more where they are cheap"
    assert len(contenders_of(alike, within_s=1e9)) == MANY
    assert contenders_of([]) == []
