import contextlib
import gc
import threading
import time
import traceback
import weakref
from collections import OrderedDict, namedtuple

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from kitsune.errors import SettingsError, UnfitError
from kitsune.memory import Prefetcher, prefetch

SOON_S = 20.0  # for what takes milliseconds, on a machine that is busy


def ahead(loader, lookahead=2):
    return Prefetcher(device="cpu", lookahead=lookahead).wrap(loader)


def workers():
    return [thread for thread in threading.enumerate() if thread.name == "kitsune-prefetch"]


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    assert until(lambda: not workers())


def until(holds):
    """Whether it holds soon."""
    end = time.monotonic() + SOON_S
    while not holds() and time.monotonic() < end:
        time.sleep(0.001)
    return holds()


class Counting:
    """A loader that counts what was taken from it."""

    def __init__(self, length):
        self.length = length
        self.taken = 0

    def __iter__(self):
        for number in range(self.length):
            self.taken += 1
            yield number


class Blocking:
    """A loader that gives one batch, and for the second blocks until it is released; then it gives more."""

    def __init__(self):
        self.taken = 0
        self.blocks = threading.Event()
        self.released = threading.Event()
        self.ended = threading.Event()

    def __iter__(self):
        try:
            yield 0
            self.blocks.set()
            self.released.wait(60)
            for number in range(1, 100):
                self.taken += 1
                yield number
        finally:
            self.ended.set()


# What comes out -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lookahead", [1, 2, 7])
@pytest.mark.parametrize("length", [0, 1, 2, 3, 20])
def test_all_batches_come_in_their_order(length, lookahead):
    assert list(ahead(range(length), lookahead)) == list(range(length))


def test_a_data_loader_gives_the_same_batches_as_alone():
    data = TensorDataset(torch.arange(20.0).reshape(10, 2), torch.arange(10))
    loader = DataLoader(data, batch_size=3, shuffle=True)
    torch.manual_seed(3)
    alone = list(loader)
    torch.manual_seed(3)
    fetched = list(ahead(loader))
    assert len(fetched) == 4
    assert all(
        torch.equal(a, b) for one, two in zip(alone, fetched, strict=True) for a, b in zip(one, two, strict=True)
    )


def test_two_batches_take_no_minute_to_end():
    """The namesake waited 60 s for a batch after the last one, in every epoch."""
    start = time.monotonic()
    assert len(list(ahead([1, 2]))) == 2
    assert time.monotonic() - start < SOON_S


Pair = namedtuple("Pair", ["left", "right"])


class Own:
    def __init__(self):
        self.tensor = torch.ones(2)


def test_batches_of_any_nesting_come_as_they_are():
    x = torch.ones(2)
    batches = [
        Pair(x, [x, {"k": (x, None)}]),
        OrderedDict(b=x, a="text"),
        Own(),
        None,
        7,
        [],
    ]
    fetched = list(ahead(batches))
    assert all(one is two for one, two in zip(fetched, batches, strict=True))


def test_it_is_as_long_as_the_loader():
    assert len(ahead(range(5))) == 5
    with pytest.raises(TypeError, match=r"'generator' has no len\(\)"):
        len(ahead(number for number in range(5)))


def test_every_iteration_begins_anew():
    batches = ahead(Counting(3))
    assert [list(batches), list(batches)] == [[0, 1, 2], [0, 1, 2]]


def test_two_iterations_at_once_are_independent():
    batches = ahead(range(6))
    one, two = iter(batches), iter(batches)
    assert [next(one), next(one), next(two), next(one), next(two)] == [0, 1, 0, 2, 1]
    one.close()
    assert list(two) == [2, 3, 4, 5]


def test_the_end_stays_the_end():
    batches = iter(ahead([1]))
    assert list(batches) == [1]
    assert next(batches, "end") == "end"


@pytest.mark.parametrize("lookahead", [0, -1, 1.5, True, None])
def test_a_lookahead_below_one_is_refused(lookahead):
    with pytest.raises(SettingsError, match="lookahead is"):
        Prefetcher(lookahead=lookahead)


def test_a_device_that_is_not_there_is_refused():
    with pytest.raises(UnfitError):
        Prefetcher(device="tpu")


# How far ahead --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lookahead", [1, 2, 5])
def test_just_so_many_batches_are_taken_ahead(lookahead):
    loader = Counting(50)
    batches = iter(ahead(loader, lookahead))
    for received in range(10):
        assert until(lambda expected=received + lookahead: loader.taken == expected)
        time.sleep(0.002)
        assert loader.taken == received + lookahead
        assert next(batches) == received
    batches.close()


def test_batches_are_taken_while_the_consumer_works():
    loader = Counting(5)
    batches = iter(ahead(loader))
    assert next(batches) == 0
    assert until(lambda: loader.taken == 3)
    batches.close()


