"""Suite budget: the kernels that take longest."""

from benchmarks.budget import longest_kernels
from kitsune.timeline import Launched, Timeline


def launched(name: int, begin_us: float, end_us: float) -> Launched:
    return Launched(name=name, stream=0, begin_us=begin_us, end_us=end_us, waits=(), used_bytes=0)


def test_launches_of_one_name_are_summed_and_the_longest_come_first():
    launches = launched(0, 0, 5), launched(1, 5, 9), launched(1, 9, 13), launched(2, 13, 14)
    timeline = Timeline(streams=1, names=("mm", "gelu", "copy"), launches=launches)
    assert longest_kernels(timeline, 2) == [("gelu", 8.0, 2), ("mm", 5.0, 1)]
    assert longest_kernels(timeline, 0) == []
