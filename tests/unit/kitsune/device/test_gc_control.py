"""The garbage collector's objects are looked at without harm to what other threads are making."""

import gc
import threading
import time

import pytest
import torch

from kitsune.device.gc_control import are_tracked, live_tensors


def slowly():
    for number in range(3):
        time.sleep(0)  # it is another thread's turn
        yield number


def failures(look, at_least=20):
    """How many tuples another thread fails to make while we look, of that many at least."""
    made, failed, is_over = [], [], threading.Event()

    def make():
        while not is_over.is_set():
            try:
                made.append(tuple(slowly()))
            except SystemError as error:
                failed.append(error)

    thread = threading.Thread(target=make)
    thread.start()
    until_s = time.perf_counter() + 30
    while len(made) + len(failed) < at_least and time.perf_counter() < until_s:
        look()
    is_over.set()
    thread.join()
    assert len(made) + len(failed) >= at_least
    return len(failed)


def test_a_tuple_that_somebody_holds_cannot_be_made():
    """The fault that the others are without, on this Python."""
    assert failures(lambda: [each for each in gc.get_objects() if type(each) is torch.Tensor]) > 0


@pytest.mark.parametrize("look", [live_tensors, lambda: are_tracked([[]])])
def test_to_look_disturbs_no_thread(look):
    assert failures(look) == 0


def test_it_finds_tensors_of_every_kind_and_asks_nothing_for_its_class():
    class Own(torch.Tensor):
        pass

    class Asking:
        @property
        def __class__(self):
            raise AssertionError

    kept = [torch.ones(2), torch.nn.Parameter(torch.ones(2)), torch.ones(2).as_subclass(Own), Asking()]
    found = set(map(id, live_tensors()))
    assert [id(each) in found for each in kept] == [True, True, True, False]


def test_classes_without_a_hash_are_passed_over():
    class Meta(type):
        __hash__ = None

        def __eq__(cls, other):
            return cls is other

    class Odd(metaclass=Meta):
        pass

    kept = [torch.ones(2), Odd()]
    kept[1].others = kept  # so that the collector knows it
    assert id(kept[0]) in set(map(id, live_tensors()))


def test_what_was_frozen_is_not_tracked():
    mine = [torch.ones(2)]
    assert are_tracked(mine)
    gc.freeze()
    try:
        assert not are_tracked(mine)
    finally:
        gc.unfreeze()
