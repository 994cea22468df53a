"""Training streams of a workload and its held-out batches."""

from itertools import islice

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from kitsune.errors import WorkloadError
from kitsune.workload import Workload
from tuner.workloads.data import HELD_OUT, Data


def workload(batches):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return Workload(model, torch.nn.functional.mse_loss, optimizer, pair(0), batches)


def pair(value, rows=4):
    return torch.full((rows, 2), float(value)), torch.zeros(rows, 1)


def values(batches):
    return [float(x[0, 0]) for x, _ in batches]


def numbered(count):
    return [pair(value) for value in range(count)]


def test_of_a_list_the_first_batches_of_each_pass_are_held_out():
    data = Data(workload(numbered(20)), "it")
    assert values(data.held_out) == list(range(HELD_OUT))
    once, again = (values(islice(data.stream(0), 24))[part : part + 12] for part in (0, 12))
    assert sorted(once) == sorted(again) == list(range(HELD_OUT, 20))


def test_of_a_short_list_half_is():
    data = Data(workload(numbered(5)), "it")
    assert values(data.held_out) == [0, 1]
    assert sorted(values(islice(data.stream(0), 3))) == [2, 3, 4]


def test_a_list_has_another_order_for_each_seed_and_the_same_for_the_same():
    data = Data(workload(numbered(40)), "it")
    orders = [tuple(values(islice(data.stream(seed), 32))) for seed in (0, 1, 2, 0)]
    assert orders[0] == orders[3]
    assert len(set(orders)) == 3


def test_no_pass_of_one_seed_is_one_of_another():
    data = Data(workload(lambda seed: [pair(seed)] * 2), "it")
    passes = [set(values(islice(data.stream(seed), 9))) for seed in range(3)]
    assert not passes[0] & passes[1] | passes[1] & passes[2]


def test_a_function_of_a_seed_is_held_out_by_its_own_seed():
    data = Data(workload(lambda seed: [pair(seed + index / 4) for index in range(3)]), "it")
    assert min(values(data.held_out)) > 1e9
    assert values(islice(data.stream(7), 3)) == [7.0, 7.25, 7.5]


def test_a_loader_that_shuffles_does_so_by_the_seed():
    loader = DataLoader(TensorDataset(torch.arange(40.0)[:, None].expand(40, 2), torch.zeros(40, 1)), 4, shuffle=True)
    data = Data(workload(loader), "it")
    before = torch.random.get_rng_state()
    first, again, other = (values(islice(data.stream(seed), 5)) for seed in (1, 1, 2))
    assert first == again != other
    assert torch.equal(before, torch.random.get_rng_state())


def test_batches_of_other_shapes_are_left_out():
    data = Data(workload([pair(0), pair(1), pair(2, rows=3), pair(3)]), "it")
    assert values(data.held_out) == [0]
    assert values(islice(data.stream(0), 3)) == [1, 3, 1]


@pytest.mark.parametrize(
    ("batches", "match"),
    [
        (None, "it has one batch only"),
        ([pair(0)], "no fresh ones"),
        ([pair(0, rows=3)] * 2, "no fresh ones"),
        ([torch.zeros(4, 2)] * 4, "no pair"),
        (lambda seed: 1 / 0, "ZeroDivisionError"),
    ],
    ids=["none", "one", "other shapes", "no pairs", "an error"],
)
def test_without_fresh_batches_it_is_refused(batches, match):
    with pytest.raises(WorkloadError, match=match):
        Data(workload(batches), "it")


def test_an_endless_stream_of_other_shapes_is_given_up():
    def endless(seed):
        while True:
            yield pair(seed, rows=3)

    with pytest.raises(WorkloadError, match="other shapes"):
        Data(workload(endless), "it")


@pytest.mark.parametrize(("batches", "match"), [(iter([]), "only once"), (3, "is a int")])
def test_invalid_batches_are_refused(batches, match):
    with pytest.raises(WorkloadError, match=match):
        workload(batches)
