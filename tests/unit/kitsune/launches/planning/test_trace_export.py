import json
import xml.etree.ElementTree as ET

import pytest

from kitsune.device.cuda_graph import Recorder
from kitsune.launches.pipeline import Planner
from kitsune.launches.planning.memory_plan import in_use_bytes, plan_memory
from kitsune.launches.planning.schedule import in_order
from kitsune.launches.planning.trace_export import idle_shares, trace_of
from kitsune.launches.recording.recorder import record
from tests.unit.kitsune.launches.steps import CPU, even_us, warmed


@pytest.fixture(scope="module")
def plan():
    step, _ = warmed("branches")
    planner = Planner(Recorder(CPU), 3)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("kitsune.launches.plans.measured_us", even_us)
        planner.capture(step, step.inputs)
    return planner.plan


def test_a_trace_has_every_launch_once_every_wait_and_every_stream(plan):
    trace = json.loads(json.dumps(trace_of(plan.timeline())))
    events = trace["traceEvents"]
    of_kind = {kind: [event for event in events if event["ph"] == kind] for kind in "MXsfC"}
    assert sorted(event["args"]["launch"] for event in of_kind["X"]) == list(range(len(plan.recording.calls)))
    assert len(of_kind["M"]) == plan.schedule.streams > 1
    waits = sum(len(placed.waits) for placed in plan.schedule.placed)
    assert len(of_kind["s"]) == len(of_kind["f"]) == waits > 0
    for begin, end in zip(of_kind["s"], of_kind["f"], strict=True):
        assert begin["id"] == end["id"]
        assert begin["tid"] != end["tid"]
        assert begin["ts"] <= end["ts"]


def test_launches_of_a_stream_do_not_overlap(plan):
    trace = trace_of(plan.timeline())
    for stream in range(plan.schedule.streams):
        boxes = [event for event in trace["traceEvents"] if event["ph"] == "X" and event["tid"] == stream]
        ends = [event["ts"] + event["dur"] for event in boxes]
        assert all(end <= event["ts"] + 1e-6 for end, event in zip(ends, boxes[1:], strict=False))


def test_the_curve_of_one_stream_has_the_peak_that_was_planned():
    step, _ = warmed("branches")
    graph = record(step, CPU).recording.graph
    schedule = in_order(graph, [1.0] * len(graph.launches))
    memory = plan_memory(graph, schedule)
    used = list(map(sum, in_use_bytes(graph, schedule, memory.releases, graph.touchers())))
    assert max(used) == memory.peak_bytes < memory.naive_bytes
    assert min(used) >= 0


def test_the_picture_is_well_formed_and_has_a_box_for_every_launch(plan, tmp_path):
    plan.save_svg(tmp_path / "step.svg")
    plan.save_trace(tmp_path / "step.json")
    root = ET.parse(tmp_path / "step.svg").getroot()
    boxes = root.findall("{http://www.w3.org/2000/svg}rect")
    assert len(boxes) == len(plan.recording.calls)
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    assert any(event["args"]["reads"] for event in events if event["ph"] == "X")
    assert all(event["args"]["writes"] for event in events if event["ph"] == "X")


def test_idle_shares_are_shares(plan):
    shares = idle_shares(plan.schedule)
    assert len(shares) == plan.schedule.streams
    assert all(-1e-9 <= share < 1 for share in shares)
