"""One launch over lists of tensors becomes several over parts of them, and the bits stay the same."""

import pytest
import torch

from kitsune.engine.issue import HostLanes, issue
from kitsune.engine.memory import plan_memory
from kitsune.engine.schedule import on_streams
from kitsune.engine.split import split
from tests.unit.engine.steps import equal, names, recorded, sgd, warmed

BUCKET_BYTES = 300


def tensors(count=6):
    return [torch.randn(20, generator=torch.Generator().manual_seed(number)) for number in range(count)]


def on_threads(recording):
    schedule = on_streams(recording.graph, [10.0] * len(recording.calls), 3, 0.1)
    assert schedule.streams > 1
    return issue(recording, schedule, plan_memory(recording.graph, schedule), HostLanes(3))


def test_clipping_is_done_in_pieces():
    step, twin = warmed("branches", sgd)
    step.clip = twin.clip = 0.01
    recording = recorded(step)
    twin()
    smaller = split(recording, BUCKET_BYTES)
    for name in ("_foreach_norm", "_foreach_mul_"):
        assert names(recording).count(name) == 1
        assert names(smaller).count(name) > 1
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
    return torch._foreach_div(torch._foreach_sqrt(torch._foreach_abs(ours)), others)


def powers_of_two(ours, others):
    """What a scalar comes first in, as in AdamW's bias corrections."""
    return torch._foreach_pow(2.0, ours)


@pytest.mark.parametrize("function", [scaled, copied, powers, powers_of_two])
def test_every_operation_on_lists_is_split(function):
    ours, others = tensors(), tensors(7)[1:]
    expected = function([tensor.clone() for tensor in ours], others)
    smaller = split(recorded(lambda: function(ours, others)), 160)
    assert len(smaller.calls) >= 3
    before = [tensor.clone() for tensor in ours]
    for tensor, value in zip(ours, tensors(), strict=True):
        tensor.copy_(value)
    assert equal(on_threads(smaller), expected)
    assert function is scaled or equal(ours, before)


def test_a_bucket_that_holds_everything_changes_nothing():
    step, _ = warmed("branches")
    recording = recorded(step)
    updates = names(split(recording, 2**40)).count("_fused_adamw_")
    assert updates == names(recording).count("_fused_adamw_") == 1
