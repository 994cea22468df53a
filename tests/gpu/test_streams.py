"""The knobs `streams` and `pool_bytes` on a GPU: plans that name them, carried out by TrainStep."""

import gc

import pytest
import torch
from torch import nn
from torch.autograd.profiler import profile

from kitsune import Plan, TrainStep
from kitsune.device.cuda_graph import Recorder
from kitsune.knobs import KNOBS
from kitsune.launches.plan_race import WON_BEFORE
from tests.step_cases import OPTIMIZERS, AttentionNet, Convnet, Mlp, assert_same, batches, pair, train_both
from tuner.workloads.loader import load_workload

FUSED = OPTIMIZERS["adamw by hand fused"]
STEPS = 500


@pytest.mark.parametrize("count", [choice for choice in KNOBS["streams"].choices if choice != 1])
def test_the_knob_plans_the_step(device, count):
    planned, plain = pair(device, {"capture": "step", "streams": count}, model=Convnet, optimizer=FUSED)
    train_both(planned, plain, batches(10, 8, 3, 8, 8))
    assert_same(planned, plain)
    assert planned.step.report.applied == {"capture": "step", "streams": count}
    assert not planned.step.report.declined


@pytest.mark.parametrize("capture", ["step", "segments"])
def test_launches_in_tf32_are_issued_again_in_tf32(device, capture):
    """Outside of the step cuBLAS took the kernels of fp32, and every such plan was declined."""
    knobs = {"precision": "tf32", "capture": capture, "streams": 4}
    planned, _ = pair(device, knobs, model=Convnet, optimizer=FUSED)
    planned.train(batches(10, 8, 3, 8, 8))
    assert planned.step.report.applied == knobs
    assert not planned.step.report.declined


@pytest.mark.parametrize("compiled", [{}, {"compile": "default"}])
def test_an_attention_that_drops_is_planned_as_two_graphs(device, compiled):
    """Their backward was timed, uncaptured, on the seed that the captured forward leaves on the GPU: SIGSEGV."""
    knobs = {"attention": "efficient", "capture": "segments", "streams": 4, **compiled}
    planned, _ = pair(device, knobs, model=lambda: AttentionNet(dropout=0.1), optimizer=FUSED)
    planned.train(batches(10, 8, 6, 32))
    assert torch.stack(planned.losses).isfinite().all()
    assert planned.step.report.applied == knobs
    assert not planned.step.report.declined


def test_a_pool_limits_the_streams(device):
    knobs = {"capture": "step", "streams": 4, "pool_bytes": 2**24}
    planned, plain = pair(device, knobs, model=Convnet, optimizer=FUSED)
    train_both(planned, plain, batches(10, 8, 3, 8, 8))
    assert_same(planned, plain)
    assert planned.step.report.applied == knobs


def test_the_next_step_races_what_won_against_one_stream_only(device, more_streams_win, monkeypatch):
    tried, names, counts = [], [], []
    apart = Recorder.apart
    monkeypatch.setattr(Recorder, "apart", lambda self: tried.append(1) or apart(self))
    for _ in range(2):
        tried.clear()
        planned, plain = pair(device, {"capture": "step", "streams": 4}, model=Convnet, optimizer=FUSED)
        train_both(planned, plain, batches(10, 8, 3, 8, 8))
        assert_same(planned, plain)
        names.append(planned.step.report.planned)
        counts.append(len(tried))
    assert counts[0] > counts[1] == 2
    assert [WON_BEFORE in name for name in names] == [False, True]


@pytest.mark.parametrize("capture", ["step", "segments"])
def test_the_next_step_is_planned_without_the_profiler(device, more_streams_win, monkeypatch, capture):
    """Which would slow down all that the host launches in the rest of its process."""
    profiled, plans = [], []
    monkeypatch.setattr(
        "kitsune.launches.execution.kernel_trace.profile", lambda **named: profiled.append(1) or profile(**named)
    )
    for _ in range(2):
        profiled.clear()
        planned, plain = pair(device, {"capture": capture, "streams": 4}, model=Convnet, optimizer=FUSED)
        train_both(planned, plain, batches(10, 8, 3, 8, 8))
        assert_same(planned, plain)
        assert not planned.step.report.declined
        plans.append((planned.step.report.planned.removesuffix(WON_BEFORE), len(profiled)))
    (first, looks), second = plans
    assert looks > 0
    assert second == (first, 0)


