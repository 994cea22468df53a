"""`kitsune explain` on a CPU: what it shows, what it writes, and every way to be refused."""

import contextlib
import json
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kitsune.device.backend import environment
from kitsune.errors import CaptureError, DeclinedError, UnfitError
from kitsune.launches.planning.schedule import Schedule, in_order
from kitsune.plan import Plan
from kitsune.runtime.plan_application import Assembly
from kitsune.runtime.report import Report
from tests.store.samples import an_environment
from tests.unit.kitsune.launches.steps import even_us
from tuner.child import stream_forecast
from tuner.child.stream_forecast import check_plannable, recordable, rehearse
from tuner.commands.explain import add_notes, analysis_of
from tuner.workloads.loader import load_workload

MLP = "zoo:mlp?size=tiny"
CPU = torch.device("cpu")
OWN = """
import torch
from kitsune import Workload

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)

    def forward(self, x):
        print("in the model")
        FORWARD

def make():
    model = Model()
    optimizer = OPTIMIZER
    return Workload(model, torch.nn.functional.cross_entropy, optimizer, (torch.randn(3, 4), torch.tensor([0, 1, 0])))
"""
RETURN = "return self.last(self.first(x))"


@pytest.fixture
def own(tmp_path):
    """The name of a workload in a file, with this forward and this optimizer."""

    def write(forward: str = RETURN, optimizer: str = "torch.optim.SGD(model.parameters(), lr=0.1)") -> str:
        path = tmp_path / "train.py"
        path.write_text(OWN.replace("FORWARD", forward).replace("OPTIMIZER", optimizer), encoding="utf-8")
        return f"{path}:make"

    return write


@pytest.fixture
def plan_file(tmp_path):
    def save(plan: Plan) -> str:
        plan.save(tmp_path / "plan.json")
        return str(tmp_path / "plan.json")

    return save


def refusal(out: str) -> tuple[str, str]:
    error = json.loads(out)["error"]
    return error["type"], error["message"]


# What is shown --------------------------------------------------------------------------------------------------------


def test_a_step_of_the_zoo_is_shown_on_1_2_4_and_8_streams(call):
    code, out, err = call("explain", MLP)
    assert (code, err) == (0, "")
    lines = [line.split() for line in out.splitlines()]
    table = lines[
        lines.index(["up", "to", "streams", "launches", "predicted", "gain", "waits", "memory", "idle"]) + 1 :
    ]
    assert [row[0] for row in table[:4]] == ["1", "2", "4", "8"]
    assert (table[0][1], table[0][5:7]) == ("1", ["1.00x", "0"])
    assert ["applied", "update=fused"] in lines
    assert any(line[:1] == ["_fused_adamw_"] for line in lines)
    assert lines.index(["class", "launches", "us", "share", "floor", "us", "over", "floor"]) < len(lines)
    for text in (
        "critical path",
        "matrix products",
        "streams need a GPU",
        "The longest launches of the critical path:",
    ):
        assert text in out
    assert out.splitlines()[-1].endswith(".")


