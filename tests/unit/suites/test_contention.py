"""The model of launches that share the GPU: room of kernels, and times of schedules."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.contention import Room, between_marks, shared_us, speeds_of
from kitsune.launches.planning.candidates import WAIT_US
from kitsune.launches.planning.schedule import Placed, Schedule, in_order
from tests.unit.kitsune.launches.planning.schedules import schedules

H200 = Room(multiprocessors=132, threads=2048, registers=65536, shared_bytes=233472)


def told(grid, block=(256, 1, 1), registers=32, shared=0):
    return (
        f'"grid": {list(grid)}, "block": {list(block)}, "registers per thread": {registers}, "shared memory": {shared}'
    )


@pytest.mark.parametrize(
    ("metadata", "share"),
    [
        (told((132, 1, 1), (128, 1, 1), 128, 200_000), 1.0),  # one block on each, by its shared memory
        (told((66, 1, 1), (128, 1, 1), 128, 200_000), 0.5),
        (told((132, 1, 1)), 1 / 8),  # by 2048 threads
        (told((132, 1, 1), registers=128), 1 / 2),  # by 65536 registers
        (told((5000, 7, 1)), 1.0),
        (told((1, 1, 1), (1024, 1, 1), 255), 1 / 132),  # more registers than there are: it runs all the same
        ('"bytes": 4096', 1.0),  # a copy
    ],
)
def test_the_room_that_a_kernel_takes(metadata, share):
    assert H200.share(metadata) == pytest.approx(share)


class Event:
    def __init__(self, name, us, metadata):
        self.given = name, us * 1000, metadata

    def name(self):
        return self.given[0]

    def duration_ns(self):
        return self.given[1]

    def metadata_json(self):
        return self.given[2]


def test_a_launch_takes_the_mean_of_its_kernels_by_their_time():
    mark = Event("spin_kernel", 1, told((1, 1, 1)))
    one, other = Event("gemm", 9.7, told((1056, 1, 1))), Event("reduce", 9.7, told((528, 1, 1)))
    assert list(between_marks([one, mark, one, other, mark, mark], H200)) == pytest.approx([1.0, 0.75, 0.0])


def test_the_more_urgent_ones_get_what_they_need():
    assert speeds_of([0.6, 0.8, 0.1, 0.5]) == pytest.approx([1.0, 0.5, 0.0, 0.0])
    assert speeds_of([0.0, 1.0, 0.0]) == [1.0, 1.0, 1.0]


def side_by_side(*streams):
    """A launch on each of these streams."""
    placed = [Placed(launch, stream, (), 0.0, 0.0) for launch, stream in enumerate(streams)]
    return Schedule(max(streams) + 1, tuple(placed))


def test_launches_that_fit_beside_each_other_run_so_and_others_do_not():
    schedule = side_by_side(0, 1)
    assert shared_us(schedule, [10.0, 10.0], [0.5, 0.5]) == pytest.approx(10.0)
    assert shared_us(schedule, [10.0, 10.0], [1.0, 1.0]) == pytest.approx(20.0)
    assert shared_us(schedule, [10.0, 10.0], [0.75, 0.75]) == pytest.approx(10.0 + 10.0 * (1 - 1 / 3))


def test_the_urgent_stream_goes_first():
    schedule = Schedule(2, (Placed(0, 0, (), 0, 0), Placed(1, 1, (), 0, 0), Placed(2, 1, (1,), 0, 0)))
    assert shared_us(schedule, [10.0, 4.0, 1.0], [1.0, 1.0, 0.0], [0, -1]) == pytest.approx(14.0)


def test_a_wait_takes_its_time():
    schedule = Schedule(2, (Placed(0, 0, (), 0, 0), Placed(1, 1, (0,), 0, 0)))
    assert shared_us(schedule, [10.0, 4.0], [0.1, 0.1]) == pytest.approx(14.0 + WAIT_US)


@given(case=schedules(), seed=st.integers(0, 2**32))
def test_it_lies_between_no_contention_and_one_after_the_other(case, seed):
    graph, schedule = case
    rng = random.Random(seed)
    times_us = [float(rng.choice([0, 1, 3, rng.uniform(0, 50)])) for _ in graph.launches]
    parts = [rng.choice([0.0, 0.1, 0.5, 1.0]) for _ in graph.launches]
    urgent = [rng.choice([0, -1, -3]) for _ in range(schedule.streams)]
    found_us = shared_us(schedule, times_us, parts, urgent)
    assert found_us >= shared_us(schedule, times_us, [0.0] * len(parts)) - 1e-6
    assert found_us >= sum(us * share for us, share in zip(times_us, parts, strict=True)) - 1e-6
    assert found_us <= sum(times_us) + len(times_us) * WAIT_US + 1e-6
    assert shared_us(in_order(graph, times_us), times_us, parts) == pytest.approx(sum(times_us))
