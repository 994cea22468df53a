"""Suite situations: its workloads, its figures from made-up samples, and its check of gradients that are added up."""

import json
import math
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from benchmarks import situations
from benchmarks.cases import CASES
from benchmarks.situations import CHECKED_CASES, DROPIN, THREADS, TIMED, accumulated, in_eager, largest_difference
from benchmarks.workloads import (
    accumulated_linear,
    accumulated_mlp,
    bf16_rms_norm,
    ddpm_unet,
    gqa_rms_norm,
    hf_deberta_v3_base,
    iresnet50,
    nnue,
    spiking,
)
from kitsune.workload import call_model, loss_of
from tests.step_cases import capturing_cpu
from tuner.workloads.loader import load_workload

DEBERTA = {"vocab_size": 90, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SMALL = {
    "gqa_rms_norm": partial(gqa_rms_norm.workload_of, 2, 16, width=32, layers=2),
    "bf16_rms_norm": partial(bf16_rms_norm.workload_of, 2, 16, width=48, layers=2, heads=4),
    "ddpm_unet": partial(ddpm_unet.workload_of, 2, width=32, size=8),
    "nnue": partial(nnue.workload_of, 16, batch=8, features=100),
    "hf_deberta_v3_base": partial(hf_deberta_v3_base.workload_of, 1, 16, DEBERTA),
    "iresnet50": partial(iresnet50.workload_of, 2, blocks=(1, 1), width=8, size=16),
    "spiking": partial(spiking.workload_of, 2, width=8, size=32),
    "accumulated_mlp": accumulated_mlp.make_workload,
    "accumulated_linear": accumulated_linear.make_workload,
}
#: Millions of parameters, of those models that others have published.
PUBLISHED = {"hf_deberta_v3_base": (hf_deberta_v3_base.make_workload, 184), "iresnet50": (iresnet50.make_workload, 44)}


def trained(workload):
    """The loss of one step, after it."""
    loss = loss_of(call_model(workload.model, workload.batch[0]), workload.loss_fn, workload.batch[1])
    loss.backward()
    assert all(parameter.grad is not None for parameter in workload.model.parameters())
    workload.optimizer.step()
    return loss


@pytest.mark.parametrize("name", SMALL)
def test_a_small_form_of_a_workload_takes_a_step(name):
    torch.manual_seed(0)
    workload = SMALL[name]()
    assert trained(workload).isfinite()
    assert all(parameter.isfinite().all() for parameter in workload.model.parameters())


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_workload_at_full_size_is_what_its_name_says(name):
    """On the meta device, where tensors have no values."""
    make, millions = PUBLISHED[name]
    with torch.device("meta"):
        workload = make()
    assert round(sum(parameter.numel() for parameter in workload.model.parameters()) / 1e6) in (millions, millions + 1)


def test_densenet_is_trained_on_images_of_128(monkeypatch):
    """torchvision, which has the model, is not among what the tests need."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3, stride=16), nn.Flatten(), nn.Linear(256, 1000))
    fake = SimpleNamespace(models=SimpleNamespace(densenet121=lambda: model))
    monkeypatch.setitem(sys.modules, "torchvision", fake)
    workload = load_workload(f"{Path(nnue.__file__).with_name('tv_densenet121.py')}:make_workload", "cpu")
    assert workload.batch[0].shape == (16, 3, 128, 128)
    assert trained(workload).isfinite()


def test_the_timed_are_cases_of_the_suite_that_times_them_and_no_others_are_checked():
    assert set(TIMED) <= set(CASES)
    assert not any(CASES[name].is_swept for name in TIMED)
    assert set(THREADS) == set(TIMED) | set(CHECKED_CASES)
    assert not set(TIMED) & set(CHECKED_CASES)


# --- Figures of made-up samples

MS = {"eager_fp32": 10.0, "eager_bf16": 8.0, "compile": 6.0, "reduce_overhead": 12.0, "max_autotune": 5.0}


def test_ratios_are_of_the_plan_to_the_given_step_and_to_the_best_mode_and_of_modes_to_eager():
    assert list(situations.ratios("a/1", {**MS, "kitsune": 4.0}, 15)) == [
        ("a/1 kitsune / eager_fp32", 0.4, "ratio", 15),
        ("a/1 kitsune / best mode", 0.8, "ratio", 15),
        ("a/1 compile / eager_bf16", 0.75, "ratio", 15),
        ("a/1 reduce_overhead / eager_bf16", 1.5, "ratio", 15),
        ("a/1 max_autotune / eager_bf16", 0.625, "ratio", 15),
    ]


def test_arms_that_were_left_out_have_no_ratio():
    figures = list(situations.ratios("a/1", {"eager_fp32": 10.0, "kitsune": 4.0}, 15))
    assert figures == [("a/1 kitsune / eager_fp32", 0.4, "ratio", 15)]


@pytest.mark.parametrize(
    ("what", "value", "is_kept"),
    [
        ("kitsune / eager_fp32", 1.01, True),
        ("kitsune / eager_fp32", 1.0101, False),
        ("kitsune / best mode", 1.2, True),
        ("reduce_overhead / eager_bf16", 1.5, True),
        ("kitsune_dropin differs from eager", 1e-6, True),
        ("kitsune_dropin differs from eager", 0.75, False),
        ("kitsune_dropin differs from eager", math.inf, False),
    ],
)
def test_only_a_plan_that_is_slower_than_the_given_step_or_computes_something_else_is_not_kept(what, value, is_kept):
    assert situations.is_kept((f"a/1 {what}", value, "ratio", 1)) is is_kept


@pytest.fixture
def call(monkeypatch, tmp_path):
    """Calls the suite with a tuner and a race that are only pretended; the exit code, and the lines of its file."""
    out, tuning = tmp_path / "out.jsonl", []

    def tuned(case, budget, home, plan):
        tuning.append(case.name)
        if case.name == "spiking/8":
            raise SystemExit("kitsune tune ended with code 1")
        plan.write_text("{}")
        return {"trials": []}

    def raced(case, plan, home, out, arms):
        ms = {**MS, "kitsune": 4.0 if case.name == "ddpm_unet/128" else 10.2}
        situations.results_file.append(out, {"kind": "case", "case": case.name, "step_ms": [1.0] * 15})
        return {arm: ms[arm] for arm in arms}

    monkeypatch.setattr(situations, "tuned", tuned)
    monkeypatch.setattr(situations, "raced", raced)

    def called(*words):
        monkeypatch.setattr("sys.argv", ["situations", *words, "--out", str(out)])
        code = situations.main()
        return code, [json.loads(line) for line in out.read_text().splitlines()], tuning

    return called


def test_a_situation_has_lines_of_tuning_and_of_figures(call):
    code, lines, _ = call("ddpm_unet/128")
    assert code == 0
    assert [line["kind"] for line in lines] == ["environment", "tuning", "case", *["figure"] * 5]
    assert lines[1]["thread"] == "pytorch#190796"
    assert {(line["suite"], line["n"]) for line in lines[3:]} == {("situations", 15)}


def test_a_plan_that_is_slower_than_the_given_step_fails_the_run(call):
    assert call("ddpm_unet/128", "iresnet50/16")[0] == 1


def test_what_cannot_be_measured_is_told_and_others_are_measured(call):
    code, lines, tuning = call("spiking/8", "ddpm_unet/128")
    assert code == 1
    assert [line["reason"] for line in lines if line["kind"] == "failure"] == ["kitsune tune ended with code 1"]
    assert tuning == ["spiking/8", "ddpm_unet/128"]
    assert sum(line["kind"] == "figure" for line in lines) == 5


def test_a_plan_that_is_in_the_home_is_only_timed(call, tmp_path):
    words = ("ddpm_unet/128", "--home", str(tmp_path / "home"))
    assert [line["kind"] for line in call(*words, "--arms")[1]] == ["environment", "tuning"]
    _, lines, tuning = call(*words, "--arms", "eager_fp32")
    assert [line["kind"] for line in lines] == ["environment", "tuning", "case", "figure"]
    assert tuning == ["ddpm_unet/128"]


# --- Gradients that are added up


@pytest.mark.parametrize("name", CHECKED_CASES)
def test_the_dropin_adds_up_gradients_as_eager_does(name, monkeypatch, tmp_path):
    capturing_cpu(monkeypatch)
    (_, difference, *_), (_, captured, _, forwards) = situations.checked(name, tmp_path / "out.jsonl")
    assert difference == 0.0
    assert 0 < captured < forwards


def with_the_last_part_alone(workload):
    """The fault of the thread: the gradients of a step are those of its last backward."""
    for parameter in workload.model.parameters():
        parameter.register_hook(lambda gradient, of=parameter: gradient - (0 if of.grad is None else of.grad))
    return workload.model, workload.optimizer


@pytest.mark.parametrize("name", CHECKED_CASES)
def test_gradients_that_are_not_added_up_differ(name, monkeypatch):
    device, case = torch.device("cpu"), CHECKED_CASES[name]
    right = accumulated(case, device, in_eager)
    line = situations.compared(case, DROPIN, with_the_last_part_alone, device, right)
    assert line["difference"] >= 0.5


def test_the_last_bias_of_the_mlp_has_a_gradient_of_one():
    found = accumulated(CHECKED_CASES["accumulated_mlp/32"], torch.device("cpu"), in_eager)
    torch.testing.assert_close(found.tensors[5], torch.ones(1))


def test_a_loop_that_raises_is_told():
    def raising(workload):
        raise RuntimeError("overwritten by a subsequent run")

    case, right = CHECKED_CASES["accumulated_linear/1"], situations.Accumulation([])
    line = situations.compared(case, "reduce_overhead", raising, torch.device("cpu"), right)
    assert line["difference"] == math.inf
    assert line["notes"] == "it raises: overwritten by a subsequent run"


def test_a_value_that_is_not_finite_and_a_tensor_that_is_missing_are_no_small_difference():
    one = torch.ones(3)
    assert largest_difference([one], [one * 2]) == 0.5
    assert largest_difference([one * float("nan")], [one]) == math.inf
    assert largest_difference([], [one]) == math.inf
