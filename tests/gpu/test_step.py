"""TrainStep on a GPU: its semantics on real CUDA graphs, and what only a GPU can show."""

import copy
import gc
import statistics

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kitsune.device.backend import rng_state
from kitsune.device.cuda_graph import Recorder
from kitsune.errors import CaptureError
from kitsune.knobs import KNOBS
from kitsune.launches.execution.kernel_trace import kernels_of as launched_by
from kitsune.plan import Plan
from kitsune.step import TrainStep
from kitsune.techniques import observed_facts
from kitsune.workload import Workload
from tests.step_cases import (
    LR,
    OPTIMIZERS,
    AttentionNet,
    Convnet,
    Mlp,
    Plain,
    Planned,
    assert_same,
    batches,
    is_captured,
    pair,
    sgd,
    train_both,
)
from tuner.zoo import gpt, resnet
from tuner.zoo.recipe import next_token_loss

FUSED = OPTIMIZERS["adamw by hand fused"]


def compiles(test):
    """A test that compiles: it takes its time, and what torch says meanwhile is no fault of the plan."""
    return pytest.mark.timeout(300)(pytest.mark.filterwarnings("default")(test))


def next_capture_works(device):
    planned, plain = pair(device, {"capture": "step"}, model=lambda: Mlp(dropout=0.25), optimizer=FUSED)
    train_both(planned, plain, batches(8))
    assert_same(planned, plain)
    assert is_captured(planned.step)


def generator_works(device):
    torch.cuda.manual_seed(1)
    one = torch.rand(4, device=device)
    torch.cuda.manual_seed(1)
    assert torch.equal(torch.rand(4, device=device), one)
    assert not torch.equal(torch.rand(4, device=device), one)


# What a graph cannot hold ---------------------------------------------------------------------------------------------


class Looks(Mlp):
    """Waits for the device in the middle of its forward."""

    def forward(self, x):
        if x.sum().item() > 0:  # the line that the report must name
            x = x * 2
        return super().forward(x)


@pytest.mark.parametrize("capture", ["step", "segments"])
def test_a_host_sync_is_found_and_named(device, capture):
    planned, plain = pair(device, {"capture": capture}, model=lambda: Looks(dropout=0.25))
    train_both(planned, plain, batches(10))
    assert_same(planned, plain)
    reason = planned.step.report.declined["capture"]
    assert "waits for the device at" in reason
    file, _, line = reason.rpartition(" ")[2].rpartition(":")
    with open(file, encoding="utf-8") as source:
        assert "the line that the report must name" in source.readlines()[int(line) - 1]
    assert torch.cuda.get_sync_debug_mode() == 0
    generator_works(device)
    next_capture_works(device)


def test_a_host_sync_is_a_fact_of_the_workload(device):
    model = Looks().to(device)
    (batch,) = batches(1)
    facts = observed_facts(Workload(model, F.mse_loss, sgd(model.parameters()), batch), device)
    assert __file__ in facts.host_sync


class Synchronizes(Mlp):
    """Does what the sync watch cannot see, and no capture survives."""

    def forward(self, x):
        torch.cuda.synchronize()
        return super().forward(x)


@pytest.mark.parametrize("capture", ["step", "segments"])
def test_a_capture_that_breaks_leaves_no_trace(device, capture):
    stream = torch.cuda.current_stream(device)
    planned, plain = pair(device, {"capture": capture}, model=lambda: Synchronizes(dropout=0.25))
    train_both(planned, plain, batches(10))
    assert_same(planned, plain)
    assert "CUDA graph capture failed" in planned.step.report.declined["capture"]
    assert "previous error during capture" not in planned.step.report.declined["capture"]
    assert torch.cuda.current_stream(device) == stream
    generator_works(device)
    next_capture_works(device)


def test_a_broken_capture_raises_its_first_cause(device):
    def breaks():
        torch.rand(3, device=device)
        raise RuntimeError("this is the cause")

    state = rng_state(device)[1]
    with pytest.raises(CaptureError, match="this is the cause"):
        Recorder(device).capture(breaks)
    assert torch.equal(rng_state(device)[1], state)
    generator_works(device)


# What a graph costs and gives -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("update", ["fused", "kitsune"])
def test_the_update_that_was_chosen_is_what_runs(device, precision, update):
    planned, _ = pair(device, {"capture": "step", "precision": precision, "update": update})
    many = [(x.to(device), y.to(device)) for x, y in batches(11)]
    planned.train(many[:10])
    launched = launched_by(lambda: planned.train(many[10:]))
    ours, torchs = (sum(n for name, n in launched.items() if part in name) for part in ("update_kernel", "FusedAdam"))
    assert (ours, torchs) == ((0, 1) if update == "fused" else (1, 0))


