"""`kitsune verify` in this process, on small steps."""

import json
from pathlib import Path

import pytest

from kitsune.plan import Environment, Plan
from tests.unit.tuner import faulty_steps
from tuner.child.inspection import fingerprints_of
from tuner.child.zoo_plans import zoo_workload
from tuner.statistics.loss_curves import Verification
from tuner.workloads.loader import load_workload

FAULTY = Path(faulty_steps.__file__)
MLP = "zoo:mlp?size=tiny&batch=24"


@pytest.fixture
def channels_last(tmp_path):
    path = tmp_path / "plan.json"
    Plan.by_hand(layout="channels_last").save(path)
    return path


def tuned_for(spec: str, batch: str, knobs=None) -> Plan:
    fingerprint, model_fingerprint, _ = fingerprints_of(spec, load_workload(spec, "cpu"))
    return Plan(knobs=knobs or {}, fingerprint=fingerprint, model_fingerprint=model_fingerprint, batch=batch)


def test_a_right_plan_trains_alike_and_its_curves_are_kept_beside_it(call, channels_last):
    code, out, err = call(
        "verify", str(channels_last), f"{FAULTY}:right", "--steps", "60", "--seeds", "3", "--device", "cpu"
    )
    assert code == 0, out + err
    assert "same: held-out loss" in out
    assert "seed 1, by the plan" in err
    kept = Verification.model_validate_json((channels_last.parent / "plan.verified.json").read_text())
    assert kept.plan_id == Plan.load(channels_last).plan_id
    assert [(curve.seed, curve.arm) for curve in kept.curves] == [
        (seed, arm) for seed in range(3) for arm in ("plain", "plan")
    ]
    assert all(curve.steps == tuple(range(3, 61, 3)) for curve in kept.curves)
    assert all(curve.held_out[-1] < curve.start / 2 for curve in kept.curves)
    assert kept.curves[0].start == kept.curves[1].start != kept.curves[2].start


def test_a_plan_that_trains_on_one_batch_again_and_again_differs(call, channels_last, tmp_path):
    out_file = tmp_path / "curves.json"
    asked = ("--steps", "40", "--seeds", "2", "--device", "cpu", "--out", str(out_file), "--json")
    code, out, _ = call("verify", str(channels_last), f"{FAULTY}:constant_batch", *asked)
    assert code == 4
    assert json.loads(out)["outcome"]["verdict"] == "differs"
    assert json.loads(out) == json.loads(out_file.read_text())


def test_the_workload_of_a_zoo_plan_is_found_by_its_fingerprint(call, tmp_path):
    path = tmp_path / "plan.json"
    tuned_for(MLP, "24x1x28x28", {"update": "foreach"}).save(path)
    code, out, err = call("verify", str(path), "--steps", "20", "--seeds", "2", "--device", "cpu", "--json")
    assert code == 0, out + err
    assert json.loads(out)["workload"] == "zoo:mlp?size=tiny&batch=24"


@pytest.mark.minutes
def test_a_zoo_plan_of_tokens_is_found_too():
    spec = "zoo:gpt2_small?size=tiny&batch=2&seq=16"
    assert zoo_workload(tuned_for(spec, "2x16"), "cpu") == spec


def test_a_plan_of_any_other_workload_needs_its_name(call, channels_last):
    code, _, err = call("verify", str(channels_last))
    assert code == 4
    assert "name its workload" in err


def test_a_workload_with_one_batch_is_refused_for_that(call, channels_last, tmp_path):
    file = tmp_path / "one.py"
    file.write_text(
        "import torch, kitsune\n"
        "def make():\n"
        "    model = torch.nn.Linear(2, 1)\n"
        "    optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "    batch = (torch.zeros(4, 2), torch.zeros(4, 1))\n"
        "    return kitsune.Workload(model, torch.nn.functional.mse_loss, optimizer, batch)\n"
    )
    code, _, err = call("verify", str(channels_last), f"{file}:make", "--device", "cpu")
    assert code == 4
    assert "one batch only" in err
    assert not (channels_last.parent / "plan.verified.json").exists()


def test_a_plan_of_another_step_or_machine_is_refused(call, tmp_path):
    path = tmp_path / "plan.json"
    plan = tuned_for(MLP, "24x1x28x28")
    plan.save(path)
    code, _, err = call("verify", str(path), "zoo:lenet5?size=tiny", "--device", "cpu")
    assert code == 4
    assert "another step" in err
    there = Environment(device="cuda", gpu="a GPU", memory_bytes=1, torch="2", python="3", kitsune="0")
    plan.model_copy(update={"environment": there}).save(path)
    code, _, err = call("verify", str(path), "--device", "cpu")
    assert code == 3
    assert "a GPU" in err


def test_where_nothing_is_learnt_the_code_says_that_there_is_no_result(call, channels_last, tmp_path):
    file = tmp_path / "noise.py"
    file.write_text(
        "import torch, kitsune\n"
        "def noise(seed):\n"
        "    generator = torch.Generator().manual_seed(seed)\n"
        "    while True:\n"
        "        yield torch.randn(64, 2, generator=generator), torch.randn(64, 1, generator=generator)\n"
        "def make():\n"
        "    model = torch.nn.Linear(2, 1)\n"
        "    torch.nn.init.zeros_(model.weight), torch.nn.init.zeros_(model.bias)\n"
        "    optimizer = torch.optim.SGD(model.parameters(), 1e-3)\n"
        "    batch = (torch.zeros(64, 2), torch.zeros(64, 1))\n"
        "    return kitsune.Workload(model, torch.nn.functional.mse_loss, optimizer, batch, batches=noise)\n"
    )
    asked = ("--steps", "20", "--seeds", "2", "--device", "cpu")
    Plan.by_hand(update="foreach").save(channels_last)
    code, out, _ = call("verify", str(channels_last), f"{file}:make", *asked)
    assert code == 5
    assert "learns nothing" in out
