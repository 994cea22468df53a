"""TrainStep: hooks run at every step."""

import contextlib

import pytest
import torch
import torch._inductor.exc
from torch.nn.modules.module import register_module_forward_hook

from tests.step_cases import (
    assert_same,
    batches,
    is_captured,
    pair,
    train_both,
)

CAPTURES = ["step", "segments"]
STEPS = 8  # three to warm up, one to capture, four to replay


def on_all_modules(model, call):
    own = set(model.modules())
    return register_module_forward_hook(lambda module, *_: call() if module in own - {model} else None)


HOOKS = {
    "a forward hook on first": lambda model, call: model.first.register_forward_hook(call),
    "a forward pre-hook on the model": lambda model, call: model.register_forward_pre_hook(call),
    "a backward hook on last": lambda model, call: model.last.register_full_backward_hook(call),
    "a gradient hook on first.weight": lambda model, call: model.first.weight.register_hook(call),
    "a gradient hook on last.bias": lambda model, call: model.last.bias.register_post_accumulate_grad_hook(call),
    "a hook on all modules": on_all_modules,
}


@pytest.mark.parametrize("words", HOOKS)
@pytest.mark.parametrize("capture", CAPTURES)
@pytest.mark.parametrize("when", ["before", 0, 2, 3, STEPS])
def test_a_hook_runs_at_every_step(device, capture, words, when):
    """Before the step is made, before and after the last step that warms up, and when it is captured."""
    calls: list[int] = []
    planned, plain = pair(device, {})
    planned.step.close()
    many = batches(STEPS + 4)
    with contextlib.ExitStack() as stack:

        def add_hook():
            stack.callback(HOOKS[words](planned.model, lambda *_: calls.append(1)).remove)

        if when == "before":
            add_hook()
        planned.start({"capture": capture})
        before = 0 if when == "before" else when
        train_both(planned, plain, many[:before])
        if when != "before":
            assert is_captured(planned.step) == (when == STEPS)
            add_hook()
        train_both(planned, plain, many[before:])
        runs = len(list(planned.model.children())) if words == "a hook on all modules" else 1
        assert len(calls) == (len(many) - before) * runs
    assert planned.step.report.declined == {"capture": f"{words} would not run in a replayed graph"}
    assert_same(planned, plain)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("capture", CAPTURES)
def test_what_torchscript_runs_is_not_captured(device, capture):
    """It tells nobody when its members are others."""
    planned, plain = pair(device, {})
    planned.step.close()
    planned.model.first = torch.jit.script(planned.model.first)
    planned.start({"capture": capture})
    train_both(planned, plain, batches(STEPS))
    assert_same(planned, plain)
    assert planned.step.report.declined["capture"] == "TorchScript runs first, which a replayed graph cannot watch"
