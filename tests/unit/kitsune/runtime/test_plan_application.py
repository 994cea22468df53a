"""What is left of a plan: declined parts with their reasons, environments, and whom an error is blamed on."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._dynamo.exc import TorchRuntimeError

from kitsune.device.backend import environment
from kitsune.errors import CaptureError, DeclinedError
from kitsune.knobs import KNOBS, clashes
from kitsune.plan import Plan
from kitsune.runtime.plan_application import Assembly
from kitsune.runtime.report import Report
from kitsune.techniques import TECHNIQUES, Facts, why_not
from tests.step_cases import assert_same, batches, pair, train_both

CPU = torch.device("cpu")
CAPABLE = Facts(
    device="cuda",
    compute_capability=(9, 0),
    parameter_dtypes=frozenset({torch.float32}),
    convolutions=True,
    wide_activations=True,
    optimizer="AdamW",
    optimizer_options=("foreach", "fused", "capturable"),
)
POOR = Facts(device="cpu", compiler="no compiler", attention=False, optimizer="LBFGS", hook="a forward hook on fc")
CHOICES = st.fixed_dictionaries(
    {}, optional={name: st.sampled_from(list(knob.choices)) for name, knob in KNOBS.items()}
)


def assembly(facts=CAPABLE, on_decline="eager", environment=None, **knobs):
    return Assembly(Plan(knobs=knobs, environment=environment), facts, CPU, on_decline)


@given(CHOICES, st.sampled_from([CAPABLE, POOR]))
def test_every_choice_is_kept_or_declined_with_its_reason(knobs, facts):
    plan = Plan(knobs=knobs)
    found = Assembly(plan, facts, CPU, "eager")
    assert {*found.knobs, *found.report.declined} == set(plan.knobs)
    assert not {*found.knobs} & {*found.report.declined}
    assert all(found.report.declined.values())
    assert all(why_not(name, choice, facts) is None for name, choice in found.knobs.items())
    assert list(clashes(found.knobs)) == []


def test_a_clash_names_the_other_choice():
    found = assembly(capture="step", compile="reduce-overhead")
    assert found.report.declined["capture"].startswith("compile=reduce-overhead: ")
    assert found.knobs == {"compile": "reduce-overhead"}


def test_declining_may_raise_what_and_why():
    with pytest.raises(DeclinedError) as caught:
        assembly(facts=POOR, on_decline="raise", compile="default")
    assert (caught.value.knob, caught.value.reason) == ("compile", "no compiler")


def test_a_plan_for_another_machine_is_refused_as_a_whole():
    elsewhere = environment(CPU).model_copy(update={"device": "cuda", "gpu": "NVIDIA H200"})
    found = assembly(environment=elsewhere, update="fused", precision="bf16")
    assert set(found.report.declined) == {"update", "precision"}
    assert all("the plan was tuned on NVIDIA H200 (cuda), this is" in why for why in found.report.declined.values())
    assert found.report.notes == []


def test_a_plan_of_a_near_by_environment_gets_a_note():
    older = environment(CPU).model_copy(update={"torch": "2.9.0"})
    found = assembly(environment=older, update="fused")
    assert found.knobs == {"update": "fused"}
    assert found.report.notes == [f"the plan was tuned with torch 2.9.0, this is {torch.__version__}"]


def test_a_step_of_a_refused_plan_is_plain(monkeypatch):
    planned, plain = pair(CPU, {})
    elsewhere = environment(CPU).model_copy(update={"gpu": "another CPU"})
    planned.step.close()
    monkeypatch.setattr(Plan, "by_hand", classmethod(lambda cls, **knobs: cls(knobs=knobs, environment=elsewhere)))
    planned.start({"precision": "bf16"})
    train_both(planned, plain, batches(3))
    assert_same(planned, plain)
    assert "another CPU" in planned.step.report.declined["precision"]


@pytest.mark.parametrize(
    ("error", "knob"),
    [
        (RuntimeError("No available kernel. Aborting execution."), "attention"),
        (TorchRuntimeError("Dynamo failed to run FX node: No available kernel"), "attention"),
        (TorchRuntimeError("anything else"), "compile"),
        (CaptureError("CUDA graph capture failed: out of memory"), "capture"),
        (RuntimeError("the user's own"), None),
        (ValueError("No such user"), None),
    ],
)
def test_an_error_is_blamed_on_the_knob_that_recognises_it(error, knob):
    found = assembly(attention="flash", compile="default", capture="step", update="fused")
    blamed = found.blamed(error)
    assert (blamed and blamed[0]) == knob
    assert assembly(update="fused").blamed(error) is None


def test_a_report_in_words():
    report = Report(applied={"update": "fused"}, declined={"capture": "CUDA graphs need a GPU"})
    report.note("twice")
    report.note("twice")
    assert str(report).splitlines() == [
        "applied   update = fused",
        "declined  capture: CUDA graphs need a GPU",
        "note      twice",
    ]
    assert str(Report()) == "plain: the step runs as given"


class OfACompiler(Exception):
    """Derives from nothing else, as Triton's errors do."""


@pytest.mark.parametrize("owner", ["update", None])
def test_whatever_a_technique_owns_up_to_is_declined_and_all_else_goes_on(monkeypatch, owner):
    planned, plain = pair(CPU, {"update": "fused"})
    fused = planned.optimizer.step

    def breaks(*args, **kwargs):
        if planned.optimizer.param_groups[0]["fused"]:
            raise OfACompiler("ptxas failed")
        return fused(*args, **kwargs)

    monkeypatch.setattr(planned.optimizer, "step", breaks)
    if owner is None:
        with pytest.raises(OfACompiler):
            train_both(planned, plain, batches(1))
        return
    monkeypatch.setattr(TECHNIQUES[owner], "blames", lambda error: isinstance(error, OfACompiler))
    train_both(planned, plain, batches(3))
    assert_same(planned, plain)
    assert planned.step.report.declined == {"update": "ptxas failed"}
