"""TrainStep: what close() and checkpoints give back."""

import copy

import pytest
import torch
import torch._inductor.exc

from tests.step_cases import (
    OPTIMIZERS,
    Convnet,
    adamw,
    assert_same,
    batches,
    is_captured,
    pair,
    train_both,
)

CAPTURES = ["step", "segments"]
IMAGES = (4, 3, 8, 8)
STEPS = 8  # three to warm up, one to capture, four to replay
KERNEL = {"given": {}, "kitsune": {"rtol": 1e-4, "atol": 1e-5}}


def flags():
    return (
        torch.backends.cuda.matmul.fp32_precision,
        torch.backends.cudnn.conv.fp32_precision,
        torch.backends.cudnn.benchmark,
        torch.get_float32_matmul_precision(),
        torch.is_autocast_enabled("cpu"),
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
    )


def shape_of(tree):
    """A checkpoint without its numbers: keys, flags, and each tensor's dtype, device and strides."""
    if isinstance(tree, torch.Tensor):
        return (tree.shape, tree.dtype, tree.device, tree.stride())
    if isinstance(tree, dict):
        return {key: shape_of(value) for key, value in tree.items()}
    return [shape_of(value) for value in tree] if isinstance(tree, list) else tree


PLANS = [
    {"layout": "channels_last", "update": "fused", "capture": "step"},
    {"update": "foreach"},
    {"update": "fused", "capture": "segments"},
    {"update": "kitsune", "capture": "step"},
    {"precision": "fp16", "capture": "step"},
]


@pytest.mark.parametrize("knobs", PLANS)
@pytest.mark.on_streams
def test_close_gives_everything_back(device, knobs):
    before = flags()
    planned, plain = pair(device, knobs, model=Convnet)
    names = set(plain.optimizer.__dict__)
    train_both(planned, plain, batches(STEPS, *IMAGES))
    assert flags() == before
    assert planned.model._compiled_call_impl is None
    assert list(planned.model.state_dict()) == list(plain.model.state_dict())
    assert shape_of(planned.optimizer.state_dict()) == shape_of(plain.optimizer.state_dict())
    planned.step.close()
    assert flags() == before
    assert shape_of(planned.model.state_dict()) == shape_of(plain.model.state_dict())
    assert shape_of(planned.optimizer.state_dict()) == shape_of(plain.optimizer.state_dict())
    assert shape_of(planned.optimizer.param_groups) == shape_of(plain.optimizer.param_groups)
    assert shape_of(list(planned.optimizer.state.values())) == shape_of(list(plain.optimizer.state.values()))
    assert not planned.optimizer._optimizer_state_dict_post_hooks
    assert not planned.optimizer._optimizer_load_state_dict_post_hooks
    assert not {"_step_supports_amp_scaling", "_init_group"} & (set(planned.optimizer.__dict__) - names)
    for one, two in zip(planned.model.parameters(), plain.model.parameters(), strict=True):
        assert one.grad.stride() == two.grad.stride()


def test_it_closes_with_its_block(device):
    planned, _ = pair(device, {})
    planned.step.close()
    with planned.start({"update": "fused"}):
        assert planned.optimizer.param_groups[0]["fused"]
    assert planned.optimizer.param_groups[0]["fused"] is None


@pytest.mark.parametrize("knobs", PLANS)
@pytest.mark.on_streams
def test_a_checkpoint_of_a_plan_goes_on_plain(device, knobs):
    planned, resumed = pair(device, knobs, model=Convnet)
    many = batches(STEPS + 4, *IMAGES)
    planned.train(many[:STEPS])
    saved = copy.deepcopy((planned.model.state_dict(), planned.optimizer.state_dict()))
    planned.step.close()
    resumed.model.load_state_dict(saved[0])
    resumed.optimizer.load_state_dict(saved[1])
    planned.start({})
    planned.losses.clear()
    train_both(planned, resumed, many[STEPS:])
    assert_same(planned, resumed)


@pytest.mark.parametrize("update", ["given", "kitsune"])
@pytest.mark.parametrize("capture", CAPTURES)
@pytest.mark.on_streams
def test_a_plain_checkpoint_goes_on_by_a_plan(device, capture, update):
    optimizer = OPTIMIZERS["adamw by hand fused"] if update == "given" else adamw
    planned, plain = pair(device, {"capture": capture, "update": update}, model=Convnet, optimizer=optimizer)
    many = batches(STEPS + 4, *IMAGES)
    plain.train(many[:STEPS])
    plain.losses.clear()
    planned.model.load_state_dict(copy.deepcopy(plain.model.state_dict()))
    planned.optimizer.load_state_dict(copy.deepcopy(plain.optimizer.state_dict()))
    train_both(planned, plain, many[:STEPS])
    assert_same(planned, plain, **KERNEL[update])
    assert is_captured(planned.step)
