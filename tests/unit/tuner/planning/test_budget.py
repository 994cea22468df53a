import pytest

from tests.unit.tuner.machine import ENVIRONMENT, only
from tuner.measuring.protocol import Inspection
from tuner.planning.budget import (
    LONGEST_S,
    SHORT,
    SHORTEST_S,
    TIGHT,
    TRIALS,
    budget_message,
    compile_s,
    expected_trials,
    suggested_budget_s,
    trials_within,
)
from tuner.search.space import Space

EVERYTHING = Space.of()
GPU = ENVIRONMENT.model_copy(update={"device": "cuda", "gpu": "NVIDIA H200"})


def looked_at(parameters: int, step_ms: float, device: str = "cuda") -> Inspection:
    return Inspection(
        environment=GPU if device == "cuda" else ENVIRONMENT,
        fingerprint="f",
        inapplicable={},
        random=False,
        step_ms=step_ms,
        peak_bytes=1,
        parameters=parameters,
    )


@pytest.mark.parametrize(
    ("parameters", "measured_s"),
    [(100_000, 8), (25_600_000, 50), (124_000_000, 40)],  # MLP, ResNet-50, GPT-2 on an H200
)
def test_compiling_is_expected_to_take_what_it_took(parameters: int, measured_s: float) -> None:
    expected_s = compile_s(looked_at(parameters, 1.0), EVERYTHING)
    assert 0.5 < expected_s / measured_s < 2


def test_a_budget_is_a_round_number_of_minutes_and_grows_with_the_work() -> None:
    small, middle, large = (
        suggested_budget_s(looked_at(*given), EVERYTHING)
        for given in ((100_000, 1.0), (25_600_000, 60.0), (124_000_000, 160.0))
    )
    assert SHORTEST_S <= small < middle < large <= LONGEST_S
    assert all(budget_s % 30 == 0 for budget_s in (small, middle, large))
    assert 240 <= small <= 420
    assert 900 <= large <= 1500


def test_candidates_that_are_built_at_once_take_less() -> None:
    given = looked_at(124_000_000, 160.0)
    alone_s, together_s = (suggested_budget_s(given, EVERYTHING, at_once=count) for count in (1, 4))
    assert together_s < 0.6 * alone_s
    timing_s = TRIALS * 2 * 15 * 0.16
    assert suggested_budget_s(given, EVERYTHING, at_once=100) > timing_s


def test_a_space_of_few_configurations_takes_less() -> None:
    few = Space.of(only("precision=bf16"))
    assert expected_trials(few) == 2
    assert compile_s(looked_at(10**8, 1.0), few) == 0
    given = looked_at(10**6, 10.0, device="cpu")
    assert suggested_budget_s(given, few) < suggested_budget_s(given, EVERYTHING)
    assert suggested_budget_s(given, Space.of(table={})) >= SHORTEST_S


def test_no_budget_is_longer_than_an_hour() -> None:
    assert suggested_budget_s(looked_at(10**11, 60_000.0), EVERYTHING) == LONGEST_S


def test_the_user_is_told() -> None:
    assert budget_message(450.0, EVERYTHING).startswith("no budget was given: 7.5 min, enough for about 12 trials")


@pytest.mark.parametrize(
    ("parameters", "step_ms", "budget_s", "looked_s", "expected"),
    [
        (124_000_000, 86.0, 120, 25.0, (True, True)),  # GPT-2
        (124_000_000, 86.0, 300, 25.0, (False, True)),
        (124_000_000, 86.0, 400, 25.0, (False, False)),
        (134_000_000, 164.0, 120, 25.0, (True, True)),  # a Llama
        (134_000_000, 164.0, 300, 25.0, (False, True)),
        (25_600_000, 40.0, 120, 25.0, (True, True)),  # ResNet-50
        (6_600_000, 17.5, 120, 8.0, (False, True)),  # GoogLeNet
        (6_600_000, 17.5, 300, 8.0, (False, False)),
        (535_000, 2.3, 120, 25.0, (False, True)),  # an MLP
    ],
)
def test_two_minutes_are_short_for_what_compiles_for_one(
    parameters: int, step_ms: float, budget_s: float, looked_s: float, expected: tuple[bool, bool]
) -> None:
    found = trials_within(budget_s - looked_s, looked_at(parameters, step_ms), EVERYTHING)
    assert (found < SHORT, found < TIGHT) == expected
