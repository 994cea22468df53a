"""What a schedule promises of the order of its launches, by vector clocks."""

from collections.abc import Sequence

from kitsune.launches.planning.schedule import Schedule, VectorClock


def happens_before(schedule: Schedule, seen: Sequence[VectorClock], first: int, second: int) -> bool:
    """Whether the launch at issue position `first` is known to end before the one at `second` begins.

    `seen` is `clocks(schedule)`. The count of its own stream is the place of a launch on it.
    """
    stream = schedule.placed[first].stream
    return seen[second][stream] > seen[first][stream]
