"""Signatures of batches, and the static tensors that a batch is copied into."""

from collections import namedtuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from kitsune.device.static_batch import (
    StaticBatch,
    place,
    signature_of,
    signature_unless_opaque,
    tensors_of,
    why_not_static,
)

CPU = torch.device("cpu")
Point = namedtuple("Point", ["a", "b"])
Point2 = namedtuple("Point", ["a", "b"])

DTYPES = [torch.float32, torch.float64, torch.int64, torch.bool]
TENSORS = st.builds(
    lambda shape, dtype: torch.ones(shape, dtype=dtype),
    st.lists(st.integers(0, 3), max_size=4),
    st.sampled_from(DTYPES),
)
SCALARS = st.none() | st.booleans() | st.integers(-3, 3) | st.text(max_size=3)
TREES = st.recursive(
    TENSORS | SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
        | st.tuples(inner, inner).map(lambda pair: Point(*pair))
    ),
    max_leaves=8,
)


def refilled(tree):
    """A batch of the same signature with other numbers, in tensors of its own."""
    if isinstance(tree, torch.Tensor):
        return torch.zeros_like(tree)
    if isinstance(tree, dict):
        return {key: refilled(value) for key, value in tree.items()}
    if isinstance(tree, Point):
        return Point(*map(refilled, tree))
    return type(tree)(map(refilled, tree)) if isinstance(tree, (list, tuple)) else tree


@given(TREES)
def test_a_static_batch_takes_every_batch_of_its_signature(tree):
    static = StaticBatch(tree, CPU)
    addresses = [tensor.data_ptr() for tensor in tensors_of(static.batch)]
    other = refilled(tree)
    assert signature_of(other) == signature_of(tree) == signature_of(static.batch)
    static.load(other)
    assert [tensor.data_ptr() for tensor in tensors_of(static.batch)] == addresses
    for loaded, given_, before in zip(tensors_of(static.batch), tensors_of(other), tensors_of(tree), strict=True):
        assert torch.equal(loaded, given_)
        assert loaded is not given_
        assert torch.equal(before, torch.ones_like(before))  # the user's first batch is left alone


@given(TREES)
def test_what_is_asked_before_every_replay_is_the_signature(tree):
    assert signature_unless_opaque(tree) == signature_of(tree)
    assert signature_unless_opaque((tree, torch.ones(2))) == signature_of((tree, torch.ones(2)))


OPAQUE = {
    "an object": object,
    "sparse": lambda: torch.ones(2, 2).to_sparse(),
    "compressed": lambda: torch.ones(2, 2).to_sparse_csr(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
    "a subclass": lambda: torch.ones(2).as_subclass(type("Ours", (torch.Tensor,), {})),
}


@pytest.mark.filterwarnings("ignore")  # of torch, that some of them may change
@pytest.mark.parametrize("kind", OPAQUE)
def test_what_may_hide_tensors_has_none(kind):
    assert signature_unless_opaque((torch.ones(2), OPAQUE[kind]())) is None


@given(TREES)
def test_a_batch_of_plain_parts_can_be_static(tree):
    assert why_not_static(tree) is None


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.ones(2), torch.ones(3)),
        (torch.ones(2), torch.ones(2, 1)),
        (torch.ones(2), torch.ones(2, dtype=torch.float64)),
        (torch.ones(2), torch.ones(2, requires_grad=True)),
        ([torch.ones(2)], (torch.ones(2),)),
        ({"a": torch.ones(2)}, {"b": torch.ones(2)}),
        (1, 1.0),
        (1, True),
        (0.5, 0.25),
        (0.0, -0.0),
        (Point(1, 2), Point2(1, 2)),
        (torch.ones(2, 3), torch.ones(3, 2).t()),
        (torch.ones(2, 3, 4, 5), torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last)),
        (None, 0),
        ((), None),
    ],
)
def test_signatures_differ(one, other):
    assert signature_of((one, None)) != signature_of((other, None))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.nan, float("nan")),
        (torch.ones(2, 3), torch.ones(2, 4)[:, :3]),
        (torch.ones(2, 5)[:, :3], torch.ones(2, 4)[:, :3]),
        (torch.ones(2, 3, 4).mT[:, :, :2], torch.ones(2, 2, 4).mT),
        (torch.ones(1, 3), torch.ones(3, 1).t()),  # where a second row would be is nothing to it
        (torch.ones(0, 3), torch.ones(3, 0).t()),
    ],
)
def test_signatures_are_the_same(one, other):
    assert signature_of((one, None)) == signature_of((other, None))


