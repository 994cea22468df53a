import time
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kitsune.base.backoff import pauses, rest, retried, within

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


def failing(times: int):
    """Answers after so many failures."""
    left = [times]

    def ask() -> str:
        if left[0]:
            left[0] -= 1
            raise LookupError(f"{left[0]} left")
        return "answer"

    return ask


@pytest.mark.parametrize("times", range(4))
def test_it_asks_again_while_there_are_pauses(times):
    failures: list[Exception] = []
    assert retried(failing(times), LookupError, [0.0] * 3, failures.append) == "answer"
    assert len(failures) == times


def test_the_last_failure_is_raised():
    with pytest.raises(LookupError, match="0 left"):
        retried(failing(4), LookupError, [0.0] * 3)


def test_other_errors_are_not_tried_again():
    with pytest.raises(LookupError, match="3 left"):
        retried(failing(4), ValueError, [0.0] * 3)


def test_pauses_end_in_time():
    begin = time.monotonic()
    for wait_s in within(0.05, pauses(0.01, 0.01)):
        time.sleep(wait_s)
    assert 0.05 <= time.monotonic() - begin < 20
