"""Every example runs as a user runs it, and says what it should on a machine without a GPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str, *arguments: str) -> str:
    done = subprocess.run([sys.executable, EXAMPLES / name, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", ["basic_usage.py", pytest.param("stream_parallelism.py", marks=pytest.mark.minutes)])
def test_an_example_trains_and_reports(name):
    shown = run(name, "--steps", "10")
    assert "step   10  loss" in shown
    if not torch.cuda.is_available():
        assert "declined  capture: CUDA graphs need a GPU" in shown


@pytest.mark.minutes
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_mixed_precision_by_the_optimizer_and_by_hand(dtype):
    shown = run("amp_integration.py", "--steps", "6", "--dtype", dtype)
    assert "by the optimizer: loss" in shown
    assert f"steps={6 if dtype == 'float16' else 0}, skipped=0" in shown


@pytest.mark.minutes
def test_the_final_demo_measures_what_it_came_to(tmp_path):
    shown = run("final_demo.py", "--steps", "30", "--profile", "--out", str(tmp_path / "profile.json"))
    assert "speedup" in shown
    saved = json.loads((tmp_path / "profile.json").read_text())
    assert saved["applied"]["compile"] == "default"
    assert saved["speedup"] == pytest.approx(saved["given_ms"] / saved["planned_ms"])


@pytest.mark.minutes
def test_kernel_fusion_says_what_the_engine_did_to_a_block():
    shown = run("kernel_fusion.py", "--steps", "1")
    assert "fusion replaced " in shown
    assert "the result differs by " in shown
    if torch.cuda.is_available():
        assert "kernels launched, forward and backward: " in shown
    else:
        assert "nothing was fused: Kitsune's kernels run on a GPU, but the graph is on a CPU" in shown


@pytest.mark.minutes
def test_fused_kernels_are_measured_in_the_loop():
    assert "applied   compile = default" in run("kernel_fusion.py", "--steps", "30")
