"""What a measuring process records of a step on a CPU, and every reason why it does not."""

import pytest
import torch

from kitsune.errors import CaptureError, UnfitError
from kitsune.runtime.report import Report
from tuner.child import explain_job as module
from tuner.child.explain_job import NO_CEILINGS, explain_job, notes
from tuner.child.main import failure_of
from tuner.child.stream_forecast import Rehearsal, rehearse
from tuner.measuring.protocol import ArmSpec, Job, misfit
from tuner.records import FailureKind, Phase

HOST = """
import torch
from kitsune import Workload

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)

    def forward(self, x):
        found = self.layer(x)
        return found * float(found.detach().sum())

def make():
    model = Model()
    batch = torch.randn(3, 4), torch.tensor([0, 1, 0])
    return Workload(model, torch.nn.functional.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1), batch)
"""


def job(workload: str = "zoo:mlp?size=tiny", **knobs: str) -> Job:
    return Job(kind="explain", workload=workload, device="cpu", arms=(ArmSpec(name="candidate", knobs=knobs),))


def test_the_launches_of_a_step_are_recorded_by_class_as_given_and_under_a_plan():
    entered: list[Phase] = []
    given, plan = explain_job(job(), entered.append), explain_job(job(precision="bf16"), entered.append)
    launches = [
        {each.name: each.launches for each in found.classes}.get("copies and casts", 0) for found in (given, plan)
    ]
    assert launches[1] > launches[0], "bf16 casts"
    for found in (given, plan):
        assert {"matrix products", "optimizer"} <= {each.name for each in found.classes}
        assert all(0 <= each.floor_us <= each.total_us for each in found.classes)
        assert misfit(job(), found) is None
    assert entered == [Phase.WARMUP] * 2


def test_what_the_recorded_step_leaves_out_is_noted():
    found = explain_job(job(compile="default"), lambda _: None)
    assert found.notes == (
        "recorded with update=fused",
        "without compile, whose launches can be recorded on a GPU only",
    )
    report = Report(applied={"update": "fused", "precision": "bf16", "capture": "step"})
    report.declined.update(layout="it has no such form", streams="it is looked at here")
    report.note("so")
    told = list(notes(report, {"precision": "bf16", "layout": "channels_last"}))
    assert told == ["recorded with update=fused", "layout: it has no such form", "so"]


def test_launches_that_cannot_be_recorded_are_refused_with_the_reason(tmp_path):
    (tmp_path / "train.py").write_text(HOST)
    with pytest.raises(CaptureError, match="the launches of this step cannot be") as refused:
        explain_job(job(f"{tmp_path}/train.py:make"), lambda _: None)
    assert failure_of(refused.value, Phase.WARMUP).reason == str(refused.value)


def test_lack_of_memory_is_told_as_such(monkeypatch):
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")

    monkeypatch.setattr("tuner.child.stream_forecast.all_plans", full)
    with pytest.raises(UnfitError, match="a recorded step frees memory only at its end") as refused:
        explain_job(job(), lambda _: None)
    assert failure_of(refused.value, Phase.WARMUP).kind is FailureKind.OUT_OF_MEMORY


def test_without_memory_to_measure_what_the_device_can_do_there_is_no_table(monkeypatch):
    def floorless(*given: object) -> Rehearsal:
        found = rehearse(*given)
        return Rehearsal(found.plans, found.finest, (), found.report)

    monkeypatch.setattr(module, "rehearse", floorless)
    with pytest.raises(UnfitError, match=NO_CEILINGS):
        explain_job(job(), lambda _: None)
