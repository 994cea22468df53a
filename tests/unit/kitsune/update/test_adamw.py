"""The kernel within AdamW's own step: what it updates, what it leaves to torch, and how the engine sees it."""

import copy
import pickle

import pytest
import torch

from kitsune.kernels import adamw as kernel
from kitsune.kernels import launch
from kitsune.launches.execution.issue import in_recorded_order
from kitsune.launches.transforms.renaming import renamed
from kitsune.launches.transforms.splitting import split
from kitsune.update.adamw import KernelUpdate, why_no_kernel
from kitsune.update.optimizer_update import parameters_of
from tests.step_cases import OwnSgd
from tests.unit.kitsune.launches.steps import equal, names, recorded, warmed, why_refuted

LR = 1e-2
SHAPES = [(5, 3), (), (70,), (2, 3, 4, 5), (0,)]
CLOSE = {"rtol": 1e-5, "atol": 1e-6}
interpreted = pytest.mark.skipif(not launch.IS_INTERPRETED, reason="tests/gpu/test_engine.py has it on a GPU")


@pytest.fixture(autouse=True)
def short_launches(monkeypatch):
    """The interpreter takes some milliseconds for every tensor of a launch, also for what fills it up."""
    monkeypatch.setattr(kernel, "MOST", 2)


@pytest.fixture
def calls(monkeypatch):
    """How many parameters each call of the kernel has updated; its reference does the work."""
    monkeypatch.setattr(launch, "IS_INTERPRETED", True)
    seen = []

    def update(parameters, *rest):
        seen.append(len(parameters))
        kernel.reference(parameters, *rest)

    monkeypatch.setattr(kernel, "update", update)
    return seen


def drawn(shapes=SHAPES, dtype=torch.float32):
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in shapes]


def pair(make=torch.optim.AdamW, shapes=SHAPES, groups=None, **options):
    """(ours with the kernel, torch's fused one) over parameters of their own."""
    made = []
    for _ in range(2):
        own = drawn(shapes)
        optimizer = make(groups(own) if groups else own, **{"lr": LR, **options}, fused=True)
        made.append(optimizer)
    KernelUpdate(made[0])
    return made


def give_gradients(optimizer, seed, scale=1.0, without=()):
    """The same for the same seed; `without` has positions of parameters that get none."""
    generator = torch.Generator().manual_seed(seed)
    for at, parameter in enumerate(parameters_of(optimizer)):
        gradient = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        parameter.grad = None if at in without else gradient * scale


def step(*optimizers, seed=0, without=()):
    for optimizer in optimizers:
        give_gradients(optimizer, seed, without=without)
        optimizer.step()


def assert_same(ours, theirs):
    for one, two in zip(ours.param_groups, theirs.param_groups, strict=True):
        for mine, other in zip(one["params"], two["params"], strict=True):
            torch.testing.assert_close(mine, other, **CLOSE)
            states = ours.state.get(mine, {}), theirs.state.get(other, {})
            assert states[0].keys() == states[1].keys()
            torch.testing.assert_close(*states, **CLOSE)


# The numbers, and whose they are --------------------------------------------------------------------------------------


@interpreted
@pytest.mark.parametrize("options", [{}, {"betas": (0.5, 0.0), "eps": 1e-3, "weight_decay": 0.5}])
def test_it_trains_as_torchs_fused_update(options):
    ours, theirs = pair(**options)
    for seed in range(5):
        step(ours, theirs, seed=seed)
    assert_same(ours, theirs)


def test_parameters_without_a_gradient_keep_their_step(calls):
    ours, theirs = pair()
    for seed, without in enumerate([(), (1, 2), (1, 2), (0,), (), (0, 1, 2, 3, 4)]):
        step(ours, theirs, seed=seed, without=without)
    assert_same(ours, theirs)
    assert [int(ours.state[one]["step"]) for one in ours.param_groups[0]["params"]] == [4, 3, 3, 5, 5]
    assert calls == [5, 3, 3, 4, 5]  # however far apart their steps are