def test_a_plan_and_its_workload_as_one_object_with_both_pictures(call, plan_file, tmp_path):
    plan = plan_file(Plan.by_hand(precision="bf16", capture="step", streams=8))
    pictures = ["--trace", str(tmp_path / "step.trace"), "--svg", str(tmp_path / "step.svg")]
    code, out, err = call("explain", plan, "--workload", MLP, "--streams", "2", "--json", *pictures)
    found = json.loads(out)
    assert code == 0
    assert found["workload"] == MLP
    assert found["applied"] == {"precision": "bf16", "update": "fused"}
    assert found["declined"] == {}
    assert found["environment"] == environment(CPU).model_dump(mode="json")
    (outlook,) = found["outlooks"]
    assert outlook["asked"] == 2 >= outlook["streams"] == len(outlook["idle"])
    assert 0 < outlook["pool_bytes"] <= outlook["naive_bytes"]
    assert "_to_copy" in {group["name"] for group in found["groups"]}, "bf16 casts"
    assert 0 < found["critical_us"] <= found["sum_us"]
    assert found["critical_launches"] <= found["launches"]
    assert found["limit"].endswith(".")
    classes, given = ({each["name"]: each for each in found[part]} for part in ("classes", "classes_as_given"))
    casts, without = (part.get("copies and casts", {"launches": 0})["launches"] for part in (classes, given))
    assert casts > without, "bf16 casts"
    assert sum(each["launches"] for each in classes.values()) == found["launches"]
    assert all(0 <= each["floor_us"] <= each["total_us"] for each in classes.values())
    drawn = [event for event in json.loads((tmp_path / "step.trace").read_text())["traceEvents"] if event["ph"] == "X"]
    boxes = ET.parse(tmp_path / "step.svg").getroot().findall("{http://www.w3.org/2000/svg}rect")
    assert len(drawn) == len(boxes) == outlook["launches"]
    assert err.count("The quickest plan by prediction, on ") == 2


def test_a_plan_may_stand_behind_its_workload_as_well(call, plan_file):
    code, out, _ = call("explain", MLP, "--plan", plan_file(Plan.by_hand(precision="bf16")), "--streams", "1", "--json")
    assert code == 0
    found = json.loads(out)
    assert found["applied"] == {"precision": "bf16", "update": "fused"}
    assert [(each["asked"], each["streams"], each["waits"]) for each in found["outlooks"]] == [(1, 1, 0)]
    assert 0 < found["critical_us"] < found["sum_us"]


def test_two_pictures_are_two_files(call, tmp_path):
    path = str(tmp_path / "step")
    code, _, err = call("explain", MLP, "--trace", path, "--svg", path)
    assert code == 2
    assert "a trace is written there already" in err
    assert not (tmp_path / "step").exists()


def test_an_archive_is_explained_too(call, tmp_path):
    archive = str(tmp_path / "mlp.ksn")
    assert call("export", MLP, "--out", archive)[0] == 0
    code, out, _ = call("explain", archive, "--streams", "2", "--json")
    assert (code, json.loads(out)["workload"]) == (0, archive)


def test_a_file_whose_optimizer_cannot_be_captured_is_shown_without_its_update(call, own):
    code, out, err = call(
        "explain", own(optimizer="torch.optim.RMSprop(model.parameters())"), "--streams", "2", "--json"
    )
    assert code == 0
    assert "in the model" in err
    found = json.loads(out)
    assert "update" in found["declined"]
    reason = "the optimizer's update is not among the launches: RMSprop cannot take its learning rate from a tensor"
    assert reason in found["notes"]


@pytest.mark.parametrize(("gpu", "told"), [("NVIDIA H200", True), (environment(CPU).gpu, False)])
def test_a_plan_of_another_machine_is_noted(gpu, told):
    here = environment(CPU)
    there = an_environment() if told else here
    report = Report()
    add_notes(report, Plan(environment=there), here)
    assert [note for note in report.notes if note.startswith("the plan was tuned on NVIDIA H200")] == report.notes[
        :told
    ]
    assert "streams need a GPU" in report.notes[-1]


def test_where_no_plan_of_one_stream_fits_the_pool_that_of_the_fewest_is_shown():
    (plan, *_) = rehearse(load_workload(MLP, "cpu"), {}, 1).plans
    graph = plan.recording.graph
    *others, last = in_order(graph, plan.costs_us).placed
    wide = replace(plan, schedule=Schedule(2, (*others, replace(last, stream=1))))
    (outlook,) = analysis_of([wide], wide, (1,)).outlooks
    assert (outlook.asked, outlook.streams) == (1, 2)


