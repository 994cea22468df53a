"""kitsune/timeline.py: what fits together stays so as JSON, and nothing else is taken."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from kitsune.launches.model.launch_graph import Launch, LaunchGraph, Span, Storage
from kitsune.launches.planning.memory_plan import in_use_bytes, plan_memory
from kitsune.launches.planning.schedule import on_streams
from kitsune.launches.planning.trace_export import timeline_of, trace_of
from kitsune.timeline import MAX_NAME, MAX_STREAMS, MAX_TOLD, Launched, Timeline
from tests.store.samples import a_timeline

WAIT_US = 1.5


@st.composite
def steps(draw: st.DrawFn) -> tuple[LaunchGraph, list[float]]:
    """A graph of launches that each write a storage and read some earlier ones, and what they cost."""
    count = draw(st.integers(1, 12))
    launches = [
        Launch(
            name=draw(st.text(min_size=1, max_size=300)),
            reads=tuple(Span(other, 0, 8) for other in draw(st.sets(st.integers(0, at - 1), max_size=3))) if at else (),
            writes=(Span(at, 0, 8),),
        )
        for at in range(count)
    ]
    costs_us = draw(st.lists(st.floats(0, 1e6), min_size=count, max_size=count))
    storages = [Storage(nbytes=draw(st.integers(8, 2**40)), is_own=True, is_kept=False) for _ in range(count)]
    return LaunchGraph.of(launches, storages), costs_us


@given(steps(), st.integers(1, 4), st.none() | st.integers(1, 12))
def test_what_was_planned_is_told_and_survives_as_json(step, streams, at_most):
    graph, costs_us = step
    schedule = on_streams(graph, costs_us, streams, WAIT_US)
    memory = plan_memory(graph, schedule)
    timeline = timeline_of(graph, schedule, memory, "told" * 2000, at_most)
    assert Timeline.model_validate_json(timeline.model_dump_json()) == timeline
    assert len(timeline.launches) + timeline.left_out == len(costs_us)
    assert len(timeline.launches) == min(len(costs_us), at_most or len(costs_us))
    assert timeline.streams == schedule.streams
    assert len(timeline.told) == MAX_TOLD
    json.dumps(trace_of(timeline), allow_nan=False)
    if not timeline.left_out:
        assert timeline.makespan_us == pytest.approx(schedule.makespan_us, abs=1e-3)
        used = in_use_bytes(graph, schedule, memory.releases, graph.touchers())
        assert [launch.used_bytes for launch in timeline.launches] == list(map(sum, used))
        names = [graph.launches[placed.launch].name[:MAX_NAME] for placed in schedule.placed]
        assert [timeline.name_of(launch) for launch in timeline.launches] == names
        waits = [tuple(schedule.placed[other].launch for other in launch.waits) for launch in timeline.launches]
        assert waits == [placed.waits for placed in schedule.placed]


@given(steps(), st.integers(1, 11))
def test_of_too_many_launches_the_longest_are_kept(step, at_most):
    graph, costs_us = step
    schedule = on_streams(graph, costs_us, 3, WAIT_US)
    timeline = timeline_of(graph, schedule, plan_memory(graph, schedule), at_most=at_most)
    took_us = sorted((placed.end_us - placed.begin_us for placed in schedule.placed), reverse=True)
    kept_us = sorted((launch.end_us - launch.begin_us for launch in timeline.launches), reverse=True)
    assert kept_us == pytest.approx(took_us[:at_most], abs=2e-3)
    for stream in range(3):
        begins_us = [launch.begin_us for launch in timeline.launches if launch.stream == stream]
        assert begins_us == sorted(begins_us)


GOOD = {"told": "", "streams": 2, "names": ["a"], "launches": [[0, 0, 0.0, 1.0, [], 5], [0, 1, 1.0, 2.0, [0], 5]]}


def with_launch(*launch: object) -> str:
    return json.dumps({**GOOD, "launches": [GOOD["launches"][0], list(launch)]})


@pytest.mark.parametrize(
    "text",
    [
        with_launch(1, 0, 0.0, 1.0, [], 5),  # no such name
        with_launch(0, 2, 0.0, 1.0, [], 5),  # no such stream
        with_launch(-1, 0, 0.0, 1.0, [], 5),
        with_launch(0, -1, 0.0, 1.0, [], 5),
        with_launch(0, 0, 2.0, 1.0, [], 5),  # ends before it begins
        with_launch(0, 0, -1.0, 1.0, [], 5),
        with_launch(0, 0, float("nan"), 1.0, [], 5),
        with_launch(0, 0, 0.0, float("inf"), [], 5),
        with_launch(0, 0, 0.0, 1e13, [], 5),
        with_launch(0, 0, 0.0, 1.0, [1], 5),  # waits for itself
        with_launch(0, 0, 0.0, 1.0, [7], 5),
        with_launch(0, 0, 0.0, 1.0, [-1], 5),
        with_launch(0, 0, 0.0, 1.0, [0] * (MAX_STREAMS + 1), 5),
        with_launch(0, 0, 0.0, 1.0, [], -5),
        with_launch(0, 0, 0.0, 1.0, [], 2**63),
        with_launch(0, 0, 0.0, 1.0, []),
        with_launch(0, 0, 0.0, 1.0, [], 5, 6),
        json.dumps({**GOOD, "streams": 0}),
        json.dumps({**GOOD, "streams": MAX_STREAMS + 1}),
        json.dumps({**GOOD, "names": ["a" * (MAX_NAME + 1)]}),
        json.dumps({**GOOD, "told": "a" * (MAX_TOLD + 1)}),
        json.dumps({**GOOD, "left_out": -1}),
        json.dumps({**GOOD, "code": "x"}),
        "[" * 100_000,
        "null",
    ],
)
def test_what_does_not_fit_together_is_refused(text):
    with pytest.raises(ValidationError):
        Timeline.model_validate_json(text)


def test_what_is_good_is_taken():
    timeline = Timeline.model_validate_json(json.dumps(GOOD))
    assert timeline.launches[1] == Launched(0, 1, 1.0, 2.0, (0,), 5)
    assert timeline.makespan_us == 2.0
    assert Timeline(streams=1, names=(), launches=()).makespan_us == 0.0


def test_a_trace_tells_the_plan_and_what_was_left_out():
    trace = trace_of(a_timeline(left_out=7))
    assert trace["otherData"]["plan"].startswith("12 launches on 2 streams")
    assert trace["otherData"]["launches left out, the shortest ones"] == 7
    curve = [event["args"]["bytes"] for event in trace["traceEvents"] if event["ph"] == "C"]
    assert curve == [launch.used_bytes for launch in a_timeline().launches]
