"""SGD as Triton compiles it: the parameters of a real model, skipped updates, streams, CUDA graphs."""

import pytest
import torch

from kitsune.kernels import sgd as kernel
from kitsune.kernels.sgd import sgd_
from tuner.zoo.resnet import resnet50

LR, DECAY = 0.01, 1e-4
#: (momentum, dampening, nesterov)
KINDS = [(0.0, 0.0, False), (0.9, 0.5, False), (0.9, 0.0, True)]
#: They end amid a block and amid 16 bytes.
MIXED = [(5, 3), (), (4099,), (0,), (8192,), (64, 3, 7, 7), (1,), (17,)]
with torch.device("meta"):
    RESNET = [tuple(one.shape) for one in resnet50().parameters()]


@pytest.fixture(autouse=True)
def no_way_out(monkeypatch):
    """The reference is out of reach: what is updated is updated by the kernels."""
    monkeypatch.setattr(kernel, "reference", None)


def draw(device, shapes, seed=0):
    torch.manual_seed(seed)
    tensors = [torch.randn(shape, device=device) for shape in shapes]
    return [one.contiguous(memory_format=torch.channels_last) if one.dim() == 4 else one for one in tensors]


def after(parameters, gradients, buffers, step=3, kind=KINDS[1], **more):
    """What an update makes of a copy of parameters and buffers."""
    own, kept = ([one.clone() for one in tensors] for tensors in (parameters, buffers))
    sgd_(own, gradients, kept, step, LR, *kind, DECAY, **more)
    return [*own, *kept]


def assert_close(ours, wanted):
    for one, other in zip(ours, wanted, strict=True):
        assert one.stride() == other.stride()
        torch.testing.assert_close(one.detach(), other.detach(), rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize(("kind", "shapes"), [*((kind, MIXED) for kind in KINDS), (KINDS[2], RESNET)])
def test_ten_steps_are_those_of_torch(device, kind, shapes):
    momentum, dampening, nesterov = kind
    parameters = draw(device, shapes)
    theirs = [one.clone().requires_grad_() for one in parameters]
    optimizer = torch.optim.SGD(
        theirs, lr=LR, momentum=momentum, dampening=dampening, nesterov=nesterov, weight_decay=DECAY, foreach=True
    )
    buffers = [torch.full_like(one, torch.nan) for one in parameters] if momentum else []
    for step in range(1, 11):
        gradients = draw(device, shapes, seed=step)
        for one, gradient in zip(theirs, gradients, strict=True):
            one.grad = gradient
        optimizer.step()
        sgd_(parameters, gradients, buffers, step, LR, *kind, DECAY)
    assert_close(parameters, theirs)
    assert_close(buffers, [optimizer.state[one]["momentum_buffer"] for one in theirs] if momentum else [])


def test_gradients_may_be_in_half_precision_scaled_and_not_finite(device):
    parameters, gradients, buffers = (draw(device, MIXED, seed) for seed in range(3))
    halves = [one.bfloat16() for one in gradients]
    wide, scaled = [one.float() for one in halves], [one * 64 for one in halves]
    flags = {"grad_scale": torch.full((1,), 64.0, device=device), "found_inf": torch.zeros(1, device=device)}
    assert_close(after(parameters, scaled, buffers, **flags), after(parameters, wide, buffers))
    flags["found_inf"].fill_(1)
    assert all(map(torch.equal, after(parameters, scaled, buffers, **flags), [*parameters, *buffers]))


def test_it_runs_on_the_stream_that_is_current(device):
    parameters, gradients, buffers = (draw(device, MIXED, seed) for seed in range(3))
    wanted = after(parameters, gradients, buffers)
    late = [torch.zeros_like(one) for one in gradients]
    torch.cuda.synchronize()
    side = torch.cuda.Stream(device)
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)  # some 25 ms, in which a kernel on another stream would read zeros
        torch._foreach_copy_(late, gradients)
        ours = after(parameters, late, buffers)
    side.synchronize()
    assert all(map(torch.equal, ours, wanted))


def test_a_cuda_graph_follows_step_learning_rate_and_gradients(device):
    parameters, gradients, buffers = (draw(device, MIXED, seed) for seed in range(3))
    own, kept = ([one.clone() for one in tensors] for tensors in (parameters, buffers))
    step, lr = torch.zeros((), device=device), torch.tensor(LR, device=device, dtype=torch.float64)
    after(parameters, gradients, buffers)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step.add_(1)
        sgd_(parameters, gradients, buffers, step, lr, *KINDS[1], DECAY)
    for number, rate in enumerate((0.1, 0.5, 0.01), start=1):
        torch._foreach_copy_(gradients, draw(device, MIXED, seed=9 + number))
        lr.fill_(rate)
        graph.replay()
        sgd_(own, gradients, kept, number, rate, *KINDS[1], DECAY)
    torch.cuda.synchronize()
    assert_close((*parameters, *buffers), (*own, *kept))
