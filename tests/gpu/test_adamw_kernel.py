"""AdamW as Triton compiles it: the parameters of real models, skipped updates, streams, CUDA graphs, Inductor."""

import pytest
import torch

from kitsune.kernels import adamw as kernel
from kitsune.kernels.adamw import adamw_, reference
from kitsune.launches.execution.kernel_trace import kernels_of
from kitsune.update.adamw import KernelUpdate

LR, BETAS, EPS, DECAY = 1e-3, (0.9, 0.999), 1e-8, 0.01
LAYER = [(768, 768), (768,)] * 4 + [(3072, 768), (3072,), (768, 3072), (768,)] + [(768,)] * 4
BERT = [(30522, 768), (512, 768), (2, 768), (768,), (768,), *LAYER * 12, (2, 768), (2,)]
CONVOLUTIONS = [(64, 3, 7, 7), (64,), (64, 64, 1, 1), (256, 64, 1, 1), (512, 512, 3, 3), (1000, 2048), (1000,)]
#: They end amid a block and amid 16 bytes.
MIXED = [(5, 3), (), (4099,), (0,), (8192,), (1,), (17,), *CONVOLUTIONS]


@pytest.fixture(autouse=True)
def no_way_out(monkeypatch):
    """The reference is out of reach: what is updated is updated by the kernels."""
    monkeypatch.setattr(kernel, "reference", None)


def draw(device, shapes, seed=0):
    torch.manual_seed(seed)
    tensors = [torch.randn(shape, device=device) for shape in shapes]
    return [one.contiguous(memory_format=torch.channels_last) if one.dim() == 4 else one for one in tensors]


def state_of(device, shapes=MIXED, dtype=torch.float32):
    """(parameters, gradients, averages, averages of squares) as after some updates."""
    parameters, gradients, averages, squares = (draw(device, shapes, seed) for seed in range(4))
    return [parameters, [one.to(dtype) for one in gradients], averages, [one.square() for one in squares]]


def after(state, step=3, lr=LR, function=adamw_, **more):
    """What an update makes of a copy of parameters and averages."""
    parameters, averages, squares = ([one.clone() for one in tensors] for tensors in (state[0], *state[2:]))
    function(parameters, state[1], averages, squares, step, lr, *BETAS, EPS, DECAY, **more)
    return [*parameters, *averages, *squares]


def own_of(optimizer):
    return optimizer.param_groups[0]["params"]


def assert_close(ours, wanted):
    for one, other in zip(ours, wanted, strict=True):
        assert one.stride() == other.stride()
        torch.testing.assert_close(one.detach(), other.detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("shapes", [BERT, MIXED], ids=["BERT", "mixed"])
def test_ten_steps_are_those_of_torch(device, shapes):
    parameters = draw(device, shapes)
    theirs = [one.clone().requires_grad_() for one in parameters]
    optimizer = torch.optim.AdamW(theirs, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY, foreach=True)
    averages, squares = ([torch.zeros_like(one) for one in parameters] for _ in range(2))
    for step in range(1, 11):
        gradients = draw(device, shapes, seed=step)
        for one, gradient in zip(theirs, gradients, strict=True):
            one.grad = gradient
        optimizer.step()
        adamw_(parameters, gradients, averages, squares, step, LR, *BETAS, EPS, DECAY)
    states = [optimizer.state[one] for one in theirs]
    assert_close(parameters, theirs)
    assert_close(averages, [state["exp_avg"] for state in states])
    assert_close(squares, [state["exp_avg_sq"] for state in states])


def test_gradients_may_be_in_half_precision_scaled_and_not_finite(device):
    state = state_of(device, dtype=torch.bfloat16)
    wide = [state[0], [one.float() for one in state[1]], *state[2:]]
    scaled = [state[0], [one * 64 for one in state[1]], *state[2:]]
    flags = {"grad_scale": torch.full((1,), 64.0, device=device), "found_inf": torch.zeros(1, device=device)}
    assert_close(after(scaled, **flags), after(wide))
    flags["found_inf"].fill_(1)
    assert all(map(torch.equal, after(scaled, **flags), [one for tensors in (state[0], *state[2:]) for one in tensors]))


def test_there_may_be_more_elements_than_an_int32_counts(device):
    small = state_of(device, [(4099,)])
    many = [[torch.zeros(2**31 + 4099, device=device)] for _ in range(4)]
    for large, one in zip(many, small, strict=True):
        large[0][-4099:] = one[0]
    adamw_(*many, 3, LR, *BETAS, EPS, DECAY)
    for large, one in zip((many[0], *many[2:]), after(small, function=reference), strict=True):
        torch.testing.assert_close(large[0][-4099:], one, rtol=1e-6, atol=1e-6)
        assert not large[0][:-4099].any()


def test_the_same_input_gives_the_same_bits(device):
    state = state_of(device)
    assert all(map(torch.equal, after(state), after(state)))


def test_it_runs_on_the_stream_that_is_current(device):
    state = state_of(device)
    wanted = after(state)
    late = [torch.zeros_like(one) for one in state[1]]
    torch.cuda.synchronize()
    side = torch.cuda.Stream(device)
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)  # some 25 ms, in which a kernel on another stream would read zeros
        torch._foreach_copy_(late, state[1])
        ours = after([state[0], late, *state[2:]])
    side.synchronize()
    assert all(map(torch.equal, ours, wanted))