@pytest.mark.parametrize(
    "knobs",
    [
        {},
        {"update": "fused"},
        {"precision": "fp16", "update": "fused"},
        {"update": "kitsune"},
        {"precision": "fp16", "update": "kitsune"},
    ],
)
def test_a_replayed_step_allocates_its_loss_only(device, knobs):
    planned, _ = pair(device, {"capture": "step", **knobs})
    many = [(x.to(device), y.to(device)) for x, y in batches(20)]
    planned.train(many[:10])
    assert is_captured(planned.step)
    before = torch.cuda.memory_stats(device)["allocation.all.allocated"]
    planned.train(many[10:])
    assert torch.cuda.memory_stats(device)["allocation.all.allocated"] - before <= 10
    assert planned.step.report.peak_bytes > 0


@pytest.mark.parametrize("update", ["fused", "kitsune"])
def test_a_replayed_step_never_waits_for_the_device(device, update):
    planned, _ = pair(device, {"capture": "step", "precision": "fp16", "update": update}, clip=1.0)
    many = [(x.pin_memory(), y.pin_memory()) for x, y in batches(20)]
    planned.train(many[:10])
    torch.cuda.set_sync_debug_mode("error")
    try:
        planned.train(many[10:])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert is_captured(planned.step)


def test_closing_gives_the_memory_of_the_graphs_back(device):
    def used():
        gc.collect()
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved(device)

    next_capture_works(device)  # whatever is allocated once: workspaces of cuBLAS and cuDNN
    before = used()
    for _ in range(3):
        planned, _ = pair(
            device, {"capture": "step"}, model=lambda: nn.Sequential(nn.Linear(8, 2**16), nn.Linear(2**16, 4))
        )
        planned.train(batches(6, 512, 8))
        assert is_captured(planned.step)
        planned.step.close()
        del planned, _
    assert used() - before < 2**26


@pytest.mark.parametrize("capture", ["step", "segments"])
@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16"])
@pytest.mark.parametrize("update", ["fused", "kitsune"])
def test_the_same_kernels_give_the_same_bits_captured_or_not(device, precision, capture, update):
    """No kernel of an MLP adds atomically, and 2^-6 is the same learning rate as number and as fp32 tensor."""
    knobs = {"precision": precision, "update": update}
    captured, launched = pair(device, {**knobs, "capture": capture}, model=lambda: Mlp(dropout=0.25))
    launched = Planned(launched.model, launched.optimizer)
    launched.start(knobs)
    train_both(captured, launched, batches(12))
    assert_same(captured, launched, rtol=0, atol=0)
    assert is_captured(captured.step)


def test_tf32_is_used_and_left(device):
    flags = torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision
    torch.manual_seed(0)
    losses = {}
    for precision in ("fp32", "tf32"):
        torch.manual_seed(0)
        model = nn.Linear(512, 512).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=LR, fused=True)
        step = TrainStep(model, F.mse_loss, optimizer, Plan.by_hand(precision=precision, capture="step"))
        x = torch.randn(512, 512, device=device)
        losses[precision] = torch.stack([step(x, x) for _ in range(6)])
        assert (torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision) == flags
    assert not torch.equal(losses["fp32"], losses["tf32"])
    torch.testing.assert_close(losses["fp32"], losses["tf32"], rtol=1e-3, atol=1e-4)


def test_two_steps_take_turns(device):
    pairs = [pair(device, {"capture": "step"}, model=lambda: Mlp(dropout=0.25)) for _ in range(2)]
    for batch in batches(10):
        for planned, plain in pairs:
            train_both(planned, plain, [batch])
    for planned, plain in pairs:
        assert_same(planned, plain)
        assert is_captured(planned.step)


def test_another_stream_may_be_current(device):
    planned, plain = pair(device, {"capture": "step"})
    train_both(planned, plain, batches(6))
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        train_both(planned, plain, batches(6))
    torch.cuda.current_stream(device).wait_stream(stream)
    assert_same(planned, plain)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_another_gpu_may_be_current(device):
    second = torch.device("cuda", 1)
    planned, plain = pair(second, {"capture": "step", "update": "fused"}, model=lambda: Mlp(dropout=0.25))
    train_both(planned, plain, batches(10))
    assert torch.cuda.current_device() == 0
    assert_same(planned, plain)
    assert is_captured(planned.step)


