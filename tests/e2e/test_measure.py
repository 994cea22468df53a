"""Real measuring processes on the CPU, with workloads that behave and workloads that do not."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.processes import is_gone, measuring
from tuner.measure import inspect, measure
from tuner.protocol import ArmSpec, Inspection, Job, Limits
from tuner.records import Failure, FailureKind, Measurement, Phase

WORKLOADS = """
import os, signal, sys, time
import torch
from torch import nn
from torch.nn import functional as F
from kitsune import Workload


def workload(model, x=None):
    x = torch.randn(16, 8) if x is None else x
    return Workload(model, F.mse_loss, torch.optim.AdamW(model.parameters(), lr=1e-3), (x, torch.randn(len(x), 4)))


class Model(nn.Module):
    def __init__(self, behave=lambda h: h):
        super().__init__()
        self.first, self.last, self.behave = nn.Linear(8, 16), nn.Linear(16, 4), behave

    def forward(self, x):
        return self.last(self.behave(F.relu(self.first(x))))


def raises():
    def behave(h):
        raise ValueError("no such luck")
    return workload(Model(behave))


def hangs():
    open(__file__ + ".pid", "w").write(str(os.getpid()))
    return workload(Model(lambda h: time.sleep(600)))


def leaves():
    return workload(Model(lambda h: os._exit(0)))


def breaks_down():
    return workload(Model(lambda h: os.kill(os.getpid(), signal.SIGSEGV)))


def eats_memory():
    return workload(Model(lambda h: h + torch.empty(2**46).sum()))


def is_nan():
    return workload(Model(lambda h: h / 0.0 * 0.0))


def chatters():
    print("hello" * 10_000)
    os.write(1, b'{"phase": "timing"}\\n')
    return workload(Model(lambda h: print("step") or h))


def lies():
    os.write(int(sys.argv[1]), b"the answer is 42\\n")
    return workload(Model())


def embeds_sparsely():
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.head = nn.Embedding(50, 8, sparse=True), nn.Linear(8, 4)

        def forward(self, x):
            return self.head(self.embedding(x))

    model = Words()
    batch = torch.randint(50, (16,)), torch.randn(16, 4)
    return Workload(model, F.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1), batch)


def trains_by_closures():
    model = Model()
    return Workload(model, F.mse_loss, torch.optim.LBFGS(model.parameters()), (torch.randn(16, 8), torch.randn(16, 4)))


def branches():
    return workload(Model(lambda h: h if h.sum() > 0 else -h))


def under_autocast(change):
    return lambda h: change(h) if torch.is_autocast_enabled("cpu") else h


def wrong_under_autocast():
    return workload(Model(under_autocast(lambda h: 4 * h)))


def nan_under_autocast():
    return workload(Model(under_autocast(lambda h: h * float("inf"))))


