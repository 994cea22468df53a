"""`kitsune explain` and the pictures of a step on a GPU, where launches are timed by the GPU's own clock."""

import json

import pytest

from kitsune.cli import main
from tests.step_cases import OPTIMIZERS, Convnet, batches, pair


@pytest.mark.parametrize("words", [[], ["--streams", "3"]])
def test_a_step_of_the_zoo_is_explained_as_given(device, words, capsys, tmp_path):
    code = main.run(["explain", "zoo:googlenet?size=tiny", "--json", "--trace", str(tmp_path / "step.json"), *words])
    found = json.loads(capsys.readouterr().out)
    assert code == 0, found
    assert found["environment"]["device"] == "cuda"
    assert (found["applied"], found["declined"], found["notes"]) == ({}, {}, [])
    assert [each["asked"] for each in found["outlooks"]] == ([3] if words else [1, 2, 4, 8])
    assert 0 < found["critical_us"] < found["sum_us"]
    drawn = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    assert sum(event["ph"] == "X" for event in drawn) > 100


def test_a_planned_step_is_drawn_and_told_of(device, tmp_path):
    run, _ = pair(device, {"capture": "step", "streams": 4}, model=Convnet, optimizer=OPTIMIZERS["adamw by hand fused"])
    run.train(batches(6, 6, 3, 8, 8))
    run.step.report.trace(tmp_path / "step.json")
    drawn = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    assert f"{sum(event['ph'] == 'X' for event in drawn)} launches on " in str(run.step.report)
