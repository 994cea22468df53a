"""AdamW in few launches against torch.optim.AdamW and its eager reference: layouts, dtypes, skips, torch.compile."""

import pytest
import torch

from kitsune.kernels import adamw as kernel
from kitsune.kernels.adamw import adamw_, reference

LR, BETAS, EPS, DECAY = 1e-2, (0.9, 0.999), 1e-8, 0.1
SHAPES = [(5, 3), (), (4100,), (0,), (2, 3, 4, 5), (8192,)]
CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor")


@pytest.fixture(autouse=True)
def short_launches(monkeypatch):
    """The interpreter takes some milliseconds for every tensor of a launch, also for what fills it up."""
    monkeypatch.setattr(kernel, "MOST", 4)


def state_of(device, shapes=SHAPES):
    """(parameters, gradients, averages, averages of squares) as after some updates."""
    torch.manual_seed(0)
    drawn = [[torch.randn(shape, device=device) for shape in shapes] for _ in range(4)]
    return [*drawn[:3], [one.square() for one in drawn[3]]]


def copies(state, dtype=torch.float32):
    return [[one.to(dtype, copy=True, memory_format=torch.preserve_format) for one in tensors] for tensors in state]


def after(function, state, step=3, lr=LR, betas=BETAS, **more):
    """What an update makes of a copy of parameters and averages."""
    ours = [*copies(state[:1], state[0][0].dtype), state[1], *copies(state[2:], state[0][0].dtype)]
    function(*ours, step, lr, *betas, EPS, DECAY, **more)
    return [tensor for tensors in (ours[0], *ours[2:]) for tensor in tensors]


def exactly(state, **more):
    """The same by the reference in fp64."""
    return after(reference, [*copies(state[:1], torch.float64), state[1], *copies(state[2:], torch.float64)], **more)


def assert_close(ours, exact):
    for one, other in zip(ours, exact, strict=True):
        torch.testing.assert_close(one.double(), other.double(), rtol=1e-6, atol=1e-6)


def test_ten_steps_are_those_of_torch(device):
    parameters, *_ = state_of(device)
    parameters[4] = parameters[4].contiguous(memory_format=torch.channels_last)
    theirs = [one.clone().requires_grad_() for one in parameters]
    optimizer = torch.optim.AdamW(theirs, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY, foreach=True)
    averages, squares = ([torch.zeros_like(one) for one in parameters] for _ in range(2))
    for step in range(1, 11):
        gradients = [torch.randn_like(one) for one in parameters]
        for one, gradient in zip(theirs, gradients, strict=True):
            one.grad = gradient.clone()
        optimizer.step()
        adamw_(parameters, gradients, averages, squares, step, LR, *BETAS, EPS, DECAY)
    states = [optimizer.state[one] for one in theirs]
    assert_close(parameters, [one.detach() for one in theirs])
    assert_close(averages, [state["exp_avg"] for state in states])
    assert_close(squares, [state["exp_avg_sq"] for state in states])


@pytest.mark.parametrize("dtypes", [(torch.bfloat16,) * 6, (torch.float16, torch.float32, torch.bfloat16) * 2])
def test_gradients_may_be_in_half_precision_or_mixed(device, dtypes):
    state = state_of(device)
    state[1] = [one.to(dtype) for one, dtype in zip(state[1], dtypes, strict=True)]
    assert_close(after(adamw_, state), exactly(state))


