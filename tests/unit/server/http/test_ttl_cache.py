"""TtlCache: keys are separate, values expire, the size is bounded, and errors are not cached."""

import asyncio
import threading
from types import SimpleNamespace

import pytest

from server.http import ttl_cache
from server.http.ttl_cache import TtlCache


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(ttl_cache, "time", SimpleNamespace(monotonic=lambda: self.now))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def refuse():
    raise AssertionError("asked again")


def test_an_answer_is_remembered_for_its_own_key_only(clock):
    known = TtlCache(1.0, 10)

    async def ask():
        assert await known.get("a", lambda: 1) == 1
        assert await known.get("b", lambda: 2) == 2
        assert [await known.get("a", refuse), await known.get("b", refuse)] == [1, 2]
        with pytest.raises(AssertionError, match="asked again"):
            await known.get("c", refuse)

    asyncio.run(ask())


def test_an_answer_is_forgotten_its_time_after_it_was_asked_for(clock):
    """Not from the end of the query: the value may be as old as its start."""
    known = TtlCache(1.0, 10)

    def slow():
        clock.now += 0.4
        return 1

    async def ask():
        assert await known.get("a", slow) == 1
        clock.now += 0.59
        assert await known.get("a", refuse) == 1
        clock.now += 0.01
        assert await known.get("a", lambda: 2) == 2

    asyncio.run(ask())


def test_what_is_used_is_not_remembered_for_longer(clock):
    known = TtlCache(1.0, 10)

    async def ask():
        for asked in range(5):
            assert await known.get("a", lambda: clock.now) == (100.0 if asked < 4 else 101.0)
            clock.now += 0.25

    asyncio.run(ask())


def test_nothing_and_errors_are_not_remembered(clock):
    known = TtlCache(1.0, 10)

    def fail():
        raise ValueError("no")

    async def ask():
        for _ in range(2):
            with pytest.raises(ValueError, match="no"):
                await known.get("a", fail)
            assert await known.get("a", lambda: None) is None
        assert len(known) == 0
        assert await known.get("a", lambda: 1) == 1

    asyncio.run(ask())


def test_nothing_forgets_what_was(clock):
    known = TtlCache(1.0, 10)

    async def ask():
        await known.get("a", lambda: 1)
        clock.now += 1
        await known.get("a", lambda: None)
        clock.now -= 1
        assert await known.get("a", lambda: 2) == 2

    asyncio.run(ask())


def test_the_oldest_make_room(clock):
    known = TtlCache(10.0, 3)

    async def ask():
        for number in range(100):
            await known.get(number, lambda number=number: number)
            assert len(known) <= 3
        assert [await known.get(number, refuse) for number in (97, 98, 99)] == [97, 98, 99]

    asyncio.run(ask())


def test_two_threads_use_it_at_once():
    """Each with its own event loop; more keys than fit, so that both evict all the time."""
    known = TtlCache(10.0, 5)
    wrong: list[object] = []

    async def ask(numbers):
        found = [(number % 11, await known.get(number % 11, lambda number=number: number % 11)) for number in numbers]
        wrong.extend((asked, given) for asked, given in found if asked != given)

    def work(step):
        try:
            asyncio.run(ask(range(0, 500 * step, step)))
        except RuntimeError as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(step,)) for step in (1, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert wrong == []
    assert len(known) <= 5
