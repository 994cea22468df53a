"""Suite memory: plans that may be, workloads that exist and train, and what a figure says."""

from pathlib import Path

import pytest
import torch

from benchmarks import memory
from benchmarks.memory import ARMS, GIVEN, MEMORY_CASES, builds_of, figures_of, make_mlp_wide
from tuner.search.space import Space
from tuner.workloads.loader import check_spec


@pytest.mark.parametrize("arm", ARMS)
def test_a_plan_is_allowed(arm):
    assert Space.of().allows(ARMS[arm].plan.knobs) is None


@pytest.mark.parametrize("case", MEMORY_CASES.values(), ids=str)
def test_a_workload_exists(case, monkeypatch):
    monkeypatch.chdir(Path(memory.__file__).parents[1])
    check_spec(case.spec)


def test_the_wide_mlp_is_what_its_name_says():
    workload = make_mlp_wide()
    assert workload.batch[0].shape == (16384, 1, 28, 28)
    assert sum(parameter.numel() for parameter in workload.model.parameters()) > 36e6


def test_parts_of_the_batch_take_the_step_that_the_whole_takes(monkeypatch):
    monkeypatch.setattr("benchmarks.training_step.DEVICE", torch.device("cpu"))
    case = memory.Case("mlp/64", "zoo:mlp")
    given, notes = memory.given_step(case)
    split, told = memory.thrifty_step(case, memory.Thrift(memory.HALF, parts=4))
    for _ in range(3):
        torch.testing.assert_close(split(), given(), rtol=0.05, atol=0.05)
    assert notes() == ""
    assert "precision = bf16" in told()


def test_the_first_arm_is_the_step_as_given():
    assert list(builds_of(MEMORY_CASES["resnet18/128"])) == [GIVEN, *ARMS]


def test_a_figure_is_a_peak_and_its_share_of_the_given_one():
    assert list(figures_of("a", GIVEN, 200, 200)) == [("a eager_fp32", 200, "bytes", 1)]
    assert list(figures_of("a", "bf16", 50, 200)) == [
        ("a bf16", 50, "bytes", 1),
        ("a bf16 / eager_fp32", 0.25, "ratio", 1),
    ]
