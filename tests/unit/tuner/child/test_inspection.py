"""Fingerprints of workloads whose graph cannot be exported."""

from pathlib import Path

import pytest

from tuner.child.inspection import fingerprints_of, local_fingerprint
from tuner.workloads.loader import load_workload

CODE = """
import torch
import kitsune


class Waits(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x):
        return torch.tanh(self.linear(x)) if x.sum().item() < 1e9 else x


def make():
    model = Waits()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    return kitsune.Workload(model, torch.nn.functional.mse_loss, optimizer, (torch.randn(2, 4), torch.randn(2, 4)))
"""


@pytest.fixture(autouse=True)
def no_bytecode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a file that was written twice within a second, and is as long as before, that of the first would be taken."""
    monkeypatch.setattr("sys.dont_write_bytecode", True)


def fingerprint(path: Path, code: str) -> str:
    path.write_text(code)
    return local_fingerprint(load_workload(f"{path}:make", "cpu"), "make")


def test_a_workload_that_cannot_be_exported_is_fingerprinted_by_its_code(tmp_path: Path) -> None:
    path = tmp_path / "work.py"
    own = fingerprint(path, CODE)
    found, of_model, note = fingerprints_of(f"{path}:make", load_workload(f"{path}:make", "cpu"))
    assert (found, of_model) == (own, "")
    assert "not exportable" in note


@pytest.mark.parametrize(
    ("old", "new"),
    [("torch.tanh", "torch.sin"), ("lr=0.5", "lr=0.1"), ("lr=0.5", "lr=0.5, momentum=0.9"), ("mse_loss", "l1_loss")],
)
def test_another_step_that_cannot_be_exported_has_another_fingerprint(tmp_path: Path, old: str, new: str) -> None:
    path = tmp_path / "work.py"
    assert fingerprint(path, CODE) == fingerprint(path, CODE)
    assert fingerprint(path, CODE) != fingerprint(path, CODE.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("    model = Waits()", "    model = Waits()  # here"),
        ("torch.randn(2, 4)))", "torch.randn(2, 4)), lambda seed: [])"),
    ],
    ids=["comment", "batches"],
)
def test_what_does_not_change_the_step_does_not_change_the_fingerprint(tmp_path: Path, old: str, new: str) -> None:
    path = tmp_path / "work.py"
    assert old in CODE
    assert fingerprint(path, CODE) == fingerprint(path, CODE.replace(old, new))
