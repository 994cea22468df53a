"""The programs that the page of a run offers, run as they are: all of a plan in one process, each in its own names."""

import os
import subprocess
import sys

import pytest

from kitsune.plan import Plan
from server.pages.views.snippet_view import snippets
from tests.store.samples import a_run

RUN_ALL = "import runpy, sys\nfor path in sys.argv[1:]:\n    runpy.run_path(path)\n"
FILE = """
import torch
import kitsune


class OwnLoss(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def forward(self, features, targets):
        return (self.layer(features) - targets).square().mean()


def make_workload():
    model = OwnLoss()
    batch = {"features": torch.randn(4, 8), "targets": torch.randn(4, 1)}, None
    return kitsune.Workload(model, None, torch.optim.SGD(model.parameters(), lr=0.1), batch)
"""
#: What a GPU would take and a CPU declines is among them: a snippet runs on either.
KNOBS = {"precision": "bf16", "update": "kitsune", "capture": "step", "streams": 4, "pool_bytes": 2**30}


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("workload", "batch"),
    [
        pytest.param("live", "", marks=pytest.mark.minutes),
        pytest.param("zoo:mlp?size=tiny", "16x1x28x28", marks=pytest.mark.minutes),
        pytest.param("zoo:dlrm?size=tiny", "16,16x13", marks=pytest.mark.minutes),
        ("own.py:make_workload", ""),
    ],
)
def test_every_snippet_trains(workload, batch, tmp_path, kitsune_home):
    (tmp_path / "own.py").write_text(FILE, "utf-8")
    plan = Plan.by_hand(**KNOBS).model_copy(update={"batch": batch})
    programs = [one for one in snippets(a_run(workload=workload), plan, None) if one.language == "python"]
    for program in programs:
        (tmp_path / f"{program.slug}.py").write_text(program.code, "utf-8")
    done = subprocess.run(
        [sys.executable, "-c", RUN_ALL, *(f"{program.slug}.py" for program in programs)],
        cwd=tmp_path,
        env={**os.environ, "KITSUNE_HOME": str(kitsune_home), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=220,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    told = done.stdout.strip().splitlines()
    assert len(told) == 3
    for line in told:
        assert float(line.split()[0]) >= 0
        assert "'precision': 'bf16'" in line
