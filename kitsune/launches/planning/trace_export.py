"""Exports a planned step as a timeline, a Perfetto trace, or an SVG. Times are predicted. Pure functions.

Format of the trace: "Trace Event Format" (Google, 2016), JSON object form; ts and dur in us.
"""

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any, Final

from kitsune.launches.model.launch_graph import LaunchGraph
from kitsune.launches.planning.memory_plan import MemoryPlan, in_use_bytes
from kitsune.launches.planning.schedule import Placed, Schedule
from kitsune.timeline import MAX_NAME, MAX_TOLD, Launched, Timeline

PROCESS: Final = 0
DIGITS: Final = 3  # decimals of a microsecond
WIDTH, LANE, GAP, MARGIN = 1200.0, 26.0, 6.0, 64.0
COLOURS: Final = ("#4e79a7", "#59a14f", "#f28e2b", "#b07aa1", "#76b7b2", "#edc948", "#e15759", "#9c755f")


def timeline_of(
    graph: LaunchGraph, schedule: Schedule, memory: MemoryPlan, told: str = "", at_most: int | None = None
) -> Timeline:
    """The timeline of a plan. With `at_most`, only that many of the longest launches, and only waits among these."""
    used = in_use_bytes(graph, schedule, memory.releases, graph.touchers())
    kept = longest(schedule, at_most)
    places = {schedule.placed[position].launch: place for place, position in enumerate(kept)}
    names: dict[str, int] = {}
    return Timeline(
        told=told[:MAX_TOLD],
        streams=schedule.streams,
        launches=tuple(
            Launched(
                name=names.setdefault(graph.launches[placed.launch].name[:MAX_NAME], len(names)),
                stream=placed.stream,
                begin_us=round(placed.begin_us, DIGITS),
                end_us=round(placed.end_us, DIGITS),
                waits=tuple(places[other] for other in placed.waits if other in places),
                used_bytes=sum(used[position]),
            )
            for position in kept
            for placed in [schedule.placed[position]]
        ),
        names=tuple(names),
        left_out=len(schedule.placed) - len(kept),
    )


def longest(schedule: Schedule, at_most: int | None) -> list[int]:
    """The issue positions of the `at_most` longest launches, in issue order; all of them if it is None."""
    positions = range(len(schedule.placed))
    if at_most is None or len(positions) <= at_most:
        return list(positions)
    took_us = [placed.end_us - placed.begin_us for placed in schedule.placed]
    return sorted(sorted(positions, key=lambda position: -took_us[position])[:at_most])


def touched_of(graph: LaunchGraph, schedule: Schedule) -> list[dict[str, list[int]]]:
    """For every launch in issue order, the storages that it reads and those that it writes."""
    issued = [graph.launches[placed.launch] for placed in schedule.placed]
    spans = [{"reads": launch.reads, "writes": launch.writes} for launch in issued]
    return [{what: sorted({span.storage for span in found}) for what, found in each.items()} for each in spans]


def trace_of(timeline: Timeline, touched: Sequence[Mapping[str, list[int]]] = ()) -> dict[str, Any]:
    """A track for each stream with its launches, an arrow for each wait, and a counter of the bytes in use.

    `touched`, if given, is shown with each launch.
    """
    events = [*tracks(timeline), *launches(timeline, touched), *arrows(timeline), *curve(timeline)]
    said = {"plan": timeline.told, "launches left out, the shortest ones": timeline.left_out}
    return {"displayTimeUnit": "ns", "traceEvents": events, "otherData": said}


def tracks(timeline: Timeline) -> Iterator[dict[str, Any]]:
    for stream in range(timeline.streams):
        named = {"name": "thread_name", "ph": "M", "pid": PROCESS, "tid": stream}
        yield {**named, "args": {"name": f"stream {stream}"}}


def launches(timeline: Timeline, touched: Sequence[Mapping[str, list[int]]]) -> Iterator[dict[str, Any]]:
    told = touched or [{}] * len(timeline.launches)
    for place, (launch, storages) in enumerate(zip(timeline.launches, told, strict=True)):
        yield {
            "name": timeline.name_of(launch),
            "ph": "X",
            "pid": PROCESS,
            "tid": launch.stream,
            "ts": launch.begin_us,
            "dur": round(launch.end_us - launch.begin_us, DIGITS),
            "args": {"launch": place, "waits for": list(launch.waits), **storages},
        }


def arrows(timeline: Timeline) -> Iterator[dict[str, Any]]:
    """Arrows from the end of an awaited launch to the begin of the one that waits."""
    pairs = [(timeline.launches[other], launch) for launch in timeline.launches for other in launch.waits]
    for number, (first, second) in enumerate(pairs):
        flow = {"name": "wait", "cat": "wait", "id": number, "pid": PROCESS}
        yield {**flow, "ph": "s", "tid": first.stream, "ts": first.end_us}
        yield {**flow, "ph": "f", "bp": "e", "tid": second.stream, "ts": second.begin_us}


def curve(timeline: Timeline) -> Iterator[dict[str, Any]]:
    """Bytes of the step's own storages that are allocated when each launch is issued."""
    for launch in timeline.launches:
        told = {"bytes": launch.used_bytes}
        yield {"name": "bytes in use", "ph": "C", "pid": PROCESS, "ts": launch.begin_us, "args": told}


def svg_of(graph: LaunchGraph, schedule: Schedule) -> str:
    """An SVG with a row for each stream and a box for each launch. Its width is the time; its tooltip has the name."""
    height = MARGIN + schedule.streams * (LANE + GAP)
    scale = (WIDTH - MARGIN) / (schedule.makespan_us or 1.0)
    told = (
        f"{len(schedule.placed)} launches on {len(schedule.used)} streams, {schedule.makespan_us:.1f} us as predicted"
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH:g} {height:g}" font-family="sans-serif">',
            f'<text x="{MARGIN:g}" y="20" font-size="13">{told}</text>',
            *lanes(schedule),
            *(box(graph.launches[placed.launch].name, placed, scale) for placed in schedule.placed),
            "</svg>",
        ]
    )


def lanes(schedule: Schedule) -> Iterator[str]:
    for stream in range(schedule.streams):
        yield f'<text x="4" y="{top(stream) + LANE / 2 + 4:g}" font-size="11">stream {stream}</text>'


def box(name: str, placed: Placed, scale: float) -> str:
    left, width = MARGIN + placed.begin_us * scale, max(0.5, (placed.end_us - placed.begin_us) * scale)
    told = escape(f"{name}: {placed.begin_us:.1f} to {placed.end_us:.1f} us")
    colour = COLOURS[sum(map(ord, name)) % len(COLOURS)]
    place = f'x="{left:.2f}" y="{top(placed.stream):g}" width="{width:.2f}" height="{LANE:g}"'
    return f'<rect {place} fill="{colour}"><title>{told}</title></rect>'


def top(stream: int) -> float:
    return MARGIN / 2 + stream * (LANE + GAP)


def idle_shares(schedule: Schedule) -> Sequence[float]:
    """For every stream, the share of the makespan in which nothing runs on it."""
    busy = [0.0] * schedule.streams
    for placed in schedule.placed:
        busy[placed.stream] += placed.end_us - placed.begin_us
    return [1.0 - used / schedule.makespan_us if schedule.makespan_us else 0.0 for used in busy]