# Attention ------------------------------------------------------------------------------------------------------------

KERNELS = {
    "flash": "_scaled_dot_product_flash_attention",
    "cudnn": "_scaled_dot_product_cudnn_attention",
    "efficient": "_scaled_dot_product_efficient_attention",
    "math": "_scaled_dot_product_attention_math",
}


def kernels_of(step, batch):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step(*batch)
    names = {event.name for event in profile.events()}
    return {choice for choice, name in KERNELS.items() if any(name in found for found in names)}


@pytest.mark.parametrize("choice", KERNELS)
def test_attention_runs_on_the_chosen_backend(device, choice):
    def model():
        return AttentionNet(width=64)

    planned, plain = pair(device, {"attention": choice, "precision": "bf16"}, model=model, optimizer=sgd)
    many = batches(4, 2, 128, 256)
    train_both(planned, plain, many)
    assert_same(planned, plain, rtol=3e-2, atol=3e-2)
    assert planned.step.report.applied["attention"] == choice
    assert kernels_of(planned.step, many[0]) == {choice}


@pytest.mark.parametrize("choice", KERNELS)
def test_attention_is_captured(device, choice):
    knobs = {"attention": choice, "precision": "bf16", "update": "fused", "capture": "step"}
    planned, plain = pair(device, knobs, model=lambda: AttentionNet(width=64), optimizer=sgd)
    train_both(planned, plain, batches(8, 2, 128, 256))
    assert_same(planned, plain, rtol=3e-2, atol=3e-2)
    assert is_captured(planned.step)


def test_a_backend_that_cannot_do_it_is_declined(device):
    """Flash attention has no fp32."""
    knobs = {"attention": "flash", "update": "fused", "capture": "step"}
    planned, plain = pair(device, knobs, model=AttentionNet, optimizer=sgd)  # Adam makes steps of a key bias's noise
    train_both(planned, plain, batches(8, 2, 5, 32))
    assert "No available kernel" in planned.step.report.declined["attention"]
    assert planned.step.report.applied == {"update": "fused", "capture": "step"}
    assert_same(planned, plain)
    assert is_captured(planned.step)


# Compiling ------------------------------------------------------------------------------------------------------------


@compiles
@pytest.mark.parametrize("capture", ["none", "step", "segments"])
@pytest.mark.parametrize(
    ("model", "shape", "knobs"),
    [
        (Mlp, (64, 8), {"update": "fused"}),
        (Convnet, (8, 3, 8, 8), {"layout": "channels_last", "update": "fused"}),
        (AttentionNet, (2, 16, 32), {"precision": "bf16"}),
    ],
)
def test_compiled_steps_train(device, model, shape, knobs, capture):
    knobs = {"compile": "default", "capture": capture, **knobs}
    planned, plain = pair(device, knobs, model=model, optimizer=sgd)
    train_both(planned, plain, batches(10, *shape))
    loose = 3e-2 if "precision" in knobs else 1e-3
    assert_same(planned, plain, rtol=loose, atol=loose)
    assert not planned.step.report.declined
    assert is_captured(planned.step) == (capture != "none")


@compiles
@pytest.mark.parametrize("choice", [choice for choice in KNOBS["compile"].choices if choice != "off"])
def test_every_way_of_compiling_trains(device, choice):
    planned, plain = pair(device, {"compile": choice, "update": "fused"}, optimizer=sgd, clip=1.0)
    train_both(planned, plain, batches(10, 64, 8))
    assert_same(planned, plain, rtol=1e-3, atol=1e-4)  # losses that were kept, too
    assert planned.step.report.applied["compile"] == choice
    assert planned.step.is_settled


@compiles
def test_a_plan_with_graphs_of_inductor_leaves_other_compiled_functions_alone(device):
    planned, plain = pair(device, {"compile": "reduce-overhead"}, optimizer=sgd)
    compiled = torch.compile(plain.model, mode="reduce-overhead")
    ids = []
    for x, y in batches(12, 64, 8):
        planned.train([(x, y)])
        for _ in range(2):
            plain.model.zero_grad()  # gradients that are kept lie in Inductor's memory, and plain torch forbids it too
            F.mse_loss(compiled(x.to(device)), y.to(device)).backward()
        ids.append(next_graph_id())
    assert ids[-5:] == list(range(ids[-5], ids[-5] + 5)), "graphs are recorded again and again"


