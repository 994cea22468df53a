import math
import random
import time
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings

from kitsune.knobs import Choice
from tests.unit.tuner.search.test_space import EVERYTHING, configurations, small_spaces
from tuner.search.main_effects import WORTH, improvement, promising
from tuner.search.space import Configuration, Space

TRUE = {("precision", "bf16"): -0.5, ("compile", "default"): -0.2, ("layout", "channels_last"): 0.1}


def cost(knobs: Configuration) -> float:
    return sum(TRUE.get(item, 0.0) for item in knobs.items())


def costs(*tried: dict[str, Choice]) -> list[tuple[Configuration, float]]:
    return [(knobs, cost(knobs)) for knobs in tried]


@pytest.mark.minutes
@settings(max_examples=15)
@given(small_spaces)
def test_the_grid_is_every_allowed_configuration(space: Space) -> None:
    grid = space.grid()
    found = {frozenset(grid.knobs(number).items()) for number in range(len(grid.rows))}
    searchable = space.searchable()
    every = (dict(zip(searchable, chosen, strict=True)) for chosen in product(*searchable.values()))
    assert found == {space.key(knobs) for knobs in every if space.allows(knobs) is None}
    assert len(found) == len(grid) == len(list(grid))


@settings(max_examples=20)
@given(configurations)
def test_a_configuration_is_the_row_that_the_grid_has_of_it(knobs: dict[str, Choice]) -> None:
    wanted = EVERYTHING.repair({name: c for name, c in knobs.items() if EVERYTHING.table[name].is_searched(c)})
    grid = EVERYTHING.grid()
    [number] = np.flatnonzero((grid.rows == grid.row(wanted)).all(axis=1))
    assert grid.knobs(int(number)) == wanted


def test_what_gives_most_is_put_together() -> None:
    tried = costs({}, {"precision": "bf16"}, {"compile": "default"}, {"layout": "channels_last"})
    found = next(promising(EVERYTHING, tried))
    assert found["precision"] == "bf16"
    assert "layout" not in found


def test_a_choice_that_was_never_tried_is_worth_a_trial() -> None:
    known = [{"precision": choice} for choice in ("tf32", "bf16", "fp16")]
    found = next(promising(EVERYTHING, costs({}, *known)))
    assert set(found) - {"precision"}


def test_where_everything_is_known_nothing_but_the_best_is_worth_a_trial() -> None:
    names = ("layout", "precision")
    table = {name: EVERYTHING.table[name] for name in names}
    small = Space.of(table=table)
    tried = list(small.configurations())
    assert list(promising(small, costs(*tried * 20))) == [{"precision": "bf16"}]
    assert list(promising(Space.of(table={}), costs({}))) in ([], [{}])


def test_what_is_being_measured_is_not_asked_again_in_another_guise() -> None:
    tried = costs({}, {"precision": "bf16"}, {"compile": "default"}, {"precision": "bf16", "compile": "default"})
    first = next(promising(EVERYTHING, tried))
    second = next(promising(EVERYTHING, tried, [first]))
    assert second != first
    untried = set(first.items()) - {item for knobs, _ in tried for item in knobs.items()}
    assert not untried <= set(second.items())


def test_slow_trials_weigh_less() -> None:
    """Without compiling the layout costs; near the best it gains."""
    near = {"precision": "bf16", "compile": "default"}
    tried: list[tuple[Configuration, float]] = [
        ({}, 0.0),
        ({"layout": "channels_last"}, 0.3),
        (near, -2.0),
        ({**near, "layout": "channels_last"}, -2.2),
    ]
    assert next(promising(EVERYTHING, tried))["layout"] == "channels_last"


def test_the_improvement_is_that_of_the_normal_distribution() -> None:
    rng = random.Random(0)
    drawn = [max(0.0, -0.1 - rng.gauss(-0.05, 0.2)) for _ in range(200_000)]
    [found] = improvement(np.array([-0.05]), np.array([0.2]), -0.1)
    assert found == pytest.approx(sum(drawn) / len(drawn), rel=0.02)
    assert improvement(np.array([1.0]), np.array([0.01]), 0.0)[0] == pytest.approx(0.0, abs=1e-12)
    assert improvement(np.array([-1.0]), np.array([0.01]), 0.0)[0] == pytest.approx(1.0)


def test_the_highest_comes_first_and_nothing_below_what_is_worth_it() -> None:
    tried = costs({}, {"precision": "bf16"}, {"compile": "default"})
    found = list(promising(EVERYTHING, tried))
    assert 0 < len(found) <= len(list(EVERYTHING.configurations()))
    assert 0 < WORTH < math.log(1.03)


def test_all_configurations_are_looked_at_in_a_fifth_of_a_second() -> None:
    tried = costs({}, {"precision": "bf16"}, {"compile": "default"})
    durations = []
    for _ in range(5):
        begin = time.process_time()
        next(promising(EVERYTHING, tried))
        durations.append(time.process_time() - begin)
    assert min(durations) < 0.2