def test_a_batch_belongs_to_the_consumer_alone():
    def loader():
        for _ in range(3):
            yield Own()

    for batch in ahead(loader(), 1):
        alive = weakref.ref(batch)
        del batch
        assert until(lambda alive=alive: alive() is None)


# Errors ---------------------------------------------------------------------------------------------------------------


class Broken(Exception):
    pass


def broken_after(count, error):
    yield from range(count)
    raise error


@pytest.mark.parametrize("count", [0, 1, 4])
@pytest.mark.parametrize("kind", [Broken, SystemExit, KeyboardInterrupt])
def test_an_error_comes_where_its_batch_would_have_come(count, kind):
    received = []
    with pytest.raises(kind, match="injected") as caught:
        received.extend(ahead(broken_after(count, kind("injected"))))
    assert received == list(range(count))
    assert "broken_after" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]


def test_after_an_error_the_iteration_is_over(monkeypatch):
    monkeypatch.setattr(prefetch, "JOIN_S", SOON_S)
    batches = iter(ahead(broken_after(1, Broken())))
    assert next(batches) == 0
    with pytest.raises(Broken):
        next(batches)
    assert list(batches) == []
    assert not workers()


def test_nothing_is_taken_after_an_error():
    taken = []

    class Loader:
        def __iter__(self):
            return self

        def __next__(self):
            taken.append(1)
            raise Broken

    with pytest.raises(Broken):
        list(ahead(Loader(), 5))
    assert taken == [1]


def test_a_loader_that_cannot_begin_raises_at_once():
    with pytest.raises(TypeError, match="not iterable"):
        iter(ahead(5))


def test_an_error_is_no_cycle_that_keeps_the_consumer_alive():
    def loader():
        yield from ()
        raise Broken

    gc.disable()
    try:
        with contextlib.suppress(Broken):
            try:
                list(ahead(loader()))
            except Broken as error:
                alive = weakref.ref(error)
                raise
        assert until(lambda: alive() is None)
    finally:
        gc.enable()


# Leaving early --------------------------------------------------------------------------------------------------------


class Tracked:
    """An iterator whose end can be seen."""

    def __init__(self):
        self.iterators = weakref.WeakSet()

    def __iter__(self):
        numbers = Endless()
        self.iterators.add(numbers)
        return numbers


class Endless:
    def __init__(self):
        self.count = 0

    def __iter__(self):
        return self

    def __next__(self):
        self.count += 1
        return self.count


def leave_by_break(batches):
    for batch in batches:
        if batch == 3:
            break


def leave_by_error(batches):
    with contextlib.suppress(Broken):
        for batch in batches:
            if batch == 3:
                raise Broken


def leave_by_dropping(batches):
    iterator = iter(batches)
    next(iterator)
    del iterator


def leave_unused(batches):
    iter(batches)


def leave_by_closing(batches):
    iterator = iter(batches)
    next(iterator)
    iterator.close()
    iterator.close()
    assert list(iterator) == []


def leave_in_a_cycle(batches):
    ring = [iter(batches)]
    ring.append(ring)
    next(ring[0])
    del ring
    gc.collect()


WAYS = [leave_by_break, leave_by_error, leave_by_dropping, leave_unused, leave_by_closing, leave_in_a_cycle]


@pytest.mark.parametrize("leave", WAYS)
def test_leaving_early_ends_the_thread_and_lets_go_of_the_loader(leave, monkeypatch):
    monkeypatch.setattr(prefetch, "JOIN_S", SOON_S)
    loader = Tracked()
    start = time.monotonic()
    leave(ahead(loader))
    assert time.monotonic() - start < SOON_S
    assert not workers()
    assert len(loader.iterators) == 0


def test_leaving_a_loader_that_blocks_is_prompt_and_its_thread_ends_later(monkeypatch):
    monkeypatch.setattr(prefetch, "JOIN_S", 0.05)
    loader = Blocking()
    start = time.monotonic()
    for _ in ahead(loader, 5):
        assert loader.blocks.wait(SOON_S)
        break
    assert time.monotonic() - start < SOON_S
    assert len(workers()) == 1  # nobody can interrupt it
    loader.released.set()
    assert until(lambda: not workers())
    assert loader.ended.is_set()
    assert loader.taken == 1  # of the five that were ordered


def test_the_collector_may_find_the_iterator_in_the_thread_itself():
    """It must not wait for itself."""
    ends = []

    class Loader:
        def __init__(self):
            self.kept = []
            self.go = threading.Event()

        def __iter__(self):
            self.go.wait(SOON_S)
            self.kept.clear()
            gc.collect()
            ends.append(threading.current_thread().name)
            yield 1

    loader = Loader()
    batches = iter(ahead(loader))
    alive = weakref.ref(batches)
    loader.kept.append(batches)
    del batches
    loader.go.set()
    assert until(lambda: alive() is None and not workers())
    assert ends == ["kitsune-prefetch"]
