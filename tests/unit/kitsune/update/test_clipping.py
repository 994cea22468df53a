"""Clipping by Kitsune's kernel as it reads gradients: what torch's own clipping before a fused update does."""

import pytest
import torch

from kitsune import Plan, TrainStep
from kitsune.kernels import adamw as kernel
from kitsune.kernels import launch
from kitsune.update.adamw import KernelUpdate
from kitsune.update.loss_scaler import LossScaler
from kitsune.update.optimizer_update import Update, clip_factor, parameters_of
from tests.step_cases import batches, capturing_cpu

SHAPES = [(5, 3), (), (70,), (2, 3, 4, 5)]
MOST = 0.5
CLOSE = {"rtol": 1e-5, "atol": 1e-7}


@pytest.fixture(autouse=True)
def by_reference(monkeypatch):
    """The kernel's reference does the work, also where no GPU is."""
    monkeypatch.setattr(launch, "IS_INTERPRETED", True)
    monkeypatch.setattr(kernel, "update", kernel.reference)


def pair(groups=lambda parameters: parameters, **options):
    """(ours with the kernel, torch's fused one) over parameters of their own."""
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        own = [torch.nn.Parameter(torch.randn(shape)) for shape in SHAPES]
        made.append(torch.optim.AdamW(groups(own), lr=1e-2, fused=True, **options))
    KernelUpdate(made[0])
    return made


def give_gradients(optimizer, seed, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters_of(optimizer):
        parameter.grad = torch.randn(parameter.shape, generator=generator) * scale


def stepped(update, seed, scale=1.0):
    give_gradients(update.optimizer, seed, scale)
    update.prepare_gradients()
    update.step()


def assert_same(ours, theirs):
    for mine, other in zip(parameters_of(ours), parameters_of(theirs), strict=True):
        torch.testing.assert_close(mine, other, **CLOSE)
        torch.testing.assert_close(mine.grad, other.grad, **CLOSE)
        torch.testing.assert_close(ours.state[mine], theirs.state[other], **CLOSE)


@pytest.mark.parametrize("scale", [1.0, 1e-3], ids=["clipped", "short enough"])
def test_parameters_and_gradients_are_those_of_torch(scale):
    optimizers = pair()
    for seed in range(4):
        for optimizer in optimizers:
            stepped(Update(optimizer, clip_grad_norm=MOST), seed, scale)
    assert_same(*optimizers)


def test_the_kernel_does_it():
    ours, _ = pair()
    update = Update(ours, clip_grad_norm=MOST)
    give_gradients(ours, 0)
    before = [parameter.grad.clone() for parameter in parameters_of(ours)]
    update.prepare_gradients()
    assert all(torch.equal(one.grad, other) for one, other in zip(parameters_of(ours), before, strict=True))
    update.step()
    clipped = torch.cat([parameter.grad.flatten() for parameter in parameters_of(ours)])
    assert clipped.norm().item() == pytest.approx(MOST, rel=1e-5)


@pytest.mark.parametrize("option", [{"amsgrad": True}, {"maximize": True}])
def test_groups_that_torch_updates_are_clipped_as_well(option):
    def groups(parameters):
        return [{"params": parameters[:2]}, {"params": parameters[2:], **option}]

    optimizers = pair(groups)
    for seed in range(3):
        for optimizer in optimizers:
            stepped(Update(optimizer, clip_grad_norm=MOST), seed)
    assert_same(*optimizers)


def test_gradients_in_half_precision_of_a_group_that_torch_updates_are_clipped_too():
    ours, _ = pair(maximize=True)
    update = Update(ours, clip_grad_norm=MOST)
    give_gradients(ours, 0)
    for parameter in parameters_of(ours):
        gradient, parameter.grad = parameter.grad, None
        parameter.grad_dtype = None
        parameter.grad = gradient.bfloat16()
    update.prepare_gradients()
    update.step()
    clipped = torch.cat([parameter.grad.float().flatten() for parameter in parameters_of(ours)])
    assert clipped.norm().item() == pytest.approx(MOST, rel=1e-2)


def test_a_hook_before_the_update_sees_clipped_gradients():
    ours, _ = pair()
    seen = []

    def look(optimizer, *_):
        seen.append(torch.cat([parameter.grad.flatten() for parameter in parameters_of(optimizer)]).norm().item())

    ours.register_step_pre_hook(look)
    stepped(Update(ours, clip_grad_norm=MOST), 0)
    assert seen == [pytest.approx(MOST, rel=1e-5)]


def test_an_update_elsewhere_than_its_gradients_clips_apart():
    ours, _ = pair()
    update = Update(ours, clip_grad_norm=MOST, clips_apart=True)
    give_gradients(ours, 0)
    update.prepare_gradients()
    clipped = torch.cat([parameter.grad.flatten() for parameter in parameters_of(ours)])
    assert clipped.norm().item() == pytest.approx(MOST, rel=1e-5)


def test_the_factor_is_that_of_one_update_alone():
    optimizers = pair()
    for optimizer in optimizers:
        stepped(Update(optimizer, clip_grad_norm=MOST), 0)
        give_gradients(optimizer, 1)
        optimizer.step()
    assert_same(*optimizers)
    assert not hasattr(optimizers[0], "clip_factor")


def test_gradients_that_are_scaled_are_unscaled_first():
    optimizers = pair()
    for seed in range(3):
        for optimizer in optimizers:
            scaler = LossScaler(torch.device("cpu"), init_scale=8.0)
            stepped(Update(optimizer, scaler=scaler, clip_grad_norm=MOST), seed, 8.0)
    assert_same(*optimizers)


def test_the_norm_of_gradients_in_half_precision_is_in_fp32():
    gradients = [torch.full((1000,), 1.0).bfloat16(), torch.full((24,), 2.0)]
    norm = torch.tensor(1000 + 24 * 4.0).sqrt()
    assert clip_factor(gradients, 1.0).item() == pytest.approx(1 / norm.item(), rel=1e-6)
    assert clip_factor(gradients, 1.0).dtype == torch.float32


def trained(update):
    """(losses, the norm of the last gradients) where a hyperparameter changes in every step, from the seventh on."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    plan = Plan.by_hand(update=update, capture="step")
    step = TrainStep(model, torch.nn.functional.mse_loss, optimizer, plan, clip_grad_norm=MOST / 10)
    losses = []
    for at, (x, y) in enumerate(batches(12)):
        optimizer.param_groups[0]["weight_decay"] = 0.01 * max(at, 6)
        losses.append(step(x, y[:, :1].expand(-1, 8)).item())
    assert any("update runs outside" in note for note in step.report.notes)
    assert step.report.declined == {}
    step.close()
    return losses, torch.cat([parameter.grad.flatten() for parameter in model.parameters()]).norm().item()


def test_an_update_that_leaves_the_graph_of_its_gradients_is_clipped(monkeypatch):
    capturing_cpu(monkeypatch)
    (losses, norm), (plain, _) = trained("kitsune"), trained("fused")
    assert losses == pytest.approx(plain, rel=1e-5)
    assert norm == pytest.approx(MOST / 10, rel=1e-4)


def test_gradients_may_be_in_half_precision_where_nothing_rounds_them_on_the_way():
    ours, theirs = pair()
    assert Update(ours).reads_half
    assert Update(ours, clip_grad_norm=MOST).reads_half
    assert Update(ours, clips_apart=True).reads_half
    assert not Update(ours, clip_grad_norm=MOST, clips_apart=True).reads_half
    assert not Update(theirs).reads_half
    ours.register_step_pre_hook(lambda *_: None)
    assert not Update(ours).reads_half
