"""Suite orders: bands of slack are orders of the same launches, and slack is what it says."""

import itertools
import random

import pytest

from benchmarks.orders import BANDS, STREAMS, banded, slacks_us
from kitsune.launches.planning.schedule import clocks, critical_path, critical_path_us
from tests.unit.kitsune.launches.order import happens_before
from tests.unit.kitsune.launches.steps import adamw, recorded, warmed


@pytest.fixture
def way():
    step, _ = warmed("branches", adamw)
    return recorded(step)


@pytest.fixture
def costs_us(way):
    chance = random.Random(1)
    return [chance.uniform(1.0, 9.0) for _ in way.calls]


@pytest.mark.parametrize("shares", BANDS)
def test_what_needs_another_launch_is_ordered_behind_it(way, costs_us, shares):
    schedule = banded(way, costs_us, shares).schedule
    seen = clocks(schedule)
    at = {placed.launch: position for position, placed in enumerate(schedule.placed)}
    assert at.keys() == set(range(len(way.calls)))
    for launch, needed in enumerate(way.graph.after):
        for before in needed:
            same = schedule.placed[at[before]].stream == schedule.placed[at[launch]].stream
            assert (same and at[before] < at[launch]) or happens_before(schedule, seen, at[before], at[launch])


@pytest.mark.parametrize("shares", BANDS)
def test_the_critical_path_is_apart_and_a_band_of_less_slack_is_more_urgent(way, costs_us, shares):
    plan = banded(way, costs_us, shares)
    slack_us = slacks_us(way, costs_us)
    on = [[] for _ in range(plan.schedule.streams)]
    for placed in plan.schedule.placed:
        on[placed.stream].append(placed.launch)
    assert len(plan.priorities) == plan.schedule.streams <= STREAMS
    assert on[0] == list(critical_path(way.graph, costs_us))
    bands = [on[stream] + on[stream + 1] for stream in range(1, plan.schedule.streams, 2)]
    urgencies = [plan.priorities[stream] for stream in range(1, plan.schedule.streams, 2)]
    assert urgencies == sorted(urgencies)
    filled = [band for band in bands if band]
    for urgent, patient in itertools.pairwise(filled):
        assert max(slack_us[launch] for launch in urgent) <= min(slack_us[launch] for launch in patient)


def test_a_launch_that_takes_longer_by_its_slack_makes_the_step_no_longer(way, costs_us):
    length_us = critical_path_us(way.graph, costs_us)
    for launch, slack_us in enumerate(slacks_us(way, costs_us)):
        longer = [us + slack_us * (one == launch) for one, us in enumerate(costs_us)]
        assert critical_path_us(way.graph, longer) == pytest.approx(length_us)
        longest = [us + (slack_us + 1.0) * (one == launch) for one, us in enumerate(costs_us)]
        assert critical_path_us(way.graph, longest) == pytest.approx(length_us + 1.0)
