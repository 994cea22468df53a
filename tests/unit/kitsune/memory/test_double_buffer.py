from collections import namedtuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kitsune.errors import CaptureError, SettingsError, UnfitError
from kitsune.memory import DoubleBuffer, double_buffer
from tests.unit.kitsune.memory.played import PlayedOrder

Pair = namedtuple("Pair", ["left", "right"])


def buffered(batches, buffer):
    """The batches as a loop that copies the next while it works on this one sees them."""
    batches = iter(batches)
    buffer.prefetch_next(next(batches))
    for batch in batches:
        current = buffer.get_current()
        buffer.prefetch_next(batch)
        yield current
    yield buffer.get_current()


def test_every_batch_comes_out_as_it_went_in():
    batches = [torch.full((4, 3), float(number)) for number in range(5)]
    seen = [current.clone() for current in buffered(batches, DoubleBuffer(48, device="cpu"))]
    assert [batch.tolist() for batch in seen] == [batch.tolist() for batch in batches]


def test_batches_lie_in_two_places_in_turn():
    buffer = DoubleBuffer("1KB", device="cpu")
    places = [current.data_ptr() for current in buffered([torch.ones(3)] * 6, buffer)]
    assert places == places[:2] * 3
    assert len(set(places)) == 2


def test_a_batch_stays_while_the_next_is_copied():
    buffer = DoubleBuffer(64, device="cpu")
    buffer.prefetch_next(torch.ones(4))
    current = buffer.get_current()
    buffer.prefetch_next(torch.zeros(4))
    assert current.tolist() == [1.0] * 4
    assert buffer.get_current().tolist() == [0.0] * 4
    assert current.tolist() == [1.0] * 4
    buffer.prefetch_next(torch.full((4,), 2.0))
    assert current.tolist() == [2.0] * 4


def test_a_nesting_keeps_its_form_dtypes_and_layouts():
    image = torch.arange(2 * 3 * 4 * 4.0).reshape(2, 3, 4, 4).to(memory_format=torch.channels_last)
    batch = {"pair": Pair(image, torch.arange(5)), "rest": [torch.tensor(True), torch.empty(0), "text", None, 3]}
    buffer = DoubleBuffer("64KB", device="cpu")
    buffer.prefetch_next(batch)
    got = buffer.get_current()
    assert type(got["pair"]) is Pair and got["rest"][2:] == ["text", None, 3]
    tensors = [*batch["pair"], *batch["rest"][:2]]
    for one, two in zip([*got["pair"], *got["rest"][:2]], tensors, strict=True):
        assert torch.equal(one, two) and (one.dtype, one.stride()) == (two.dtype, two.stride())
        assert one.data_ptr() != two.data_ptr() or not one.numel()
    assert not got["pair"].left.requires_grad


def test_an_expanded_or_differentiable_tensor_is_copied_whole():
    batch = [torch.arange(3.0).expand(4, 3), torch.ones(2, requires_grad=True)]
    buffer = DoubleBuffer("4KB", device="cpu")
    buffer.prefetch_next(batch)
    wide, leaf = buffer.get_current()
    assert torch.equal(wide, batch[0]) and leaf.tolist() == [1.0, 1.0] and not leaf.requires_grad


def test_tensors_begin_at_multiples_of_512_bytes():
    buffer = DoubleBuffer(1024 + 8, device="cpu")
    buffer.prefetch_next([torch.ones(3), torch.ones(128), torch.ones(2)])
    begins = [tensor.storage_offset() * 4 for tensor in buffer.get_current()]
    assert begins == [0, 512, 1024]


@pytest.mark.parametrize("sizes", [[65], [16, 200], [1, 1, 1], [64, 64]])
def test_a_batch_that_is_too_large_is_refused_and_nothing_changes(sizes):
    buffer = DoubleBuffer(256, device="cpu")
    buffer.prefetch_next(torch.ones(64))
    buffer.get_current()
    with pytest.raises(SettingsError, match=r"the batch takes [\d,]+ bytes, but buffer_size is 256"):
        buffer.prefetch_next([torch.ones(size) for size in sizes])
    buffer.prefetch_next(torch.zeros(64))
    assert buffer.get_current().tolist() == [0.0] * 64


def test_get_current_before_a_prefetch_is_an_error():
    with pytest.raises(SettingsError, match="call prefetch_next"):
        DoubleBuffer(64, device="cpu").get_current()


def test_no_batch_is_given_twice():
    buffer = DoubleBuffer(64, device="cpu")
    buffer.prefetch_next(torch.ones(4))
    buffer.get_current()
    with pytest.raises(SettingsError, match="call prefetch_next"):
        buffer.get_current()


def test_no_batch_is_lost():
    buffer = DoubleBuffer(64, device="cpu")
    buffer.prefetch_next(torch.ones(4))
    with pytest.raises(SettingsError, match="called twice"):
        buffer.prefetch_next(torch.zeros(4))
    assert buffer.get_current().tolist() == [1.0] * 4


@pytest.mark.parametrize("size", [0, -1, "few", None])
def test_a_size_without_sense_is_refused_by_name(size):
    with pytest.raises(SettingsError, match="buffer_size is"):
        DoubleBuffer(size, device="cpu")


def test_a_device_that_is_not_there_is_refused():
    with pytest.raises(UnfitError):
        DoubleBuffer(64, device="xpu")


# Streams, played on the host ------------------------------------------------------------------------------------------


@pytest.fixture
def order(monkeypatch):
    played = PlayedOrder()
    monkeypatch.setattr(double_buffer, "order_of", lambda device: played)
    return played


def test_the_first_copies_wait_for_what_was_in_the_memory_before(order):
    point = order.work()
    DoubleBuffer(64, device="cpu").prefetch_next(None)
    assert order.knows("new", point)


def test_nothing_is_done_during_a_capture(order):
    buffer = DoubleBuffer(64, device="cpu")
    buffer.prefetch_next(torch.ones(4))
    order.capturing = {"a"}
    for call in (buffer.get_current, lambda: buffer.prefetch_next(None)):
        with pytest.raises(CaptureError, match="before the capture"):
            call()
    order.capturing = set()
    assert buffer.get_current().tolist() == [1.0] * 4


@given(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from("ab")), max_size=12))
@settings(max_examples=50)
def test_copies_and_work_wait_for_each_other(turns):
    """The namesake's copies began before the work on the buffer had ended, and its work before the copy had."""
    order = PlayedOrder()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(double_buffer, "order_of", lambda device: order)
        buffer = DoubleBuffer(64, device="cpu")
    uses, place = {}, None
    for prefetching, working in turns:
        order.stream = prefetching
        made = order.work()
        buffer.prefetch_next(torch.ones(4))
        copied = order.worked[-1]
        assert order.knows("new", made)
        order.stream = working
        if place is not None:
            uses[place].append(order.work())  # a last look at the batch that was current
        place = buffer.get_current().data_ptr()
        assert order.knows(working, copied)
        assert all(order.knows("new", point) for point in uses.get(place, []))
        uses[place] = [order.work()]


def test_copies_do_not_wait_for_the_work_on_the_other_buffer(order):
    buffer = DoubleBuffer(64, device="cpu")
    host = torch.ones(4, device="meta")  # on another device than the buffer, as a host tensor is on a GPU
    buffer._copy = lambda place, tensor: None
    for _ in range(3):
        buffer.prefetch_next(host)
        buffer.get_current()
        point = order.work()
    buffer.prefetch_next(host)
    assert not order.knows("new", point)
