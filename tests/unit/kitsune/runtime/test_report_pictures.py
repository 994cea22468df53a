"""`step.report.trace`, `.svg` and what the report says of the launches that were planned, on the CPU twin."""

import json
import re
import xml.etree.ElementTree as ET

import pytest
import torch

from kitsune.errors import UnplannedError
from kitsune.runtime.report import Report
from kitsune.techniques import TECHNIQUES
from tests.step_cases import OPTIMIZERS, Convnet, Planned, batches, capturing_cpu, pair

ON_FOUR = {"capture": "step", "streams": 4}
TOLD = re.compile(
    r"note {6}(\d+) launches on [1-4] streams?: \S+ ms predicted, \S+ ms one after the other; \d+ waits?; .+"
)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A CPU on which steps are captured and scheduled, as on a GPU."""
    monkeypatch.setattr(TECHNIQUES["streams"], "why_not", lambda choice, facts: None)
    return capturing_cpu(monkeypatch)


def training(device: torch.device, knobs: dict, optimizer: str = "sgd", **options) -> Planned:
    return pair(device, knobs, optimizer=OPTIMIZERS[optimizer], **options)[0]


def launches_told(report: Report) -> int:
    (line,) = filter(None, map(TOLD.fullmatch, str(report).splitlines()))
    return int(line[1])


def launches_drawn(report: Report, path) -> int:
    report.trace(path)
    return sum(event["ph"] == "X" for event in json.loads(path.read_text())["traceEvents"])


def test_the_planned_launches_are_told_of_and_drawn(device, tmp_path):
    run = training(device, ON_FOUR, model=Convnet)
    run.train(batches(5, 6, 3, 8, 8))
    count = launches_told(run.step.report)
    assert count > 10
    timeline = run.step.report.timeline(at_most=count - 4)
    assert (len(timeline.launches), timeline.left_out) == (count - 4, 4)
    assert timeline.told == run.step.report.planned
    assert launches_drawn(run.step.report, tmp_path / "step.json") == count
    run.step.report.svg(str(tmp_path / "step.svg"))
    boxes = ET.parse(tmp_path / "step.svg").getroot().findall("{http://www.w3.org/2000/svg}rect")
    assert len(boxes) == count


def test_of_several_batch_shapes_the_last_is_shown(device, tmp_path):
    run = training(device, ON_FOUR)
    run.train(batches(5))
    first = run.step.report.picture
    run.train(batches(14, 3, 8))
    assert len(run.step._programs) == 2
    last = run.step.report.picture
    assert last is not first
    run.train(batches(2))
    assert run.step.report.picture is last
    assert launches_drawn(run.step.report, tmp_path / "step.json") == launches_told(run.step.report)


@pytest.mark.parametrize("draw", ["trace", "svg"])
def test_before_the_capture_and_after_the_end_there_is_nothing_to_draw(draw, device, tmp_path):
    run = training(device, ON_FOUR)
    run.train(batches(2))
    assert_nothing_drawn(run.step.report, draw, tmp_path, "no step is captured now; run steps until one is")
    run.train(batches(3))
    getattr(run.step.report, draw)(tmp_path / "drawn")
    run.step.close()
    assert_nothing_drawn(run.step.report, draw, tmp_path, "ask before close()")
    assert "launches" not in str(run.step.report)


def test_a_model_that_changes_has_no_picture_until_it_is_captured_anew(device, tmp_path):
    run = training(device, ON_FOUR)
    run.train(batches(5))
    run.model.first.weight = torch.nn.Parameter(torch.zeros(16, 8))
    run.train(batches(1))
    assert_nothing_drawn(run.step.report, "trace", tmp_path, "no step is captured now")
    run.train(batches(4))
    assert launches_drawn(run.step.report, tmp_path / "step.json") == launches_told(run.step.report)


def test_one_stream_is_not_planned(device, tmp_path):
    run = training(device, {"capture": "step"})
    run.train(batches(5))
    assert run.step.report.timeline() is None
    assert_nothing_drawn(run.step.report, "trace", tmp_path, "no launches are planned for several streams")
    assert_nothing_drawn(Report(), "svg", tmp_path, "or no step has run")


def test_streams_that_were_declined_are_named_with_the_reason(device, tmp_path):
    run = training(device, ON_FOUR, "adamw")  # it asks the host for its step on a CPU
    run.train(batches(5))
    assert_nothing_drawn(run.step.report, "trace", tmp_path, "streams was declined, as .* depends on the data")


def test_on_a_machine_without_a_gpu_both_reasons_are_given(tmp_path):
    run = training(torch.device("cpu"), ON_FOUR)
    because = "streams was declined, as streams need a GPU; capture was declined, as CUDA graphs need a GPU"
    assert_nothing_drawn(run.step.report, "svg", tmp_path, because)


def assert_nothing_drawn(report: Report, draw: str, folder, because: str) -> None:
    with pytest.raises(UnplannedError, match=f"there is no plan of launches to draw: .*{because}"):
        getattr(report, draw)(folder / "nothing")
    assert not (folder / "nothing").exists()
