"""Copies of weights in bf16 on a GPU, with Kitsune's update: captured, on several streams, and in a user's loop."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from kitsune import KitsuneOptimizer, Plan, TrainStep, Workload
from tuner.child.stream_forecast import rehearse

BF16 = {"precision": "bf16", "compile": "default", "update": "kitsune"}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, 64, 4, stride=4, bias=False)
        self.norm = nn.LayerNorm(64)
        self.up, self.down = nn.Linear(64, 256, bias=False), nn.Linear(256, 64, bias=False)
        self.head = nn.Linear(64, 10)

    def forward(self, x):
        hidden = self.patches(x).flatten(2).transpose(1, 2)
        return self.head((hidden + self.down(F.gelu(self.up(self.norm(hidden))))).mean(1))


def made(device):
    torch.manual_seed(0)
    model = Net().to(device)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def batches(device, steps=8):
    chance = torch.Generator().manual_seed(1)
    drawn = [
        (torch.randn(16, 3, 32, 32, generator=chance), torch.randint(0, 10, (16,), generator=chance))
        for _ in range(steps)
    ]
    return [(x.to(device), y.to(device)) for x, y in drawn]


def trained(device, knobs, **options):
    model, optimizer = made(device)
    with TrainStep(model, F.cross_entropy, optimizer, Plan.by_hand(**knobs), **options) as step:
        losses = [step(*batch).item() for batch in batches(device)]
        assert step.report.declined == {}
        dtypes = {name: parameter.grad.dtype for name, parameter in model.named_parameters()}
    return losses, dtypes, [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize(
    "how", [{}, {"capture": "step"}, {"capture": "segments"}, {"capture": "step", "streams": 3}], ids=str
)
def test_the_same_training_as_without_copies(device, more_streams_win, how):
    losses, dtypes, parameters = trained(device, {**BF16, **how, "weights": "bf16_copies"})
    plain, plain_dtypes, plain_parameters = trained(device, {**BF16, **how})
    assert set(plain_dtypes.values()) == {torch.float32}
    halves = {name for name, dtype in dtypes.items() if dtype == torch.bfloat16}
    # Of segments, the gradients are handed from one graph to the next, in the dtype of the parameters.
    in_products = {"patches.weight", "up.weight", "down.weight", "head.weight", "head.bias"}
    assert halves == (set() if how.get("capture") == "segments" else in_products)
    # Inductor leaves out a rounding of the bias gradient where it casts that to fp32 by itself.
    assert losses == pytest.approx(plain, rel=2e-2)
    for own, other in zip(parameters, plain_parameters, strict=True):
        torch.testing.assert_close(own, other, rtol=5e-2, atol=2e-2)


def test_the_first_gradients_are_the_same(device):
    """But for the order of sums: Inductor may split reductions in another way, and cuDNN has several algorithms."""
    found = []
    for knobs in ({**BF16, "weights": "bf16_copies"}, BF16):
        model, optimizer = made(device)
        with TrainStep(model, F.cross_entropy, optimizer, Plan.by_hand(**knobs)) as step:
            loss = step(*batches(device)[0])
            found.append((loss, {name: parameter.grad.float() for name, parameter in model.named_parameters()}))
    (loss, ours), (plain_loss, plain) = found
    assert loss.item() == pytest.approx(plain_loss.item(), rel=1e-5)
    errors = {name: ((ours[name] - plain[name]).norm() / plain[name].norm()).item() for name in ours}
    assert all(error < 5e-3 for error in errors.values()), errors


@pytest.mark.parametrize("how", [{}, {"capture": "step"}, {"capture": "step", "streams": 3}], ids=str)
def test_the_update_clips_gradients_in_bf16(device, more_streams_win, how):
    options = {"clip_grad_norm": 0.1}
    losses, dtypes, parameters = trained(device, {**BF16, **how, "weights": "bf16_copies"}, **options)
    assert torch.bfloat16 in dtypes.values()
    plain, _, plain_parameters = trained(device, {**BF16, **how, "update": "fused"}, **options)
    assert losses == pytest.approx(plain, rel=2e-2)
    for own, other in zip(parameters, plain_parameters, strict=True):
        torch.testing.assert_close(own, other, rtol=5e-2, atol=2e-2)


@pytest.mark.parametrize("how", [{}, {"streams": 3}], ids=str)
def test_an_update_that_leaves_the_graph_is_still_clipped(device, more_streams_win, how):
    found = []
    for update in ("kitsune", "fused"):
        model, optimizer = made(device)
        plan = Plan.by_hand(**{**BF16, **how, "update": update, "capture": "step"})
        step = TrainStep(model, F.cross_entropy, optimizer, plan, clip_grad_norm=0.05)
        for at, batch in enumerate(batches(device, 14)):
            optimizer.param_groups[0]["weight_decay"] = 0.01 if at < 6 else 0.01 * at  # not the same in any two steps
            step(*batch)
        assert any("update runs outside" in note or "outside the graph" in note for note in step.report.notes)
        norm = torch.stack([parameter.grad.float().norm() for parameter in model.parameters()]).norm()
        assert norm.item() == pytest.approx(0.05, rel=1e-2)
        found.append([parameter.detach().clone() for parameter in model.parameters()])
        step.close()
    for own, other in zip(*found, strict=True):
        torch.testing.assert_close(own, other, rtol=5e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("how", "options"),
    [({"capture": "step"}, {"accumulation_steps": 2}), ({"capture": "segments"}, {"clip_grad_norm": 0.1})],
    ids=str,
)
def test_what_else_reads_gradients_reads_fp32(device, how, options):
    losses, dtypes, _ = trained(device, {**BF16, **how, "weights": "bf16_copies"}, **options)
    assert set(dtypes.values()) == {torch.float32}
    plain, _, _ = trained(device, {**BF16, **how}, **options)
    assert losses == pytest.approx(plain, rel=2e-2)


@pytest.mark.parametrize("how", [{}, {"capture": "segments"}], ids=str)
def test_a_loop_of_the_users_own(device, how):
    found = []
    for copies in ({"weights": "bf16_copies"}, {}):
        model, given = made(device)
        knobs = {**BF16, **how, **copies}
        optimizer = KitsuneOptimizer(given, plan=Plan.by_hand(**knobs))
        losses = []
        for x, y in batches(device):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            assert model.up.weight.grad.dtype == torch.float32
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
        assert optimizer.report.applied == knobs
        optimizer.close()
        found.append(losses)
    assert found[0] == pytest.approx(found[1], rel=2e-2)


def test_weights_that_the_user_writes_between_steps_are_read(device):
    """In memory that no version counter watches: copies are made anew in every step."""
    model, optimizer = made(device)
    knobs = {**BF16, "capture": "step", "weights": "bf16_copies"}
    step = TrainStep(model, F.cross_entropy, optimizer, Plan.by_hand(**knobs))
    x, y = batches(device)[0]
    assert [step(x, y).item() for _ in range(6)][-1] < 2
    with torch.no_grad():
        model.head.bias.data.zero_()
        model.head.weight.data.zero_()
    assert step(x, y).item() == pytest.approx(math.log(10), rel=5e-3)
    step.close()


def test_a_rehearsal_casts_no_gradient_that_the_update_reads_in_half_precision(device):
    def casts(update):
        model, optimizer = made(device)
        workload = Workload(model, F.cross_entropy, optimizer, batches(device, steps=1)[0])
        knobs = {**BF16, "update": update, "capture": "step", "weights": "bf16_copies"}
        timeline = rehearse(workload, knobs, 1).finest.timeline()
        return sum(timeline.names[launch.name].startswith("cast_all") for launch in timeline.launches)

    assert 0 < casts("kitsune") < casts("fused")