def test_what_no_number_of_streams_can_change_does_not_depend_on_how_many_were_asked_for(monkeypatch):
    monkeypatch.setattr("kitsune.launches.plans.measured_us", even_us)
    one, several = (rehearse(load_workload("zoo:lenet5?size=tiny", "cpu"), {}, streams) for streams in (1, 4))
    assert {plan.schedule.streams for plan in one.plans} == {1}
    ours, theirs = analysis_of(one.plans, one.finest, (1,)), analysis_of(several.plans, several.finest, (1, 4))
    assert (ours.launches, ours.critical_us) == (theirs.launches, theirs.critical_us)
    (alone,) = one.plans
    assert ours.outlooks[0].launches == len(alone.recording.calls) < ours.launches
    assert "others could help" in ours.limit


def test_launches_are_timed_by_what_is_set_in_the_step(monkeypatch):
    """As TF32 is, whose products take a fraction of the time."""
    inside, seen = [0], []

    @contextlib.contextmanager
    def counted():
        inside[0] += 1
        yield
        inside[0] -= 1

    def measured_us(recording):
        seen.append(inside[0])
        return even_us(recording)

    class Counted(Assembly):
        def apply(self, build):
            super().apply(build)
            build.step_contexts.append(counted)

    monkeypatch.setattr("tuner.child.stream_forecast.Assembly", Counted)
    monkeypatch.setattr("kitsune.launches.plans.measured_us", measured_us)
    rehearse(load_workload(MLP, "cpu"), {}, 2)
    assert seen and min(seen) == 1
    assert inside == [0]


def test_on_a_cpu_a_plan_is_explained_without_what_it_compiles(call, plan_file):
    code, out, _ = call(
        "explain", MLP, "--plan", plan_file(Plan.by_hand(compile="default", precision="bf16")), "--json"
    )
    assert code == 0
    found = json.loads(out)
    assert found["applied"] == {"precision": "bf16", "update": "fused"}
    assert "without compile, whose launches can be recorded on a GPU only" in found["notes"]


# What is refused ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("forward", "kind", "because"),
    [
        (f"x = x[x.sum(1) > -100]; {RETURN}", "CaptureError", "depends on the data"),
        ("return self.last(x) + x", "WorkloadError", "the step fails as given: RuntimeError: The size of tensor"),
        ("raise KeyError('luck')", "WorkloadError", "the step fails as given: KeyError: 'luck'"),
    ],
)
def test_a_step_that_cannot_be_recorded_is_refused_with_the_reason(forward, kind, because, call, own):
    code, out, err = call("explain", own(forward), "--json")
    assert (code, refusal(out)[0]) == (4, kind)
    assert because in refusal(out)[1]
    assert "Traceback" not in err


def test_a_step_of_hidden_launches_is_refused(call, own):
    """numpy writes without that torch sees it: what is issued again is not the step."""
    code, out, _ = call("explain", own(f"self.first.bias.data.numpy()[:] += 1; {RETURN}"), "--json")
    assert (code, refusal(out)[0]) == (4, "CaptureError")
    assert "issued again they differ from the step" in refusal(out)[1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["plan.json"], "name it by --workload"),
        (["plan.json", "--plan", "plan.json", "--workload", MLP], "is a plan already"),
        ([MLP, "--workload", MLP], "is a workload already"),
        (["nowhere.json", "--workload", MLP], "there is no file 'nowhere.json'"),
        ([MLP, "--plan", "nowhere.json"], "does not exist"),
        ([MLP, "--streams", "9"], "Invalid value for '--streams'"),
        ([], "Missing argument"),
    ],
)
def test_a_command_line_that_makes_no_sense(words, said, call, plan_file, monkeypatch):
    monkeypatch.chdir(Path(plan_file(Plan.by_hand(update="fused"))).parent)
    code, out, err = call("explain", *words)
    assert (code, out) == (2, "")
    assert said in err


def test_a_plan_that_is_none_is_refused(call, tmp_path):
    (tmp_path / "plan.json").write_text("{}", encoding="utf-8")
    code, out, _ = call("explain", str(tmp_path / "plan.json"), "--workload", MLP, "--json")
    assert (code, refusal(out)[0]) == (4, "PlanError")


