"""kitsune/capture/program_cache.py: which batch signatures get a program of their own, and when."""

from collections.abc import Iterable
from itertools import count

import pytest

from kitsune.capture.program_cache import MAX_SEEN, MAX_UNCOUNTED, PATIENCE, ProgramCache


def asked(cache: ProgramCache[int], keys: Iterable[object]) -> list[int | None]:
    """The programs that these batches run by, None for the plain step."""
    found = []
    for key in keys:
        program = cache.find(key)
        found.append(cache.admit(key) if program is None else program)
    return found


@pytest.fixture
def cache() -> ProgramCache[int]:
    numbers = count()
    return ProgramCache(2, lambda: next(numbers))


def test_the_first_signature_has_a_program_at_once(cache):
    assert asked(cache, "aaa") == [0, 0, 0]
    assert cache.current == 0
    assert len(cache) == 1


def test_another_one_has_to_be_frequent(cache):
    assert asked(cache, "a" + "b" * (PATIENCE + 2)) == [0, *[None] * PATIENCE, 1, 1]
    assert list(cache) == [0, 1]


def test_batches_of_other_signatures_need_not_follow_each_other(cache):
    found = asked(cache, "a" + "bc" * PATIENCE + "b")
    assert found[-1] == 1
    assert set(found[1:-1]) == {None}


def test_there_are_no_more_than_asked_for(cache):
    asked(cache, "a" + "b" * (PATIENCE + 1))
    assert set(asked(cache, "c" * 3 * PATIENCE)) == {None}
    assert not cache.is_rare("c")
    assert cache.is_rare("d")


def test_current_is_the_program_of_the_last_batch_that_had_one(cache):
    asked(cache, "a" + "b" * (PATIENCE + 1) + "a")
    assert cache.current == 0
    asked(cache, "c")
    assert cache.current == 0
    asked(cache, "b")
    assert cache.current == 1


def test_what_is_forgotten_is_made_anew_at_once(cache):
    asked(cache, "a" + "b" * (PATIENCE + 1))
    cache.forget(1)
    assert cache.current is None
    assert asked(cache, "b") == [2]


def test_nothing_is_left_when_it_is_cleared(cache):
    asked(cache, "a" + "b" * (PATIENCE + 1))
    cache.clear()
    assert (list(cache), cache.current) == ([], None)
    assert asked(cache, "ba") == [2, None]


def test_signatures_without_end_take_no_memory_without_end(cache):
    asked(cache, ["a", *range(10 * MAX_SEEN)])
    assert len(cache._seen) <= MAX_SEEN


def test_programs_that_are_not_counted_take_no_place_of_others():
    numbers = count()
    cache = ProgramCache(2, lambda: next(numbers), lambda number: number % 2 == 1)
    asked(cache, [key for key in range(5) for _ in range(PATIENCE + 1)])
    assert list(cache) == [0, 1, 2, 3], "two are counted: no more"


def test_those_that_are_not_counted_are_bounded_too():
    cache = ProgramCache(2, object, lambda _: False)
    asked(cache, [key for key in range(5 * MAX_UNCOUNTED) for _ in range(PATIENCE + 1)])
    assert len(cache) == MAX_UNCOUNTED
