"""When no second process compiles while the numerics gate runs."""

from pathlib import Path

import pytest

from tuner.building import compile_ahead
from tuner.building.compile_ahead import compiled_ahead
from tuner.measuring.compile_lock import code_of, sharing
from tuner.measuring.protocol import ArmSpec, Job
from tuner.records import Phase

KNOBS = {"compile": "default"}


def a_job(folder: Path, lasts_s: float = 0.5, **given: object) -> Job:
    arms = (ArmSpec(name="baseline"), ArmSpec(name="candidate", knobs=KNOBS))
    fields = {"workload": "zoo:mlp", "device": "cpu", "arms": arms, "folder": str(folder), "budget_s": lasts_s}
    return Job.model_validate({"ahead": True, **fields, **given})


@pytest.mark.parametrize("why", ["not asked for", "compiled before", "nothing to compile", "no folder"])
def test_where_there_is_nothing_to_do_no_process_is_started(tmp_path, monkeypatch, why):
    def never(_: Job) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(compile_ahead, "_started", never)
    job, folder = a_job(tmp_path), str(tmp_path)
    if why == "not asked for":
        job = a_job(tmp_path, ahead=False)
    elif why == "compiled before":
        (tmp_path / f"{code_of(KNOBS, randomness=True)}.compiled").touch()
    elif why == "nothing to compile":
        job = a_job(tmp_path, arms=(ArmSpec(name="baseline"), ArmSpec(name="candidate", knobs={"precision": "bf16"})))
    with sharing(None if why == "no folder" else folder, lambda: Phase.NUMERICS), compiled_ahead(job):
        pass