def wrong_under_channels_last():
    class Images(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.head = nn.Conv2d(3, 8, 3), nn.Linear(8, 4)

        def forward(self, x):
            h = self.conv(x).mean(dim=(2, 3))
            return self.head(h * 1.02 if x.is_contiguous(memory_format=torch.channels_last) else h)

    return workload(Images(), torch.randn(16, 3, 8, 8))


def with_dropout():
    return workload(Model(nn.Dropout(0.3)))


def frozen(h):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return F.dropout(h, 0.3)


def freezes_dropout_under_autocast():
    return workload(Model(lambda h: frozen(h) if torch.is_autocast_enabled("cpu") else F.dropout(h, 0.3)))


def noisy():
    return workload(Model(lambda h: h * (1 + 0.1 * torch.randn_like(h))))


def noisy_and_wrong_under_autocast():
    def behave(h):
        return h * ((3 if torch.is_autocast_enabled("cpu") else 0) + 1 + 0.1 * torch.randn_like(h))
    return workload(Model(behave))
"""


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "workloads.py"
    path.write_text(WORKLOADS)
    return path


def job(workload: str, rounds: int = 3, **knobs: str) -> Job:
    arms = (ArmSpec(name="baseline"), ArmSpec(name="candidate", knobs=knobs))
    return Job(workload=workload, device="cpu", arms=arms, rounds=rounds, block_ms=5)


def test_a_zoo_model_is_inspected():
    found = inspect("zoo:mlp?size=tiny", "cpu")
    assert isinstance(found, Inspection), found
    assert not found.random
    assert found.parameters > 1000
    assert found.environment.device == "cpu"
    assert not found.fingerprint.startswith("local-")
    assert "precision=tf32" in found.inapplicable
    assert "precision=bf16" not in found.inapplicable


def test_a_workload_that_cannot_be_exported_has_a_fingerprint_of_this_machine(file):
    found = inspect(f"{file}:branches", "cpu")
    assert isinstance(found, Inspection), found
    assert found.fingerprint.startswith("local-")
    assert any("not exportable" in note for note in found.notes)


def test_a_step_against_itself():
    found = measure(job("zoo:mlp?size=tiny", rounds=4))
    assert isinstance(found, Measurement), found
    baseline, candidate = found.arms
    assert [len(arm.step_ms) for arm in found.arms] == [4, 4]
    assert baseline.applied == candidate.applied == ()
    assert 1 / 3 < min(baseline.step_ms) / min(candidate.step_ms) < 3  # whatever else the machine did only adds
    assert found.numerics is not None
    assert 0 < found.numerics.gradient_error < 1e-5  # fp32 against float64: not equal, and near
    assert found.numerics.parameter_error < found.numerics.parameter_allowed


@pytest.mark.parametrize(
    ("function", "kind", "words"),
    [
        ("raises", FailureKind.RAISED, "ValueError: no such luck (workloads.py:"),
        pytest.param("leaves", FailureKind.CRASHED, "code 0 without a result", marks=pytest.mark.minutes),
        ("breaks_down", FailureKind.CRASHED, "SIGSEGV"),
        ("eats_memory", FailureKind.OUT_OF_MEMORY, "allocate"),
        ("is_nan", FailureKind.NOT_FINITE, "not finite"),
        ("lies", FailureKind.CRASHED, "not a message"),
        pytest.param(
            "embeds_sparsely",
            FailureKind.RAISED,
            "the gradient of embedding.weight is sparse",
            marks=pytest.mark.minutes,
        ),
        pytest.param("trains_by_closures", FailureKind.RAISED, "LBFGS evaluates a closure", marks=pytest.mark.minutes),
        pytest.param("absent", FailureKind.RAISED, "has no function 'absent'", marks=pytest.mark.minutes),
    ],
)
def test_a_workload_that_fails_as_given(file, function, kind, words):
    found = inspect(f"{file}:{function}", "cpu")
    assert isinstance(found, Failure), found
    assert (found.kind, found.phase) == (kind, Phase.BUILD)
    assert words in found.reason


def test_a_workload_that_prints_is_measured(file):
    found = measure(job(f"{file}:chatters"))
    assert isinstance(found, Measurement), found


def test_a_workload_that_hangs_is_killed(file):
    seen: set[int] = set()
    found = inspect(f"{file}:hangs", "cpu", limits=Limits(build_s=6), check=lambda: seen.update(measuring()))
    assert isinstance(found, Failure), found
    assert (found.kind, found.phase) == (FailureKind.TIMEOUT, Phase.BUILD)
    assert len(seen) == 1
    assert all(map(is_gone, seen))


def test_a_choice_that_does_not_apply_is_declined():
    found = measure(job("zoo:mlp?size=tiny", capture="step"))
    assert isinstance(found, Failure), found
    assert found.kind is FailureKind.DECLINED
    assert "capture" in found.reason


@pytest.mark.parametrize(
    ("function", "knobs", "kind", "words"),
    [
        ("wrong_under_autocast", {"precision": "bf16"}, FailureKind.WRONG, "at step 0"),
        ("nan_under_autocast", {"precision": "bf16"}, FailureKind.NOT_FINITE, "at step 0"),
        pytest.param(
            "wrong_under_channels_last",
            {"layout": "channels_last"},
            FailureKind.WRONG,
            "is allowed",
            marks=pytest.mark.minutes,
        ),
        ("noisy_and_wrong_under_autocast", {"precision": "bf16"}, FailureKind.WRONG, "mean"),
    ],
)
def test_wrong_numbers_are_found_before_the_clock_starts(file, function, knobs, kind, words):
    found = measure(job(f"{file}:{function}", **knobs))
    assert isinstance(found, Failure), found
    assert (found.kind, found.phase) == (kind, Phase.NUMERICS)
    assert words in found.reason


def test_a_frozen_dropout_mask_is_found(file):
    found = measure(job(f"{file}:freezes_dropout_under_autocast", precision="bf16"))
    assert isinstance(found, Failure), found
    assert (found.kind, found.phase) == (FailureKind.WRONG, Phase.WARMUP)
    assert "dropout mask is frozen" in found.reason


def test_randomness_that_cannot_be_switched_off_is_compared_by_means(file):
    found = measure(job(f"{file}:noisy", precision="bf16"))
    assert isinstance(found, Measurement), found
    assert found.numerics is not None
    assert "means" in found.numerics.note


@pytest.mark.timeout(300)  # 20 s of compiling on two idle cores
@pytest.mark.minutes
def test_a_compiled_step_with_dropout_is_proven_and_measured(file):
    found = measure(job(f"{file}:with_dropout", compile="default"))
    assert isinstance(found, Measurement), found
    assert found.arms[1].applied == ("compile=default",)
    assert found.numerics is not None
    assert found.numerics.gradient_error < 1e-5
    assert found.numerics.note == ""


def test_a_child_that_is_killed_from_outside(file):
    found: list[Measurement | Failure] = []
    slow = job("zoo:mlp?size=tiny", rounds=1000).model_copy(update={"block_ms": 500.0})
    thread = threading.Thread(target=lambda: found.append(measure(slow)))
    thread.start()
    end = time.monotonic() + 120
    seen: set[int] = set()  # while it becomes another program, a process has no command line
    while not seen and time.monotonic() < end:
        seen |= measuring()
        time.sleep(0.05)
    (child,) = seen
    os.kill(child, signal.SIGKILL)
    thread.join(120)
    assert isinstance(found[0], Failure), found
    assert found[0].kind is FailureKind.CRASHED
    assert "SIGKILL" in found[0].reason
    assert is_gone(child)


def test_the_child_dies_with_its_parent(file, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # a parent that is killed cannot clean up
    code = f"from tuner.measure import inspect; inspect({f'{file}:hangs'!r}, 'cpu')"
    note = Path(f"{file}.pid")
    with subprocess.Popen([sys.executable, "-c", code]) as parent:
        end = time.monotonic() + 120
        while not (note.exists() and note.read_text()) and time.monotonic() < end:
            time.sleep(0.05)
        child = int(note.read_text())
        assert not is_gone(child, within_s=0.2)
        parent.kill()
    assert is_gone(child)