@pytest.mark.parametrize("lr", [0.5, torch.tensor(0.5), torch.tensor([0.5]), torch.tensor(0.5, dtype=torch.float64)])
def test_groups_have_their_own_hyperparameters_which_may_change(calls, lr):
    def groups(parameters):
        return [
            {"params": parameters[:2], "lr": copy.copy(lr), "weight_decay": 0.5},
            {"params": parameters[2:], "betas": (0.5, 0.9), "eps": 1e-3},
        ]

    ours, theirs = pair(groups=groups)
    for seed in range(4):
        for optimizer in (ours, theirs):
            first, second = optimizer.param_groups
            first["lr"] = first["lr"] * 0.5
            second.update(eps=1e-2 / (seed + 1), betas=(0.1 * seed, 0.9), weight_decay=0.1 * seed)
        step(ours, theirs, seed=seed)
    extra = [drawn([(4,)]) for _ in range(2)]
    for optimizer, more in zip((ours, theirs), extra, strict=True):
        optimizer.add_param_group({"params": more, "lr": 0.1})
    step(ours, theirs)
    assert_same(ours, theirs)
    assert calls == [2, 3] * 4 + [2, 3, 1]


@pytest.mark.parametrize("unscaled", [False, True])
def test_a_scaler_skips_steps_and_has_gradients_divided(calls, unscaled):
    ours, theirs = pair()
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2) for _ in range(2)]
    for seed in range(6):
        for optimizer, scaler in zip((ours, theirs), scalers, strict=True):
            scale = float(scaler.scale(torch.ones(())))
            give_gradients(optimizer, seed, torch.inf if seed == 3 else scale)
            if unscaled:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        both = zip(ours.param_groups[0]["params"], theirs.param_groups[0]["params"], strict=True)
        assert all(torch.equal(one.grad, two.grad) or seed == 3 for one, two in both)
    assert_same(ours, theirs)
    assert {int(state["step"]) for state in ours.state.values()} == {5}
    assert len(calls) >= 5


def test_hooks_and_closures_are_torchs(calls):
    ours, _ = pair()
    seen = []
    ours.register_step_pre_hook(lambda *_: seen.append("before"))
    ours.register_step_post_hook(lambda *_: seen.append("after"))

    def closure():
        seen.append("closure")
        loss = sum((parameter.square().sum() for parameter in ours.param_groups[0]["params"]), torch.zeros(()))
        loss.backward()
        return loss

    assert ours.step(closure).item() > 0
    assert seen == ["before", "closure", "after"]
    assert calls == [5]


# What is left to torch ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change", [{"maximize": True}, {"fused": False, "foreach": False}, {"weight_decay": 0.1}, {"betas": "tensors"}]
)
def test_hyperparameters_that_the_kernel_does_not_know_are_torchs_from_then_on(calls, change):
    ours, theirs = pair(make=torch.optim.Adam, weight_decay=0.0)
    step(ours, theirs)
    if change.get("betas"):
        change = {"betas": (torch.tensor(0.9), torch.tensor(0.99))}
    for optimizer in (ours, theirs):
        optimizer.param_groups[0].update(change)
    step(ours, theirs, seed=1)
    assert_same(ours, theirs)
    assert calls == [5]


def test_what_the_kernel_does_not_reach_is_torchs(calls):
    own, twin = drawn(dtype=torch.float64), drawn(dtype=torch.float64)
    ours, theirs = (torch.optim.AdamW(each, lr=LR, fused=True) for each in (own, twin))
    KernelUpdate(ours)
    step(ours, theirs)
    assert_same(ours, theirs)
    assert calls == []


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_copies_are_without_the_kernel_and_train_on(calls, duplicate):
    ours, theirs = pair()
    step(ours, theirs)
    other = duplicate(ours)
    step(other, theirs, seed=1)
    assert_same(other, theirs)
    assert calls == [5]


def test_it_goes_as_it_came(calls):
    optimizer = torch.optim.AdamW(drawn(), lr=LR, fused=True)
    before = set(vars(optimizer))
    KernelUpdate(optimizer).undo()
    assert set(vars(optimizer)) == before
    step(optimizer)
    assert calls == []


class Own(torch.optim.AdamW):
    """It may do anything in its step."""