def next_graph_id() -> int:
    """What Inductor would have called its next CUDA graph on this GPU; asking uses one up."""
    manager = torch._inductor.cudagraph_trees.get_container(torch.cuda.current_device()).tree_manager
    return manager.new_graph_id().id


@compiles
def test_compiled_dropout_is_another_one_at_every_step(device):
    knobs = {"compile": "default", "capture": "step"}
    planned, _ = pair(
        device,
        knobs,
        model=lambda: Mlp(dropout=0.5),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.0, fused=True),
    )
    planned.train(batches(1) * 12)
    assert is_captured(planned.step)
    assert len({loss.item() for loss in planned.losses}) == 12


@compiles
def test_half_precisions_do_not_share_compiled_code(device, tmp_path, monkeypatch):
    """torch before 2.12 keys its cache on disk by whether autocast is on, not by its dtype."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    losses = {}
    for precision in ("bf16", "fp16"):
        torch._dynamo.reset()
        planned, plain = pair(device, {"compile": "default", "precision": precision}, optimizer=sgd)
        train_both(planned, plain, batches(2, 64, 8))
        assert not planned.step.report.declined
        losses[precision] = (planned.losses[0] - plain.losses[0]).abs().item()
    assert losses["fp16"] < losses["bf16"]


@compiles
def test_a_changed_model_is_compiled_and_captured_anew(device):
    planned, plain = pair(device, {"compile": "default", "capture": "step"}, optimizer=FUSED)
    many = batches(20, 64, 8)
    train_both(planned, plain, many[:8])
    for run in (planned, plain):
        run.model.first.requires_grad_(False)
    train_both(planned, plain, many[8:])
    assert_same(planned, plain, rtol=1e-3, atol=1e-4)
    assert is_captured(planned.step)


# Training ends where plain training ends ------------------------------------------------------------------------------

TRAININGS = {
    "resnet18": (
        resnet.RESNET18.base.resized({"batch": 64}),
        {"layout": "channels_last", "precision": "bf16"},
        F.cross_entropy,
    ),
    "gpt of 2 layers": (gpt.ENTRY.tiny.resized({"batch": 32}), {"precision": "bf16"}, next_token_loss),
}
BATCHES = 64  # enough that 300 steps do not learn them by heart: at a loss of 1e-4 there is nothing but rounding left
FULL = {"compile": "default", "update": "fused", "capture": "step"}


def without_dropout(model):
    for module in model.modules():
        if hasattr(module, "dropout") and isinstance(module.dropout, float):
            module.dropout = 0.0
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def final_loss(device, name, seed, knobs):
    """Mean loss of the last 64 of 300 steps over the same 64 batches, from weights and data of this seed."""
    recipe, _, loss_fn = TRAININGS[name]
    torch.manual_seed(seed)
    model = without_dropout(recipe.model()).to(device)
    many = [recipe.data.draw() for _ in range(BATCHES)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate)
    run = Plain(model, optimizer, loss_fn) if knobs is None else Planned(model, optimizer, loss_fn)
    if isinstance(run, Planned):
        run.start(knobs)
    run.train([many[index % BATCHES] for index in range(300)])
    if isinstance(run, Planned):
        assert not run.step.report.declined
        assert is_captured(run.step)
        run.step.close()
    return torch.stack(run.losses[-BATCHES:]).mean().item()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", TRAININGS)
@pytest.mark.parametrize("extra", ["fp32", "bf16"])
def test_300_steps_end_as_plain_seeds_do(device, name, extra):
    knobs = FULL if extra == "fp32" else {**FULL, **TRAININGS[name][1]}
    plain = [final_loss(device, name, seed, None) for seed in range(5)]
    planned = [final_loss(device, name, seed, knobs) for seed in range(5)]
    print(f"{name} {extra}: plain {plain}, planned {planned}")
    # Of equal trainings 1 in 200 fails this; ResNet-18 ended at 0.88 and at 0.66 from one seed.
    assert abs(statistics.mean(planned) - statistics.mean(plain)) <= 1.5 * (max(plain) - min(plain))


def test_a_copy_of_a_model_under_a_plan_is_plain(device):
    planned, plain = pair(device, {"capture": "step", "layout": "channels_last"}, model=Convnet)
    train_both(planned, plain, batches(8, 4, 3, 8, 8))
    twin = copy.deepcopy(planned.model)
    (x, _), *_ = batches(1, 4, 3, 8, 8)
    torch.testing.assert_close(twin(x.to(device)), plain.model(x.to(device)), rtol=1e-4, atol=1e-5)
