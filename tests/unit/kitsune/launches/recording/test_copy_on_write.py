"""What runs of a user's code have written, put back."""

import gc
from typing import ClassVar

import pytest
import torch
from torch import nn

from kitsune.launches.recording.copy_on_write import Undo
from kitsune.launches.recording.recorder import record
from tests.unit.kitsune.launches.steps import CPU


class Tagged(torch.Tensor):
    """A subclass that says so whenever torch asks it anything."""

    asked: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.asked.append(func.__name__)
        return super().__torch_function__(func, types, args, kwargs)


class Nosy:
    """To ask what it is an instance of is an error of the user's."""

    @property
    def __class__(self):
        raise RuntimeError("asked for its class")


def undone(step):
    undo = Undo(CPU)
    try:
        found = record(step, CPU, undo=undo)
    finally:
        undo.restore()
    return found


def test_whatever_is_written_is_as_it_was():
    held = {"plain": torch.randn(4), "view": torch.randn(4, 3)[1:, 1:], "half": torch.randn(4).bfloat16()}
    held |= {"flags": torch.tensor([True, False]), "leaf": nn.Parameter(torch.randn(2)), "empty": torch.empty(0)}
    before = {name: tensor.detach().clone() for name, tensor in held.items()}

    def step():
        with torch.no_grad():
            for tensor in held.values():
                tensor.copy_(torch.zeros_like(tensor))
                tensor.logical_not_() if tensor.dtype is torch.bool else tensor.sub_(1)
        return held["plain"].clone()

    assert undone(step).result.tolist() == [-1.0] * 4
    assert all(torch.equal(held[name].detach(), value) for name, value in before.items())


def test_the_state_before_the_first_of_several_runs_comes_back():
    count, undo = torch.zeros(()), Undo(CPU)
    for _ in range(3):
        record(lambda: count.add_(1), CPU, undo=undo)
    assert count == 3
    undo.restore()
    assert count == 0


def test_what_cannot_be_followed_is_undone_too():
    count = torch.zeros(())

    def step():
        float(torch.ones(()) * 2)
        return count.add_(1)

    found = undone(step)
    assert "depends on the data" in found.refusal
    assert count == 0


def test_a_subclass_is_put_back_and_not_asked():
    tagged = torch.zeros(3).as_subclass(Tagged)
    undo = Undo(CPU)
    Tagged.asked.clear()
    undo.about_to_write([tagged])
    assert Tagged.asked == []
    tagged.add_(1)
    undo.restore()
    assert tagged.tolist() == [0.0] * 3


def test_sparse_tensors_do_not_break_the_run():
    table = torch.eye(3).to_sparse()
    found = undone(lambda: table.mul_(2).to_dense())
    assert "sparse" in found.refusal
    assert found.result.tolist() == (torch.eye(3) * 2).tolist()


def test_objects_that_refuse_to_be_asked_are_left_alone():
    nosy = [Nosy()]
    with pytest.raises(RuntimeError, match="asked for its class"):
        isinstance(nosy[0], torch.Tensor)
    Undo(CPU).restore()
    assert any(type(each) is Nosy for each in gc.get_referents(nosy))


def test_a_storage_that_has_grown_stays_large_for_its_tensors():
    work = torch.arange(4.0)
    undone(lambda: work.resize_(64).fill_(7.0).sum())
    assert work.untyped_storage().nbytes() == 64 * 4
    assert work[:4].tolist() == [0.0, 1.0, 2.0, 3.0]


def test_a_storage_that_was_emptied_is_filled_again():
    weight, undo = torch.arange(4.0), Undo(CPU)
    undo.about_to_write([weight])
    weight.untyped_storage().resize_(0)
    undo.restore()
    assert weight.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_what_the_run_makes_is_not_kept_alive():
    undo = Undo(CPU)
    seen = []

    def step():
        made = torch.zeros(1024)
        seen.append(torch.multiprocessing.reductions.StorageWeakRef(made.untyped_storage()))
        return made.add_(1).sum()

    record(step, CPU, undo=undo)
    assert seen[0].expired()
    undo.restore()


def test_generators_stand_where_they_stood():
    own = torch.Generator().manual_seed(3)
    torch.manual_seed(4)
    before = own.get_state(), torch.get_rng_state()
    undone(lambda: torch.rand(2, generator=own) + torch.rand(2))
    assert torch.equal(own.get_state(), before[0])
    assert torch.equal(torch.get_rng_state(), before[1])
