"""`kitsune export` in this process."""

import json

import pytest

from kitsune.cli import main
from kitsune.submission.format.archive import Archive


def test_export_writes_an_archive_and_names_it(call, tmp_path):
    path = tmp_path / "mlp.ksn"
    code, out, _ = call("export", "zoo:mlp?size=tiny", "--out", str(path), "--json")
    found = json.loads(out)
    assert code == 0
    assert found == {"fingerprint": Archive.load(path).fingerprint, "bytes": path.stat().st_size, "file": str(path)}
    again = call("export", "zoo:mlp?size=tiny", "--out", str(path))[1]
    assert found["fingerprint"] in again


def test_what_a_workload_prints_is_not_data(call, tmp_path):
    file = tmp_path / "loud.py"
    file.write_text("print('loading')\ndef make():\n    print('making')\n    raise ValueError('no such luck')\n")
    code, out, err = call("export", f"{file}:make", "--out", str(tmp_path / "x.ksn"), "--json")
    assert (code, json.loads(out)["error"]["type"]) == (4, "WorkloadError")
    assert "no such luck" in err
    assert "making" in err


def test_what_goes_to_stdout_past_python_is_not_data_either(tmp_path, capfd):
    file = tmp_path / "loud.py"
    file.write_text("import os\nos.write(1, b'loading')\ndef make():\n    os.write(1, b'making')\n")
    assert main.run(["export", f"{file}:make", "--out", str(tmp_path / "x.ksn"), "--json"]) == 4
    out, err = capfd.readouterr()
    assert json.loads(out)["error"]["type"] == "WorkloadError"
    assert "loadingmaking" in err


@pytest.mark.parametrize(("spec", "code"), [("zoo:nope", 4), ("nope", 4), ("x.ksn", 4)])
def test_export_refuses_what_it_cannot_take(spec, code, call, tmp_path):
    ended, out, err = call("export", spec, "--out", str(tmp_path / "x.ksn"))
    assert (ended, out) == (code, "")
    assert err.startswith("Error: ")
    assert "Traceback" not in err


UNTRAINABLE = """
import torch
from kitsune import Workload

def workload(optimizer, model):
    batch = torch.randn(8, 4), torch.randn(8, 2)
    return Workload(model, torch.nn.functional.mse_loss, optimizer, batch)

def lbfgs():
    model = torch.nn.Linear(4, 2)
    return workload(torch.optim.LBFGS(model.parameters()), model)

def frozen():
    model = torch.nn.Linear(4, 2).requires_grad_(False)
    return workload(torch.optim.SGD(model.parameters(), lr=0.1), model)

def stranger():
    return workload(torch.optim.SGD(torch.nn.Linear(4, 2).parameters(), lr=0.1), torch.nn.Linear(4, 2))
"""


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("lbfgs", "LBFGS evaluates a closure several times a step"),
        ("frozen", "every parameter of the model is frozen"),
        ("stranger", "the optimizer holds none of the model's parameters"),
    ],
)
def test_export_of_what_is_no_training_step(function, words, call, tmp_path):
    (tmp_path / "train.py").write_text(UNTRAINABLE)
    code, out, _ = call("export", f"{tmp_path}/train.py:{function}", "--out", str(tmp_path / "x.ksn"), "--json")
    error = json.loads(out)["error"]
    assert (code, error["type"]) == (4, "WorkloadError")
    assert words in error["message"]


TRAINABLE = """
import torch
from kitsune import Workload

def make():
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Workload(model, torch.nn.functional.mse_loss, optimizer, (torch.randn(8, 4), torch.randn(8, 2)))
"""


@pytest.mark.parametrize(
    ("words", "name"),
    [(("export", "--out"), "step.ksn"), (("explain", "--device", "cpu", "--trace"), "step.json")],
    ids=["export", "explain"],
)
def test_a_file_lands_where_the_user_stands_though_the_workload_changes_its_folder(
    words, name, call, tmp_path, monkeypatch
):
    (tmp_path / "sub").mkdir()
    moves = "import os\nos.chdir(os.path.dirname(os.path.abspath(__file__)))\n"
    (tmp_path / "sub" / "train.py").write_text(moves + TRAINABLE)
    monkeypatch.chdir(tmp_path)
    code, _, err = call(words[0], "sub/train.py:make", *words[1:], name)
    assert code == 0, err
    assert (tmp_path / name).is_file()
    assert not (tmp_path / "sub" / name).exists()


def test_export_to_where_nothing_can_be_written(call, tmp_path):
    code, _, err = call("export", "zoo:mlp?size=tiny", "--out", str(tmp_path / "no" / "x.ksn"))
    assert code == 2
    assert "cannot be written" in err