def test_a_cuda_graph_follows_step_learning_rate_and_gradients(device):
    parameters, gradients, averages, squares = state_of(device)
    step, lr = torch.zeros((), device=device), torch.tensor(LR, device=device, dtype=torch.float64)
    start = [[one.clone() for one in tensors] for tensors in (parameters, averages, squares)]
    eager = [[one.clone() for one in tensors] for tensors in (parameters, averages, squares)]
    graph = torch.cuda.CUDAGraph()
    after([parameters, gradients, averages, squares])
    with torch.cuda.graph(graph):
        step.add_(1)
        adamw_(parameters, gradients, averages, squares, step, lr, *BETAS, EPS, DECAY)
    assert all(map(torch.equal, parameters, start[0]))
    for number, rate in enumerate((1e-3, 1e-2, 5e-4), start=1):
        torch._foreach_copy_(gradients, draw(device, MIXED, seed=9 + number))
        lr.fill_(rate)
        graph.replay()
        adamw_(eager[0], gradients, *eager[1:], number, rate, *BETAS, EPS, DECAY)
    torch.cuda.synchronize()
    for ours, wanted in zip((parameters, averages, squares), eager, strict=True):
        assert_close(ours, wanted)


def test_a_cuda_graph_follows_the_step_of_each_parameter(device):
    parameters, gradients, averages, squares = state_of(device)
    steps = [torch.full((), float(7 * at), device=device) for at in range(len(parameters))]
    rate = torch.tensor(LR, device=device)
    wanted = [one.clone() for one in steps], [[one.clone() for one in each] for each in (parameters, averages, squares)]
    graph = torch.cuda.CUDAGraph()
    after([parameters, gradients, averages, squares], step=steps, lr=rate)
    with torch.cuda.graph(graph):
        torch._foreach_add_(steps, 1)
        adamw_(parameters, gradients, averages, squares, steps, rate, *BETAS, EPS, DECAY)
    for _ in range(3):
        graph.replay()
        torch._foreach_add_(wanted[0], 1)
        for at, now in enumerate(wanted[0]):
            alone = ([each[at]] for each in (wanted[1][0], gradients, *wanted[1][1:]))
            adamw_(*alone, int(now), LR, *BETAS, EPS, DECAY)
    torch.cuda.synchronize()
    for ours, theirs in zip((parameters, averages, squares), wanted[1], strict=True):
        assert_close(ours, theirs)


@pytest.mark.parametrize("shapes", [BERT, MIXED], ids=["BERT", "mixed"])
def test_within_an_optimizers_step_it_is_the_only_update(device, shapes):
    """One launch for 32 tensors, and those that count the steps."""
    ours, theirs = (torch.optim.AdamW(draw(device, shapes), lr=LR, fused=True) for _ in range(2))
    KernelUpdate(ours)
    for seed in range(3):
        for optimizer in (ours, theirs):
            gradients = draw(device, shapes, seed=seed)
            for at, (parameter, gradient) in enumerate(zip(own_of(optimizer), gradients, strict=True)):
                parameter.grad = None if seed == 1 and at % 3 == 0 else gradient
        launched = kernels_of(ours.step)
        theirs.step()
        updated = sum(one.grad is not None and one.numel() > 0 for one in own_of(ours))
        assert sum(count for name, count in launched.items() if "update_kernel" in name) == -(-updated // kernel.MOST)
        assert not any("Adam" in name for name in launched)
    assert_close(own_of(ours), own_of(theirs))
    for one, two in zip(own_of(ours), own_of(theirs), strict=True):
        torch.testing.assert_close(ours.state[one], theirs.state[two], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("unscaled", [False, True])
def test_a_scaler_skips_it_and_has_gradients_divided(device, unscaled):
    optimizers = [torch.optim.AdamW(draw(device, MIXED), lr=LR, fused=True) for _ in range(2)]
    KernelUpdate(optimizers[0])
    scalers = [torch.amp.GradScaler("cuda", init_scale=2.0**10, growth_interval=2) for _ in range(2)]
    for seed in range(5):
        for optimizer, scaler in zip(optimizers, scalers, strict=True):
            scale = scaler.scale(torch.ones((), device=device))
            for parameter, gradient in zip(own_of(optimizer), draw(device, MIXED, seed=seed), strict=True):
                parameter.grad = gradient * (torch.inf if seed == 2 else scale)
            if unscaled:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
    for one, two in zip(*map(own_of, optimizers), strict=True):
        assert torch.equal(one.grad, two.grad)
        assert optimizers[0].state[one]["step"] == 4
    assert_close(*map(own_of, optimizers))


def test_inductor_keeps_it_whole(device):
    state = state_of(device)
    step, lr = (torch.tensor(value, device=device, dtype=torch.float64) for value in (3, LR))
    compiled = torch.compile(adamw_, fullgraph=True)
    assert_close(after(state, step, lr, compiled), after(state, step, lr))
