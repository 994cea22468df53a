"""Which outputs of a forward others are computed from, and who listens to them."""

import pytest
import torch

from kitsune.autograd.outputs import Listeners, Past


def outputs():
    x = torch.ones(3, requires_grad=True)
    hidden = x * 2
    return hidden, hidden.sum(), x * 3, hidden.detach(), x


def sources_among(tensors):
    return Past(tensors).sources()


def test_only_what_others_are_computed_from_is_a_source():
    hidden, total, other, detached, leaf = outputs()
    assert sources_among([total, hidden, other, detached, leaf]) == [1, 4]
    assert sources_among([total, other]) == []
    assert sources_among([hidden, hidden, other]) == [0, 1]
    one, two = hidden.split([1, 2])
    assert sources_among([one, two]) == []
    assert sources_among([one, two.sum()]) == [], "two results of one node, of which the other is used"
    assert sources_among([two, two.sum()]) == [0]
    assert sources_among([leaf, other]) == [0], "a leaf that another output is computed from"
    half = hidden.half()
    assert sources_among([half.float(), half.sum().float()]) == [0], "cast behind the forward"
    assert sources_among([]) == []


def test_a_hook_is_seen_and_works():
    hidden, total, *_ = outputs()
    listeners = Listeners([hidden])
    assert not listeners.are_there()
    seen = []
    handle = hidden.register_hook(lambda gradient: seen.append(gradient.clone()))
    assert listeners.are_there()
    total.backward(retain_graph=True)
    assert len(seen) == 1
    handle.remove()
    assert not listeners.are_there()
    total.backward()
    assert len(seen) == 1


def test_a_hook_of_before_is_seen():
    hidden, *_ = outputs()
    hidden.register_hook(lambda gradient: gradient)
    assert Listeners([hidden]).are_there()


def test_a_gradient_that_is_kept_is_seen():
    hidden, total, *_ = outputs()
    listeners = Listeners([hidden])
    hidden.retain_grad()
    assert listeners.are_there()
    total.backward()
    assert hidden.grad.tolist() == [1.0, 1.0, 1.0]


def test_a_hook_that_is_gone_before_anybody_asks_was_there_in_the_backward():
    hidden, total, *_ = outputs()
    listeners = Listeners([hidden], in_backward=True)
    handle = hidden.register_hook(lambda gradient: gradient)
    total.backward()
    handle.remove()
    del hidden
    assert listeners.are_there()


def test_nobody_who_asks_was_there():
    hidden, total, *_ = outputs()
    listeners = Listeners([hidden], in_backward=True)
    total.backward()
    assert not listeners.are_there()


@pytest.mark.parametrize("holds", [True, False])
def test_listeners_hold_no_tensor(holds):
    hidden, *_ = outputs()
    listeners = Listeners([hidden])
    if not holds:
        del hidden
    assert not listeners.are_there()