def test_betas_may_be_zero(device):
    state = state_of(device, [(9,)])
    assert_close(after(adamw_, state, betas=(0.0, 0.0)), exactly(state, betas=(0.0, 0.0)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_step_and_learning_rate_may_be_tensors(device, dtype):
    state = state_of(device, [(9,), (2, 3)])
    step, lr = torch.tensor(7, device=device, dtype=dtype), torch.tensor([LR], device=device, dtype=dtype)
    assert_close(after(adamw_, state, step=step, lr=lr), exactly(state, step=7))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_each_parameter_may_have_a_step_of_its_own(device, dtype):
    state = state_of(device, [(9,), (2, 3), (), (4100,), (5,)])
    steps = [torch.tensor(step, device=device, dtype=dtype) for step in (1, 40, 7, 1000, 2)]
    alone = [exactly([[tensors[at]] for tensors in state], step=int(step)) for at, step in enumerate(steps)]
    wanted = [one for tensors in zip(*alone, strict=True) for one in tensors]
    for function in (adamw_, reference):
        assert_close(after(function, state, step=steps), wanted)


@pytest.mark.parametrize("shape", [(), (1,)])
def test_nothing_changes_where_gradients_were_not_finite(device, shape):
    state = state_of(device, [(9,), ()])
    state[1][0].fill_(torch.inf)
    skipped = torch.ones(shape, device=device)
    for function in (adamw_, reference):
        changed = after(function, state, found_inf=skipped)
        assert all(map(torch.equal, changed, [one for tensors in (state[0], *state[2:]) for one in tensors]))
    state[1][0].fill_(1.0)
    for function in (adamw_, reference):
        assert_close(after(function, state, found_inf=skipped * 0), exactly(state))


@pytest.mark.parametrize("function", [adamw_, reference])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_left_divided_by_their_scale_as_torch_leaves_them(device, function, dtype):
    state = state_of(device, [(9,), (3, 2)])
    state[1] = [state[1][0].to(dtype), state[1][1].to(dtype).t().contiguous().t()]  # the second is laid otherwise
    scaled = [state[0], [one * 1024 for one in state[1]], *state[2:]]
    flags = {"grad_scale": torch.full((1,), 1024.0, device=device), "found_inf": torch.ones((), device=device)}
    after(function, scaled, **flags)
    assert all(torch.equal(one, other * 1024) for one, other in zip(scaled[1], state[1], strict=True))
    flags["found_inf"].zero_()
    assert_close(after(function, scaled, **flags), exactly(state))
    assert all(map(torch.equal, scaled[1], state[1]))


@pytest.mark.parametrize("function", [adamw_, reference])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_clipped_before_they_are_rounded(device, function, dtype):
    state = state_of(device, [(9,), (3, 2)])
    state[1] = [one.to(dtype) for one in state[1]]
    flags = {"grad_scale": torch.full((1,), 4.0, device=device), "clip_factor": torch.full((), 0.3, device=device)}
    clipped = [state[0], [one.float() / 4 * flags["clip_factor"] for one in state[1]], *state[2:]]
    assert_close(after(function, state, **flags), exactly(clipped))
    for one, other in zip(state[1], clipped[1], strict=True):
        torch.testing.assert_close(one, other.to(dtype))


def test_what_does_not_fit_into_one_launch_goes_into_the_next(device):
    state = state_of(device, [(n,) for n in (3, 1, 0, 16, 5, 7, 2, 0, 9, 4, 8)])
    assert_close(after(adamw_, state), exactly(state))
    grids = [grid for grid, *_ in kernel.launches(*state)]
    assert grids == [(4,), (4,), (1,)]


def test_gradients_may_lie_otherwise_and_parameters_at_odd_addresses(device):
    state = state_of(device, [(6, 4), (7,)])
    state[1] = [torch.randn(4, 6, device=device).t(), torch.randn((), device=device).expand(7)]
    exact = exactly(state)
    room = torch.empty(8, device=device)
    room[1:] = state[0][1]
    parameters, averages, squares = [state[0][0].clone(), room[1:]], *copies(state[2:])
    adamw_(parameters, state[1], averages, squares, 3, LR, *BETAS, EPS, DECAY)
    assert_close((*parameters, *averages, *squares), exact)


@pytest.mark.parametrize("size", [1, 4095, 4097])
def test_what_lies_behind_a_tensor_stays(device, size):
    rooms = [torch.full((9000,), 5.0, device=device) for _ in range(4)]
    for room, tensors in zip(rooms, state := state_of(device, [(size,)]), strict=True):
        room[:size] = tensors[0]
    adamw_(*([room[:size]] for room in rooms), 3, LR, *BETAS, EPS, DECAY)
    assert_close([rooms[0][:size], *(room[:size] for room in rooms[2:])], exactly(state))
    assert all((room[size:] == 5).all() for room in rooms)


@pytest.mark.parametrize("changed", ["gaps", "averages", "halves", "doubles"])
def test_what_kernels_do_not_serve_is_updated_all_the_same(device, monkeypatch, changed):
    monkeypatch.setattr(kernel, "update", None)
    state = state_of(device, [(6, 4)])
    if changed == "gaps":
        state[0] = [torch.randn(6, 8, device=device)[:, ::2]]
    if changed == "averages":
        state[2] = [torch.randn(4, 6, device=device).t()]
    dtype = {"halves": torch.bfloat16, "doubles": torch.float64}.get(changed, torch.float32)
    own = [one.to(dtype) for one in state[0]]
    exact = exactly([own, *state[1:]])[0]
    adamw_(own, *copies(state[1:]), 3, LR, *BETAS, EPS, DECAY)
    torch.testing.assert_close(own[0], exact.to(dtype))


def test_no_parameters_are_no_work(device):
    adamw_([], [], [], [], 1, LR, *BETAS, EPS, DECAY)
    empty = [[torch.empty(0, device=device)] for _ in range(4)]
    adamw_(*empty, 1, LR, *BETAS, EPS, DECAY)


def test_the_same_input_gives_the_same_bits(device):
    state = state_of(device)
    assert all(map(torch.equal, after(adamw_, state), after(adamw_, state)))


def test_leaves_that_require_gradients_are_updated(device):
    state = state_of(device, [(9,)])
    leaf = state[0][0].clone().requires_grad_()
    version = leaf._version
    adamw_([leaf], *copies(state[1:]), 3, LR, *BETAS, EPS, DECAY)
    assert leaf.is_leaf and leaf._version > version
    torch.testing.assert_close(leaf.detach(), exactly(state)[0].float())


def test_the_operator_is_what_torch_asks_of_one(device):
    one = torch.ones((), device=device)
    factors = (*BETAS, EPS, DECAY, torch.zeros(1, device=device), one)
    given = (*state_of(device, [(3,), (2,)]), [one, one.clone()], one, *factors)
    torch.library.opcheck(kernel.update, given, test_utils=CHECKS)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_step_keeps_it_whole(device):
    state = state_of(device, [(9,), (2, 3)])
    compiled = torch.compile(adamw_, fullgraph=True, backend="aot_eager")
    assert_close(after(compiled, state), exactly(state))