@pytest.mark.parametrize("option", ["--trace", "--svg"])
def test_a_picture_that_cannot_be_written_is_told_of_before_anything_is_built(option, call, tmp_path):
    code, out, _ = call("explain", "zoo:nope", option, str(tmp_path / "no" / "x"), "--json")
    assert (code, refusal(out)[0]) == (2, "SettingsError")
    assert refusal(out)[1].startswith(f"{option} {tmp_path}")


def test_a_picture_that_becomes_unwritable_is_an_error_and_one_object(call, monkeypatch):
    monkeypatch.setattr("tuner.commands.explain.check_writable", lambda *_: None)
    code, out, _ = call("explain", MLP, "--streams", "1", "--svg", "/dev/null/x", "--json")
    assert (code, refusal(out)) == (2, ("SettingsError", "--svg /dev/null/x cannot be written: Not a directory"))


@pytest.mark.parametrize(("words", "code"), [(["zoo:nope"], 4), (["nope"], 4), ([MLP, "--device", "toaster"], 3)])
def test_errors_keep_their_code(words, code, call):
    ended, out, err = call("explain", *words)
    assert (ended, out) == (code, "")
    assert err.startswith("Error: ")


def test_a_batch_that_cannot_be_static_is_refused():
    workload = load_workload(MLP, "cpu")
    x, y = workload.batch
    with pytest.raises(CaptureError, match="cannot be followed: the batch requires a gradient"):
        rehearse(replace(workload, batch=(x.requires_grad_(), y)), {}, 1)


# The rehearsal --------------------------------------------------------------------------------------------------------


def test_on_a_gpu_the_choices_are_those_of_one_graph_on_streams():
    """The same kernels, where a compile mode has graphs of its own."""
    cuda = torch.device("cuda")
    assert recordable({}, cuda) == {"capture": "step", "streams": 8}
    given = {"compile": "reduce-overhead", "capture": "segments", "precision": "bf16"}
    assert recordable(given, cuda) == {"precision": "bf16", "compile": "default", "capture": "step", "streams": 8}


@pytest.mark.parametrize("knob", ["capture", "streams"])
def test_a_step_that_cannot_be_planned_here_is_refused_with_the_reason(knob):
    with pytest.raises(CaptureError, match="cannot be planned here: a hook would not run"):
        check_plannable(Report(declined={knob: "a hook would not run"}))


@pytest.mark.parametrize(
    ("raised", "kind", "said"),
    [
        (torch.OutOfMemoryError("no memory left"), UnfitError, "frees memory only at its end: no memory left"),
        (RuntimeError("No available kernel. Aborting."), DeclinedError, "attention cannot be applied: No available"),
        (RuntimeError("anything else"), CaptureError, "cannot be recorded: anything else"),
    ],
)
def test_what_fails_under_the_choices_is_told_by_what_is_to_blame(raised, kind, said, monkeypatch):
    def fails(*_):
        raise raised

    monkeypatch.setattr(stream_forecast, "recorded", fails)
    with pytest.raises(kind, match=said):
        rehearse(load_workload(MLP, "cpu"), {"attention": "math"}, 2)


def test_an_optimizer_that_never_starts_is_not_waited_for(monkeypatch):
    calls = []
    monkeypatch.setattr("kitsune.capture.step_graph.is_starting", lambda optimizer: calls.append(optimizer) or True)
    assert rehearse(load_workload(MLP, "cpu"), {}, 1).plans
    assert 20 < len(calls) < 40


def test_a_choice_that_does_not_apply_is_declined_and_the_others_hold():
    found = rehearse(load_workload(MLP, "cpu"), {"layout": "channels_last", "precision": "bf16"}, 2)
    assert set(found.report.declined) == {"layout"}
    assert found.report.applied == {"precision": "bf16", "update": "fused"}
    assert {plan.schedule.streams for plan in found.plans} <= {1, 2}
