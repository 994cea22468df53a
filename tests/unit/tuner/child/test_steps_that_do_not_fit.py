"""A measuring process where the step as given runs out of memory: it runs with its blocks as checkpoints."""

import weakref
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from kitsune import Workload
from kitsune.errors import UnfitError
from tuner.building.arms import DOES_NOT_FIT, fresh_workload
from tuner.building.probe import probe_workload
from tuner.child.explain_job import explain_job
from tuner.child.inspection import inspect_workload
from tuner.child.main import kind_of
from tuner.child.measure_job import measure_job
from tuner.measuring.protocol import ArmSpec, Job
from tuner.numerics.long_gate import prove_long
from tuner.records import Failure, FailureKind, Measurement

WIDTH, BLOCKS = 16, 6
ROOM = 3  # hidden activations that the memory of this machine holds
FITS = {"precision": "bf16", "recompute": "blocks"}


class Memory:
    """Of hidden activations: one lives as long as something keeps it for the backward."""

    kept: ClassVar[list[weakref.ref]] = []

    @classmethod
    def hold(cls, hidden):
        cls.kept = [each for each in cls.kept if each() is not None] + [weakref.ref(hidden)]
        if len(cls.kept) > ROOM:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        hidden = self.up(x)
        Memory.hold(hidden)
        return x + self.down(F.gelu(hidden))


def workload_of(blocks: nn.Module) -> Workload:
    model = nn.Sequential(blocks, nn.Linear(WIDTH, 4))
    batch = torch.randn(8, WIDTH), torch.randint(4, (8,))
    return Workload(model, F.cross_entropy, torch.optim.AdamW(model.parameters(), lr=1e-3), batch)


def deep() -> Workload:
    return workload_of(nn.Sequential(*(Block() for _ in range(BLOCKS))))


def shallow() -> Workload:
    """Nothing is repeated."""
    return workload_of(Block())


def job_of(make: str = "deep", *, checkpointed: bool = True, kind: str = "measure", **knobs) -> Job:
    arms = (ArmSpec(name="eager"), ArmSpec(name="candidate", knobs=knobs))
    given = {"workload": f"{Path(__file__)}:{make}", "device": "cpu", "checkpointed": checkpointed}
    if kind == "inspect":
        return Job(**given, kind=kind)
    return Job(**given, kind=kind, arms=arms[-1:] if kind == "explain" else arms, rounds=2, block_ms=1.0)


def test_it_runs_out_of_memory_as_given():
    with pytest.raises(torch.OutOfMemoryError) as found:
        inspect_workload(job_of(checkpointed=False, kind="inspect"))
    assert kind_of(found.value) is FailureKind.OUT_OF_MEMORY


def test_it_is_inspected_with_checkpoints_and_is_the_same_workload():
    found = inspect_workload(job_of(kind="inspect"))
    assert found.checkpointed
    assert DOES_NOT_FIT in found.notes
    assert found.parameters == sum(each.numel() for each in deep().model.parameters())
    assert not any(name.startswith("recompute=blocks") for name in found.inapplicable)
    plain = fresh_workload(job_of(checkpointed=False))
    assert "forward" not in plain.model[0][0].__dict__


def test_the_step_as_given_is_too_large_for_a_plan_without_a_trial():
    found = measure_job(job_of(), lambda _: None)
    assert isinstance(found, Failure)
    assert found.kind is FailureKind.TOO_LARGE
    assert found.reason == DOES_NOT_FIT


def test_a_candidate_that_fits_is_proven_and_timed_beside_it():
    found = measure_job(job_of(**FITS), lambda _: None)
    assert isinstance(found, Measurement), found
    assert found.numerics.gradient_error < found.numerics.gradient_allowed
    assert [len(arm.step_ms) > 0 for arm in found.arms] == [True, True]


def test_a_candidate_that_does_not_fit_runs_out_of_memory():
    with pytest.raises(torch.OutOfMemoryError):
        measure_job(job_of(precision="bf16"), lambda _: None)


def test_the_winner_passes_the_long_gate():
    job = job_of(kind="prove", **FITS).model_copy(update={"budget_s": 4.0})
    found = prove_long(job, probe_workload(job))
    assert not isinstance(found, Failure), found
    assert found.restarts > 0


def test_the_times_by_class_of_the_step_as_given_are_those_with_checkpoints(monkeypatch):
    seen = []
    monkeypatch.setattr("tuner.child.explain_job.rehearse", lambda workload, *_: seen.append(workload) or 1 / 0)
    for knobs in ({}, FITS):
        with pytest.raises(ZeroDivisionError):
            explain_job(job_of(kind="explain", **knobs), lambda _: None)
    assert ["forward" in workload.model[0][0].__dict__ for workload in seen] == [True, False]


def test_a_model_that_repeats_no_block_says_so():
    with pytest.raises(UnfitError, match="repeats no block"):
        inspect_workload(job_of("shallow", kind="inspect"))
