"""The pool on streams that are played on the host."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kitsune.errors import CaptureError
from kitsune.memory import MemoryPool
from kitsune.memory import pool as pool_module
from tests.unit.kitsune.memory.played import PlayedOrder

CPU = "cpu"


@pytest.fixture
def order(monkeypatch):
    played = PlayedOrder()
    monkeypatch.setattr(pool_module, "order_of", lambda device: played)
    return played


def test_the_same_stream_has_its_block_again_without_a_wait(order):
    pool = MemoryPool(4096, device=CPU)
    address = pool.allocate(64).data_ptr()
    assert pool.allocate(64).data_ptr() == address
    assert order.waits == []


def test_another_stream_waits_for_the_one_that_had_the_block(order):
    pool = MemoryPool(4096, device=CPU)
    address = pool.allocate(64).data_ptr()
    order.stream = "b"
    assert pool.allocate(64).data_ptr() == address
    assert order.waits == [("b", "a")]
    assert (address, "b") in order.held


def test_the_stream_on_which_it_was_let_go_of_counts_too(order):
    pool = MemoryPool(4096, device=CPU)
    tensor = pool.allocate(64)
    order.stream = "b"
    pool.free(tensor)
    order.stream = "a"
    pool.allocate(64)
    assert order.waits == [("a", "b")]


def test_a_block_of_the_own_stream_is_preferred(order):
    pool = MemoryPool(4096, device=CPU)
    first = pool.allocate(64)
    order.stream = "b"
    second = pool.allocate(64)
    address = second.data_ptr()
    order.stream = "a"
    del first
    order.stream = "b"
    del second
    assert pool.allocate(64).data_ptr() == address
    assert order.waits == []


def test_nothing_is_allocated_during_a_capture(order):
    pool = MemoryPool(4096, device=CPU)
    order.capturing = {"a"}
    with pytest.raises(CaptureError, match="before the capture"):
        pool.allocate(64)


@pytest.mark.parametrize("release", ["drop", "free"])
def test_a_block_let_go_of_during_a_capture_is_not_used_again(order, release):
    pool = MemoryPool(4096, device=CPU)
    tensor = pool.allocate(64)
    order.capturing = {"a"}
    if release == "free":
        pool.free(tensor)
    del tensor
    assert pool.stats.used_bytes == pool.stats.reserved_bytes == 0
    order.capturing = set()
    pool.allocate(64)
    assert pool.stats.hits == 0


turns = st.tuples(st.sampled_from("abc"), st.sampled_from(["allocate", "drop", "free"]), st.integers(0, 99))


@given(st.lists(turns, max_size=40))
@settings(max_examples=80)
def test_no_stream_ever_writes_to_what_another_may_still_be_using(script):
    order = PlayedOrder()
    pool = MemoryPool(1 << 20, device=CPU)
    pool._order = order
    alive, last_use = [], {}
    for stream, action, number in script:
        order.stream = stream
        if action == "allocate":
            tensor = pool.allocate(64 + 128 * (number % 2))
            assert order.knows(stream, last_use.get(tensor.data_ptr(), (stream, 0)))
            last_use[tensor.data_ptr()] = order.work()
            alive.append(tensor)
            del tensor
        elif alive:
            tensor = alive.pop(number % len(alive))
            # Whoever lets go of it may have used it, after what its own stream did with it.
            order.wait(stream, order.mark([last_use[tensor.data_ptr()][0]]))
            last_use[tensor.data_ptr()] = order.work()
            if action == "free":
                pool.free(tensor)
            del tensor
    assert pool.stats.used_bytes == sum(512 if tensor.numel() == 64 else 1024 for tensor in alive)
