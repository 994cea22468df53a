import time
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuner.worker.backoff import pauses, rest

SECONDS = st.floats(min_value=1e-3, max_value=1e3)


@given(SECONDS, SECONDS)
def test_pauses_double_up_to_the_limit(one, other):
    first, most = sorted((one, other))
    whole = first
    for pause in islice(pauses(first, most), 30):
        assert whole / 2 <= pause <= whole
        whole = min(most, 2 * whole)
    assert whole == most


def test_two_workers_do_not_come_back_together():
    assert list(islice(pauses(1, 8), 5)) != list(islice(pauses(1, 8), 5))


def test_a_rest_takes_its_time():
    begin = time.monotonic()
    rest(0.25, lambda: None)
    assert 0.25 <= time.monotonic() - begin < 20


def test_a_rest_ends_when_the_check_says_so():
    def check() -> None:
        raise LookupError

    begin = time.monotonic()
    with pytest.raises(LookupError):
        rest(50, check)
    assert time.monotonic() - begin < 20
