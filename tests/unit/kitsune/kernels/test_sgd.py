"""SGD in few launches against torch.optim.SGD and its eager reference: momentum, dtypes, skips, torch.compile."""

import pytest
import torch

from kitsune.kernels import adamw, sgd
from kitsune.kernels.sgd import reference, sgd_

LR, DECAY = 1e-2, 0.1
SHAPES = [(5, 3), (), (4100,), (0,), (2, 3, 4, 5), (8192,)]
#: (momentum, dampening, nesterov)
KINDS = [(0.0, 0.0, False), (0.9, 0.0, False), (0.9, 0.5, False), (0.9, 0.0, True)]
CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor")


@pytest.fixture(autouse=True)
def short_launches(monkeypatch):
    """The interpreter takes some milliseconds for every tensor of a launch, also for what fills it up."""
    monkeypatch.setattr(adamw, "MOST", 4)


def state_of(device, shapes=SHAPES):
    """(parameters, gradients, momentum buffers) as after some updates."""
    torch.manual_seed(0)
    return [[torch.randn(shape, device=device) for shape in shapes] for _ in range(3)]


def copies(tensors, dtype=torch.float32):
    return [one.to(dtype, copy=True, memory_format=torch.preserve_format) for one in tensors]


def after(function, state, kind=KINDS[1], step=3, lr=LR, dtype=torch.float32, **more):
    """What an update makes of a copy of parameters and buffers."""
    parameters, gradients, buffers = copies(state[0], dtype), state[1], copies(state[2], dtype)
    function(parameters, gradients, buffers, step, lr, *kind, DECAY, **more)
    return [*parameters, *buffers]


def exactly(state, *given, **more):
    """The same by the reference in fp64."""
    return after(reference, state, *given, dtype=torch.float64, **more)


def assert_close(ours, exact):
    for one, other in zip(ours, exact, strict=True):
        torch.testing.assert_close(one.double(), other.double(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_ten_steps_are_those_of_torch(device, kind):
    momentum, dampening, nesterov = kind
    parameters, *_ = state_of(device)
    parameters[4] = parameters[4].contiguous(memory_format=torch.channels_last)
    theirs = [one.clone().requires_grad_() for one in parameters]
    optimizer = torch.optim.SGD(
        theirs, lr=LR, momentum=momentum, dampening=dampening, nesterov=nesterov, weight_decay=DECAY, foreach=True
    )
    buffers = [torch.full_like(one, torch.nan) for one in parameters] if momentum else []
    for step in range(1, 11):
        gradients = [torch.randn_like(one) for one in parameters]
        for one, gradient in zip(theirs, gradients, strict=True):
            one.grad = gradient.clone()
        optimizer.step()
        sgd_(parameters, gradients, buffers, step, LR, *kind, DECAY)
    assert_close(parameters, [one.detach() for one in theirs])
    assert_close(buffers, [optimizer.state[one]["momentum_buffer"] for one in theirs] if momentum else [])


@pytest.mark.parametrize("dtypes", [(torch.bfloat16,) * 6, (torch.float16, torch.float32, torch.bfloat16) * 2])
def test_gradients_may_be_in_half_precision_or_mixed(device, dtypes):
    state = state_of(device)
    state[1] = [one.to(dtype) for one, dtype in zip(state[1], dtypes, strict=True)]
    assert_close(after(sgd_, state), exactly(state))


@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_step_and_learning_rate_may_be_tensors(device, dtype, step):
    state = state_of(device, [(9,), (2, 3)])
    tensors = torch.tensor(step, device=device, dtype=dtype), torch.tensor([LR], device=device, dtype=dtype)
    assert_close(after(sgd_, state, KINDS[2], *tensors), exactly(state, KINDS[2], step))


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_changes_where_gradients_were_not_finite(device, kind):
    state = state_of(device, [(9,), ()])
    state[1][0].fill_(torch.inf)
    skipped = torch.ones(1, device=device)
    for function in (sgd_, reference):
        assert all(map(torch.equal, after(function, state, kind, found_inf=skipped), [*state[0], *state[2]]))
    state[1][0].fill_(1.0)
    for function in (sgd_, reference):
        assert_close(after(function, state, kind, found_inf=skipped * 0), exactly(state, kind))


def test_gradients_count_divided_by_their_scale_and_stay(device):
    state = state_of(device, [(9,), (2, 3)])
    scaled = [state[0], [one * 1024 for one in state[1]], state[2]]
    before = copies(scaled[1])
    for function in (sgd_, reference):
        assert_close(after(function, scaled, grad_scale=torch.full((1,), 1024.0, device=device)), exactly(state))
    assert all(map(torch.equal, scaled[1], before))


@pytest.mark.parametrize("size", [1, 4095, 4097])
def test_what_lies_behind_a_tensor_stays(device, size):
    rooms = [torch.full((9000,), 5.0, device=device) for _ in range(3)]
    for room, tensors in zip(rooms, state := state_of(device, [(size,)]), strict=True):
        room[:size] = tensors[0]
    sgd_(*([room[:size]] for room in rooms), 3, LR, *KINDS[1], DECAY)
    assert_close([rooms[0][:size], rooms[2][:size]], exactly(state))
    assert all((room[size:] == 5).all() for room in rooms)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_what_kernels_do_not_serve_is_updated_all_the_same(device, monkeypatch, dtype):
    monkeypatch.setattr(sgd, "update", None)
    state = state_of(device, [(6, 4)])
    state[0], state[2] = copies(state[0], dtype), copies(state[2], dtype)
    for ours, exact in zip(after(sgd_, state, dtype=dtype), exactly(state), strict=True):
        torch.testing.assert_close(ours, exact.to(dtype))


def test_buffers_may_lie_otherwise_than_parameters(device, monkeypatch):
    monkeypatch.setattr(sgd, "update", None)
    state = state_of(device, [(6, 4)])
    state[2] = [torch.randn(4, 6, device=device).t()]
    assert_close(after(sgd_, state), exactly(state))


def test_no_parameters_are_no_work(device):
    sgd_([], [], [], 1, LR, *KINDS[1], DECAY)
    empty = [[torch.empty(0, device=device)] for _ in range(3)]
    sgd_(*empty, 1, LR, *KINDS[1], DECAY)


def test_momentum_needs_buffers(device):
    state = state_of(device, [(9,)])
    with pytest.raises(ValueError, match="zip"):
        sgd_(*state[:2], [], 1, LR, *KINDS[1], DECAY)


def test_the_same_input_gives_the_same_bits(device):
    state = state_of(device)
    assert all(map(torch.equal, after(sgd_, state), after(sgd_, state)))


@pytest.mark.parametrize("kind", [KINDS[0], KINDS[3]])
def test_the_operator_is_what_torch_asks_of_one(device, kind):
    one = torch.ones((), device=device, dtype=torch.float64)
    factors = (one, one, *kind, DECAY, torch.zeros(1, device=device), None)
    torch.library.opcheck(sgd.update, (*state_of(device, [(3,), (2,)]), *factors), test_utils=CHECKS)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_step_keeps_it_whole(device):
    state = state_of(device, [(9,), (2, 3)])
    compiled = torch.compile(sgd_, fullgraph=True, backend="aot_eager")
    assert_close(after(compiled, state), exactly(state))