@pytest.mark.timeout(120)
def test_algorithms_that_cudnn_picks_by_timing_are_those_of_the_launches_too(device, monkeypatch):
    """Each thread times its own: by autograd's, the step had other numbers than its launches, and one stream."""
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    workload = load_workload("zoo:googlenet", str(device))
    plan = Plan(knobs={"precision": "bf16", "capture": "step", "streams": 4})
    step = TrainStep(workload.model, workload.loss_fn, workload.optimizer, plan)
    for _ in range(8):
        step(*workload.batch)
    assert step.report.applied == plan.knobs
    assert not step.report.declined


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("precision", "capture"), [("bf16", "step"), ("fp16", "segments")])
def test_a_unet_is_planned(device, precision, capture):
    """Its SiLU was recorded as the operations that its backward could be decomposed into, and streams were declined."""
    workload = load_workload("benchmarks/workloads/ddpm_unet.py:make_workload", str(device))
    knobs = {"layout": "channels_last", "precision": precision, "capture": capture, "streams": 4}
    step = TrainStep(workload.model, workload.loss_fn, workload.optimizer, Plan(knobs=knobs))
    for _ in range(8):
        step(*workload.batch)
    assert step.report.applied == knobs
    assert not step.report.declined


@pytest.mark.timeout(120)
@pytest.mark.parametrize("dropout", [0.0, 0.25])
def test_500_steps_on_streams_are_500_steps_of_the_plain_graph_to_the_bit(device, dropout):
    many = batches(STEPS, 64, 8)
    ends = []
    for streams in (1, 4):
        planned, _ = pair(
            device, {"capture": "step", "streams": streams}, model=lambda: Mlp(dropout), optimizer=FUSED, clip=1.0
        )
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(planned.step.optimizer, STEPS)
        torch.manual_seed(7)
        for batch in many:
            planned.train([batch])
            schedule.step()
        assert planned.step.is_settled
        ends.append([*planned.losses, *(parameter.detach() for parameter in planned.step.model.parameters())])
    assert all(map(torch.equal, *ends))


def deep() -> nn.Module:
    """Twenty layers, whose activations are needed to the end and whose gradients are not: 1.3 GB of each."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024), nn.ReLU()) for _ in range(20)), nn.Linear(1024, 4))


def test_what_planning_took_is_not_what_the_step_needs(device, more_streams_win):
    peaks = {}
    for streams in (1, 4):
        planned, _ = pair(device, {"capture": "step", "streams": streams}, model=deep, optimizer=FUSED)
        planned.train(batches(6, 16384, 1024))
        peaks[streams] = planned.step.report.peak_bytes
        planned.step.close()
    assert peaks[1] > 1.3e9
    assert peaks[4] < 1.3 * peaks[1] + 3 * 65 * 2**20  # cuBLAS has a workspace on every stream


def test_plans_that_lost_the_race_leave_no_memory(device, more_streams_win, monkeypatch):
    """Each graph of four streams with matrix products takes more than 100 MB for cuBLAS alone."""
    made = []
    apart = Recorder.apart
    monkeypatch.setattr(Recorder, "apart", lambda self: made.append(1) or apart(self))
    before = bytes_of_pools()
    planned, _ = pair(device, {"capture": "step", "streams": 4}, model=Convnet, optimizer=FUSED)
    planned.train(batches(6, 8, 3, 8, 8))
    assert len(made) >= 4
    assert bytes_of_pools() - before < 300 * 2**20


def test_planning_leaves_no_workspaces_outside_of_the_graph(device, more_streams_win):
    """Those of the steps before it, and of its own runs of the step."""
    planned, _ = pair(device, {"capture": "step", "streams": 4}, model=Convnet, optimizer=FUSED)
    planned.train(batches(2, 8, 3, 8, 8))
    before = bytes_of_workspaces(device)
    planned.train(batches(4, 8, 3, 8, 8))
    assert planned.step.is_settled
    assert planned.step.report.applied["streams"] == 4
    assert bytes_of_workspaces(device) == 0 < before


def bytes_of_workspaces(device):
    """Of cuBLAS, outside of graphs; it takes them anew when it needs them."""
    before = torch.cuda.memory_allocated(device)
    torch._C._cuda_clearCublasWorkspaces()
    return before - torch.cuda.memory_allocated(device)


def bytes_of_pools():
    """What the graphs of the process that live still have."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    segments = torch.cuda.memory_snapshot()
    return sum(each["total_size"] for each in segments if tuple(each["segment_pool_id"]) != (0, 0))
