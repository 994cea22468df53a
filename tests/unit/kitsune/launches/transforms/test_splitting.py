"""One launch over lists of tensors becomes several over parts of them, and the bits stay the same."""

import itertools
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kitsune.launches.execution.issue import HostLanes, in_recorded_order, issue
from kitsune.launches.planning.memory_plan import plan_memory
from kitsune.launches.planning.schedule import on_streams
from kitsune.launches.transforms.splitting import by_readiness, split
from tests.unit.kitsune.launches.steps import equal, names, recorded, sgd, warmed

BUCKET_BYTES = 300


def tensors(count=6):
    return [torch.randn(20, generator=torch.Generator().manual_seed(number)) for number in range(count)]


def one_after_the_other(tensors):
    """The same, where each can be had only behind the one before."""
    made = [tensors[0] * 1.0]
    for tensor in tensors[1:]:
        made.append(tensor + 0.0 * made[-1])
    return made


def on_threads(recording):
    schedule = on_streams(recording.graph, [10.0] * len(recording.calls), 3, 0.1)
    assert schedule.streams > 1
    return issue(recording, schedule, plan_memory(recording.graph, schedule), HostLanes(3))


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Buckets as small as the tensors here."""
    monkeypatch.setattr("kitsune.launches.transforms.splitting.FIRST_BYTES", 80)


def test_the_norms_for_clipping_are_taken_in_pieces_and_what_follows_is_not():
    """How much to clip is known of all gradients at once."""
    step, twin = warmed("branches", sgd)
    step.clip = twin.clip = 0.01
    recording = recorded(step)
    twin()
    smaller = split(recording, BUCKET_BYTES)
    counts = {name: names(smaller).count(name) for name in ("_foreach_norm", "_foreach_mul_", "_fused_sgd_")}
    assert counts["_foreach_norm"] > 1
    assert counts == counts | {name: names(recording).count(name) for name in ("_foreach_mul_", "_fused_sgd_")}
    result = on_threads(smaller)
    assert equal([result[0], *result[1]], [*(expected := twin())[:1], *expected[1]])
    assert equal(step.state(), twin.state())


def scaled(ours, others):
    torch._foreach_addcmul_(ours, others, others, [0.5 * number for number in range(len(ours))])
    return ours


def copied(ours, others):
    fresh = [torch.empty_like(tensor) for tensor in ours]
    torch._foreach_copy_(fresh, others)
    return fresh


def powers(ours, others):
    """One behind the other: each has as many pieces as the first."""
    return torch._foreach_div(torch._foreach_sqrt(torch._foreach_abs(others)), ours)


@pytest.mark.parametrize("function", [scaled, copied, powers])
def test_every_operation_on_lists_is_split(function):
    ours, others = tensors(), tensors(7)[1:]

    def step():
        return function(ours, one_after_the_other(others))

    def prepared():
        for tensor, value in zip(ours, tensors(), strict=True):
            tensor.copy_(value)

    expected = [tensor.clone() for tensor in function([tensor.clone() for tensor in ours], others)]
    recording = recorded(step)
    smaller = split(recording, 160)
    for name in {name for name in names(recording) if name.startswith("_foreach_")}:
        assert names(smaller).count(name) > names(recording).count(name) == 1
    prepared()
    assert equal(on_threads(smaller), expected)


def test_scalars_that_come_first_are_no_lists():
    """What AdamW corrects its bias by."""
    steps = tensors()
    recording = recorded(lambda: torch._foreach_pow(2.0, one_after_the_other(steps)))
    smaller = split(recording, 160)
    assert names(smaller).count("_foreach_pow") > names(recording).count("_foreach_pow") == 1
    assert equal(on_threads(smaller), [2.0**step for step in steps])


def by_a_tensor_of_scalars(ours, late):
    torch._foreach_addcdiv_(ours, late, late, torch.arange(1.0, 7.0))


def onto_each_other(ours, late):
    torch._foreach_copy_([ours[0], ours[0], *ours[1:3]], [late[5], late[1], ours[0], late[2]])


def onto_a_neighbour(ours, late):
    torch._foreach_add_([ours[0][:12], ours[0][8:], ours[1]], [late[0][:12], late[3][8:], late[4]])


@pytest.mark.parametrize("function", [by_a_tensor_of_scalars, onto_each_other, onto_a_neighbour])
def test_lists_whose_entries_are_not_apart_stay_whole(function):
    ours = tensors()
    recording = recorded(lambda: function(ours, one_after_the_other(tensors(7)[1:])))
    assert names(split(recording, 160)) == names(recording)


def test_entries_that_lie_side_by_side_in_one_storage_are_apart():
    flat, others = torch.zeros(120), tensors()
    recording = recorded(lambda: torch._foreach_add_(list(flat.view(6, 20)), one_after_the_other(others)))
    smaller = split(recording, 160)
    assert names(smaller).count("_foreach_add_") > 1
    flat.zero_()
    on_threads(smaller)
    assert torch.equal(flat, torch.cat(others))


def test_what_is_ready_last_is_updated_in_small_buckets():
    sizes = [80, 400, 80, 80, 80, 640, 80]
    ready = [9, 8, 7, 6, 5, 4, 3]
    # From the last one on: at most 80, 320, 1280 bytes; the second tensor is more than the second bucket may hold.
    assert by_readiness(sizes, ready, 1280) == [[2, 3, 4, 5, 6], [1], [0]]
    assert by_readiness(sizes, ready, 320) == [[6], [5], [2, 3, 4], [1], [0]]
    assert by_readiness(sizes, ready[::-1], 2**20) == [[0, 1, 2, 3, 4], [5], [6]]


def test_what_is_ready_at_once_stays_together():
    ours, others = tensors(), tensors(7)[1:]
    recording = recorded(lambda: scaled(ours, [other * 1.0 for other in others]))
    assert names(split(recording, 160)) == names(recording)


@given(st.lists(st.tuples(st.integers(1, 2000), st.integers(-1, 5)), min_size=1, max_size=30), st.integers(1, 4000))
def test_every_tensor_is_in_one_group_and_groups_are_in_order_of_readiness(tensors, most_bytes):
    sizes, ready = zip(*tensors, strict=True)
    groups = by_readiness(sizes, ready, most_bytes)
    assert sorted(at for group in groups for at in group) == list(range(len(tensors)))
    times = [[ready[at] for at in group] for group in groups]
    assert all(max(one) <= min(other) for one, other in itertools.pairwise(times))
    if len(set(ready)) == 1:
        assert len(groups) == 1
    else:
        assert all(len(group) == 1 or sum(sizes[at] for at in group) <= most_bytes for group in groups)


def in_channels_last(model):
    return model.to(memory_format=torch.channels_last)


UPDATES = {
    "adamw": partial(torch.optim.AdamW, fused=True),
    "adam, amsgrad": partial(torch.optim.Adam, fused=True, amsgrad=True, weight_decay=0.1),
    "sgd": partial(torch.optim.SGD, fused=True, lr=0.1),
    "sgd, momentum": partial(torch.optim.SGD, fused=True, lr=0.1, momentum=0.9, nesterov=True),
}


def tensors_updated(call):
    return len(call.arguments[0]) if call.function._schema.name.startswith("aten::_fused_") else 0


def training(make, prepare):
    """A step, and the parameters that it updates. Recording runs it, and issuing what was recorded runs it again."""
    torch.manual_seed(0)
    model = prepare(torch.nn.Sequential(torch.nn.Conv2d(3, 16, 3), torch.nn.Flatten(), torch.nn.Linear(576, 10)))
    optimizer, x = make(model.parameters()), torch.randn(4, 3, 8, 8)

    def step():
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    step()
    step()
    return step, list(model.parameters())


@pytest.mark.parametrize("prepare", [lambda model: model, in_channels_last])
@pytest.mark.parametrize("make", UPDATES.values(), ids=UPDATES)
def test_a_small_update_is_handed_over_in_parts_and_its_bits_stay_the_same(make, prepare, monkeypatch):
    monkeypatch.setattr("kitsune.launches.transforms.splitting.PART_ELEMENTS", (64, 64))

    step, ours = training(make, prepare)
    recording = recorded(step)
    smaller = split(recording, 2**20)
    assert sum(map(tensors_updated, recording.calls)) == 4
    assert sum(map(tensors_updated, smaller.calls)) == 7 + 1 + 90 + 1  # of 432, 16, 5760 and 10 elements
    on_threads(smaller)
    step, twins = training(make, prepare)
    step()
    step()
    assert equal(ours, twins)


@pytest.mark.parametrize("width", [300, 400, 512])
@pytest.mark.parametrize("make", UPDATES.values(), ids=UPDATES)
def test_parts_are_of_whole_vectors_whatever_the_size_of_the_update(make, width):
    """A processor rounds what is left behind its last whole vector in another way than what is in one."""

    def layers():
        torch.manual_seed(0)
        parameters = [torch.nn.Parameter(torch.randn(width, width)) for _ in range(2)]
        for parameter in parameters:
            parameter.grad = torch.randn(width, width)
        optimizer = make(parameters)
        optimizer.step()
        return optimizer.step, parameters

    step, ours = layers()
    recording = recorded(step)
    smaller = split(recording, 2**20)
    assert sum(map(tensors_updated, smaller.calls)) > sum(map(tensors_updated, recording.calls))
    assert all(place.offset % 64 == 0 for call in smaller.calls for place in call.arguments[0])
    in_recorded_order(smaller)()
    step, twins = layers()
    step()
    step()
    assert equal(ours, twins)


@pytest.mark.parametrize("prepare", [lambda model: model, in_channels_last])
@pytest.mark.parametrize("make", UPDATES.values(), ids=UPDATES)
def test_a_tensor_larger_than_a_bucket_is_updated_by_several_launches_to_the_bit(make, prepare, monkeypatch):
    monkeypatch.setattr("kitsune.launches.transforms.splitting.PARTED_BYTES", 0)
    step, ours = training(make, prepare)
    smaller = split(recorded(step), 6144)
    updates = [call for call in smaller.calls if tensors_updated(call)]
    written = [sorted(place.size[0] for place in call.arguments[0]) for call in updates]
    # The convolution is ready last; of the linear layer 5760 numbers are 23040 bytes.
    assert sorted(itertools.chain(*written)) == [10, 16, 432, 1152, 1536, 1536, 1536]
    assert all(sum(sizes) <= 1536 for sizes in written)
    on_threads(smaller)
    step, twins = training(make, prepare)
    step()
    step()
    assert equal(ours, twins)


def test_an_update_of_tensors_with_gaps_is_handed_over_whole(monkeypatch):
    monkeypatch.setattr("kitsune.launches.transforms.splitting.PART_ELEMENTS", (8, 8))
    parameter = torch.nn.Parameter(torch.randn(8, 8)[:, ::2])
    parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.SGD([parameter], fused=True, lr=0.1)
    recording = recorded(optimizer.step)
    assert parameter.stride() == (8, 2)
    assert sum(map(tensors_updated, split(recording, 2**20).calls)) == 1


def test_a_bucket_that_holds_everything_changes_nothing(monkeypatch):
    monkeypatch.setattr("kitsune.launches.transforms.splitting.FIRST_BYTES", 2**40)
    step, _ = warmed("branches")
    recording = recorded(step)
    updates = names(split(recording, 2**40)).count("_fused_adamw_")
    assert updates == names(recording).count("_fused_adamw_") == 1