LAYOUTS = {
    "turned": lambda: torch.randn(3, 2).t(),
    "cut from longer rows": lambda: torch.randn(4, 6)[:, 1:4],
    "every second": lambda: torch.randn(4, 6)[:, ::2],
    "channels last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "of one row": lambda: torch.randn(4, 6)[1:2],
    "a number of many": lambda: torch.randn(4)[2],
    "empty": lambda: torch.randn(4, 0)[1:],
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_static_tensor_lies_as_the_users_does(name):
    one, other = LAYOUTS[name](), LAYOUTS[name]()
    static = StaticBatch(one, CPU)
    assert static.batch.stride() == one.stride()
    assert torch.equal(static.batch, one)
    assert static.batch.data_ptr() != one.data_ptr() or not one.numel()
    static.load(other)
    assert torch.equal(static.batch, other)


@pytest.mark.parametrize("tensor", [torch.randn(4, 60)[:, :3], torch.randn(60, 4)[::20], torch.randn(60, 3).t()[:, :2]])
def test_gaps_that_are_more_than_all_the_rest_are_left_out(tensor):
    static = StaticBatch(tensor, CPU)
    assert torch.equal(static.batch, tensor)
    assert static.batch.untyped_storage().nbytes() == 4 * tensor.numel()


@pytest.mark.parametrize("tensor", [torch.randn(3, 1).expand(3, 4), torch.randn(8).unfold(0, 4, 2)])
def test_what_overlaps_is_drawn_apart(tensor):
    static = StaticBatch(tensor, CPU)
    assert torch.equal(static.batch, tensor)
    static.load(tensor + 1)
    assert torch.equal(static.batch, tensor + 1)


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        (object(), "holds a object"),
        ([torch.ones(2), {1, 2}], "holds a set"),
        ({"a": torch.ones(2, requires_grad=True)}, "requires a gradient"),
        (torch.ones(2).to_sparse(), "sparse"),
    ],
)
def test_why_a_batch_cannot_be_static(batch, words):
    assert words in why_not_static(batch)


def test_images_get_the_memory_format_and_nothing_else_does():
    batch = {"image": torch.ones(2, 3, 4, 4), "mask": torch.ones(2, 3, 4, 4, dtype=torch.int64), "y": torch.ones(2, 3)}
    placed = place(batch, CPU, torch.channels_last)
    assert placed["image"].is_contiguous(memory_format=torch.channels_last)
    assert placed["mask"] is batch["mask"]
    assert placed["y"] is batch["y"]
    static = StaticBatch(batch, CPU, torch.channels_last)
    assert static.batch["image"].is_contiguous(memory_format=torch.channels_last)
    static.load({**batch, "image": torch.zeros(2, 3, 4, 4)})
    assert static.batch["image"].is_contiguous(memory_format=torch.channels_last)
    assert static.batch["image"].sum() == 0


def test_loading_the_static_batch_itself_copies_nothing():
    static = StaticBatch((torch.ones(2), torch.ones(3)), CPU)
    versions = [tensor._version for tensor in tensors_of(static.batch)]
    static.load(static.batch)
    assert [tensor._version for tensor in tensors_of(static.batch)] == versions


def test_tensors_of_one_dtype_are_copied_in_one_call():
    def batch_of(number):
        tables = [torch.full((4,), number, dtype=torch.int64) for _ in range(5)]
        return (torch.full((4, 3), float(number)).t(), *tables), torch.full((4,), float(number))

    static, calls = StaticBatch(batch_of(0), torch.device("cpu")), []

    class Calls(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            calls.append(func._schema.name)
            return func(*args, **(kwargs or {}))

    with Calls():
        static.load(batch_of(7))
    assert [name for name in calls if "copy" in name] == ["aten::_foreach_copy_"] * 2
    assert all(
        torch.equal(now, then) for now, then in zip(tensors_of(static.batch), tensors_of(batch_of(7)), strict=True)
    )
