"""Names of runs: unique, and sorted as time is."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuner import ids
from tuner.ids import new_id


@given(st.integers(0, 2**47 - 1), st.integers(1, 10_000))
def test_ids_sort_by_time(moment_ms, later_ms):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ids.time, "time", lambda: moment_ms / 1000)
        first = new_id()
        patch.setattr(ids.time, "time", lambda: (moment_ms + later_ms + 1) / 1000)
        second = new_id()
    assert first < second
    assert len(first) == len(second) == 26
    assert set(first + second) <= set(ids.ALPHABET)


def test_ids_are_unique():
    assert len({new_id() for _ in range(5000)}) == 5000