@pytest.mark.parametrize(
    ("make", "options", "words"),
    [
        (torch.optim.SGD, {}, "slower than Inductor's in every shape"),
        (torch.optim.RMSprop, {}, "is for torch.optim.AdamW, and not for RMSprop"),
        (torch.optim.NAdam, {}, "not for NAdam"),
        (Own, {}, "not for Own"),
        (OwnSgd, {}, "not for OwnSgd"),
        (torch.optim.AdamW, {"amsgrad": True}, "amsgrad"),
        (torch.optim.AdamW, {"maximize": True}, "maximize"),
        (torch.optim.AdamW, {"differentiable": True}, "differentiable"),
        (torch.optim.Adam, {"weight_decay": 0.1}, "as AdamW does, and not as Adam"),
        (torch.optim.AdamW, {"betas": (torch.tensor(0.9), torch.tensor(0.99))}, "betas in tensors"),
    ],
)
def test_why_there_is_no_kernel_for_an_optimizer(make, options, words):
    assert words in why_no_kernel(make(drawn(), lr=LR, **options))


def test_which_optimizers_there_is_a_kernel_for():
    assert why_no_kernel(torch.optim.AdamW(drawn())) is None
    assert why_no_kernel(torch.optim.Adam(drawn())) is None
    assert why_no_kernel(torch.optim.Adam(drawn(), weight_decay=0.1, decoupled_weight_decay=True)) is None


def test_why_there_is_no_kernel_for_a_parameter():
    halves = drawn(dtype=torch.bfloat16)
    assert "parameters in fp32" in why_no_kernel(torch.optim.AdamW(halves))
    gaps = [torch.nn.Parameter(torch.randn(6, 8)[:, ::2])]
    assert "without gaps" in why_no_kernel(torch.optim.AdamW([{"params": drawn()}, {"params": gaps}]))
    for one in halves:
        one.requires_grad_(False)
    assert why_no_kernel(torch.optim.AdamW([{"params": drawn()}, {"params": halves}])) is None


# In the engine --------------------------------------------------------------------------------------------------------


def by_kernel(parameters):
    optimizer = torch.optim.AdamW(parameters, lr=1e-2, fused=True)
    KernelUpdate(optimizer)
    return optimizer


def numbers(recording, tensors):
    """Those of the storages on which the tensors lie."""
    places = {storage.data_ptr(): number for number, storage in recording.held.items()}
    return {places[tensor.untyped_storage().data_ptr()] for tensor in tensors}


@interpreted
def test_what_it_reads_and_writes_is_known():
    step, _ = warmed("mlp", by_kernel)
    recording = recorded(step)
    (launch,) = [launch for launch in recording.graph.launches if launch.name == "adamw"]
    reads, writes = ({span.storage for span in spans} for spans in (launch.reads, launch.writes))
    states = step.optimizer.state.values()
    moved = [*step.model.parameters(), *(state[name] for state in states for name in ("exp_avg", "exp_avg_sq"))]
    steps = numbers(recording, [state["step"] for state in states])
    assert writes >= numbers(recording, moved)
    assert not writes & steps
    assert reads >= writes | steps
    assert len(writes) == 4 * len(states)  # the gradients, too, as by torch's fused update


@interpreted
def test_it_is_split_into_buckets_that_come_to_the_same_bits(monkeypatch):
    monkeypatch.setattr("kitsune.launches.transforms.splitting.FIRST_BYTES", 80)
    step, twin = warmed("mlp", by_kernel)
    torch.manual_seed(1)
    recording = recorded(step)
    smaller = split(renamed(recording), 300)
    assert names(recording).count("adamw") == 1
    assert names(smaller).count("adamw") > 1
    loss, gradients = in_recorded_order(smaller)()
    torch.manual_seed(1)
    twin()
    expected = twin()
    assert equal([loss, *gradients], [expected[0], *expected[1]])
    assert equal(step.state(), twin.state())


@interpreted
def test_the_proof_finds_it_to_be_the_step(monkeypatch):
    monkeypatch.setattr("kitsune.launches.transforms.splitting.FIRST_BYTES", 80)
    step, _ = warmed("mlp", by_kernel)
    recording = recorded(step)
    replay = in_recorded_order(split(renamed(recording), 300))
    assert why_refuted(recording, step, replay) is None
