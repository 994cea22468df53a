"""Finding the model of an optimizer, routing its forwards, and letting it go."""

import copy
import gc
import pickle
import warnings
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as modules

from kitsune.autograd.hooks import has_global_hooks
from kitsune.runtime.model_discovery import Attachment, Route, is_routed


def attach(parameters: Any, forward: Any = lambda *_: "routed", lost: Any = lambda: None) -> Attachment:
    found: list[nn.Module] = []

    def remember(model: nn.Module) -> Any:
        found.append(model)
        return forward

    attachment = Attachment(lambda: parameters, remember, lost)
    attachment.start()
    attachment.found = found  # type: ignore[attr-defined]
    return attachment


@pytest.fixture(autouse=True)
def _no_hook_stays() -> Any:
    yield
    gc.collect()
    nn.Linear(1, 1)(torch.ones(1, 1))  # dead lookouts leave at the next forward
    assert not modules._global_forward_pre_hooks


x = torch.ones(1, 4)


def test_the_outermost_module_that_covers_is_the_root() -> None:
    inner = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    outer = nn.Sequential(inner, nn.Linear(4, 4))
    attachment = attach(list(inner.parameters()))
    assert attachment.is_looking
    first = outer(x)
    assert isinstance(first, torch.Tensor)  # the forward under way stays plain
    assert attachment.root is outer
    assert not attachment.is_looking
    assert outer(x) == "routed"
    assert isinstance(inner(x), torch.Tensor)
    attachment.detach()
    assert isinstance(outer(x), torch.Tensor)


def test_modules_that_do_not_cover_are_passed_over() -> None:
    one, two = nn.Linear(4, 4), nn.Linear(4, 4)
    attachment = attach([*one.parameters(), *two.parameters()])
    two(one(x))
    assert attachment.is_looking
    assert attachment.root is None
    attachment.detach()
    assert not attachment.is_looking


def test_evaluation_does_not_count() -> None:
    model = nn.Linear(4, 4).eval()
    attachment = attach(list(model.parameters()))
    model(x)
    assert attachment.is_looking
    model.train()(x)
    assert attachment.root is model
    attachment.detach()


def test_a_forward_may_be_left_plain() -> None:
    model = nn.Linear(4, 4)
    attachment = attach(list(model.parameters()), forward=None)
    model(x)
    model(x)
    assert attachment.found == [model]  # type: ignore[attr-defined]
    assert attachment.root is None
    assert not is_routed(model)


def test_detaching_leaves_no_trace() -> None:
    model = nn.Linear(4, 4)
    before = set(model.__dict__)
    attachment = attach(list(model.parameters()))
    model(x)
    assert is_routed(model)
    attachment.detach()
    attachment.detach()
    assert set(model.__dict__) == before
    assert model._compiled_call_impl is None


def test_detaching_leaves_what_others_put_there() -> None:
    model = nn.Linear(4, 4)
    attachment = attach(list(model.parameters()))
    model(x)
    model.compile(backend="eager")
    compiled = model._compiled_call_impl
    attachment.detach()
    assert model._compiled_call_impl is compiled


def test_copies_are_plain() -> None:
    model = nn.Linear(4, 4)
    attachment = attach(list(model.parameters()))
    model(x)
    for duplicate in (copy.deepcopy(model), copy.copy(model), pickle.loads(pickle.dumps(model))):
        assert not is_routed(duplicate)
        assert isinstance(duplicate(x), torch.Tensor)
    attachment.detach()


def test_a_newer_attachment_of_the_same_parameters_takes_over() -> None:
    model = nn.Linear(4, 4)
    lost: list[str] = []
    first = attach(list(model.parameters()), lost=lambda: (lost.append("first"), first.detach()))
    model(x)
    second = attach([model.weight], forward=lambda *_: "second")
    assert model(x) == "routed"  # a routed forward is not looked at; the route may call the model itself
    model._call_impl(x)
    assert lost == ["first"]
    assert model(x) == "second"
    first.detach()
    assert model(x) == "second"
    second.detach()


def test_other_parameters_of_the_same_model_do_not() -> None:
    model = nn.Linear(4, 4)
    first = attach([model.weight], lost=lambda: pytest.fail("lost"))
    second = attach([model.bias], forward=None)
    model(x)
    assert first.root is model
    assert second.root is None
    assert second.found == [model]  # type: ignore[attr-defined]
    assert isinstance(model._compiled_call_impl, Route)
    first.detach()


def test_an_attachment_that_never_finds_can_be_collected() -> None:
    model = nn.Linear(4, 4)
    parameters = list(model.parameters())
    attachment = weakref.ref(attach(parameters))
    gc.collect()
    assert attachment() is None
    nn.Linear(1, 1)(torch.ones(1, 1))
    assert not modules._global_forward_pre_hooks


def test_a_model_can_be_collected_with_its_route() -> None:
    model = nn.Linear(4, 4)
    attachment = attach(list(model.parameters()))
    model(x)
    gone = weakref.ref(model)
    attachment.found.clear()  # type: ignore[attr-defined]
    del model
    gc.collect()
    assert gone() is None
    assert attachment.root is None


def test_global_hooks_of_others() -> None:
    model = nn.Linear(4, 4)
    attachment = attach(list(model.parameters()))
    assert not has_global_hooks()
    for register in (
        modules.register_module_forward_pre_hook,
        modules.register_module_forward_hook,
        modules.register_module_full_backward_pre_hook,
        modules.register_module_full_backward_hook,
    ):
        handle = register(lambda *_: None)  # type: ignore[arg-type]
        assert has_global_hooks()
        handle.remove()
    assert not has_global_hooks()
    attachment.detach()


def test_looking_does_not_disturb_torch_compile() -> None:
    model, other = nn.Linear(4, 4), nn.Linear(4, 4)
    attachment = attach(list(model.parameters()))
    filters = len(warnings.filters)
    with warnings.catch_warnings():
        compiled = torch.compile(other, backend="eager", fullgraph=True)
        assert torch.equal(compiled(x), other(x))
        step = torch.compile(lambda x: other(x) * 2, backend="eager", fullgraph=True)
        assert torch.equal(step(x), other(x) * 2)
    attachment.detach()
    assert len(warnings.filters) == filters - 1
