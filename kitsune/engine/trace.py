"""A planned step in, a picture of it out: a trace that Perfetto opens, or an SVG. Times are predicted. Pure.

Format of the trace: "Trace Event Format" (Google, 2016), JSON object form; ts and dur in us.
"""

from collections.abc import Iterator, Sequence
from html import escape
from typing import Any, Final

from kitsune.engine.graph import LaunchGraph
from kitsune.engine.memory import MemoryPlan, rounded_bytes
from kitsune.engine.schedule import Placed, Schedule

PROCESS: Final = 0
WIDTH, LANE, GAP, MARGIN = 1200.0, 26.0, 6.0, 64.0
COLOURS: Final = ("#4e79a7", "#59a14f", "#f28e2b", "#b07aa1", "#76b7b2", "#edc948", "#e15759", "#9c755f")


def trace_of(graph: LaunchGraph, schedule: Schedule, memory: MemoryPlan) -> dict[str, Any]:
    """A track for each stream with its launches, an arrow for each wait, and a curve of the bytes in use."""
    events = [*tracks(schedule), *launches(graph, schedule), *arrows(schedule), *curve(graph, schedule, memory)]
    return {"displayTimeUnit": "ns", "traceEvents": events}


def tracks(schedule: Schedule) -> Iterator[dict[str, Any]]:
    for stream in range(schedule.streams):
        named = {"name": "thread_name", "ph": "M", "pid": PROCESS, "tid": stream}
        yield {**named, "args": {"name": f"stream {stream}"}}


def launches(graph: LaunchGraph, schedule: Schedule) -> Iterator[dict[str, Any]]:
    for placed in schedule.placed:
        launch = graph.launches[placed.launch]
        spans = {"reads": launch.reads, "writes": launch.writes}
        touched = {what: sorted({span.storage for span in found}) for what, found in spans.items()}
        yield {
            "name": launch.name,
            "ph": "X",
            "pid": PROCESS,
            "tid": placed.stream,
            "ts": placed.begin_us,
            "dur": placed.end_us - placed.begin_us,
            "args": {"launch": placed.launch, "waits for": list(placed.waits), **touched},
        }


def arrows(schedule: Schedule) -> Iterator[dict[str, Any]]:
    """From the end of an awaited launch to the beginning of the one that waits."""
    by_launch = {placed.launch: placed for placed in schedule.placed}
    pairs = [(by_launch[other], placed) for placed in schedule.placed for other in placed.waits]
    for number, (first, second) in enumerate(pairs):
        flow = {"name": "wait", "cat": "wait", "id": number, "pid": PROCESS}
        yield {**flow, "ph": "s", "tid": first.stream, "ts": first.end_us}
        yield {**flow, "ph": "f", "bp": "e", "tid": second.stream, "ts": second.begin_us}


def curve(graph: LaunchGraph, schedule: Schedule, memory: MemoryPlan) -> Iterator[dict[str, Any]]:
    """Bytes of the step's own storages, as the host gives and takes them."""
    for placed, used in zip(schedule.placed, in_use_bytes(graph, schedule, memory), strict=True):
        yield {"name": "bytes in use", "ph": "C", "pid": PROCESS, "ts": placed.begin_us, "args": {"bytes": used}}


def in_use_bytes(graph: LaunchGraph, schedule: Schedule, memory: MemoryPlan) -> list[int]:
    """At every issue position, with what that launch makes."""
    made: dict[int, int] = {}
    for storage, touchers in zip(graph.storages, graph.touchers(), strict=True):
        if storage.is_own and touchers:
            made[touchers[0]] = made.get(touchers[0], 0) + rounded_bytes(storage)
    used, found = 0, []
    for position, placed in enumerate(schedule.placed):
        used -= sum(rounded_bytes(graph.storages[number]) for number in memory.releases[position])
        used += made.get(placed.launch, 0)
        found.append(used)
    return found


def svg_of(graph: LaunchGraph, schedule: Schedule) -> str:
    """The streams as lanes, one box a launch, as wide as it is long; its name shows on pointing at it."""
    height = MARGIN + schedule.streams * (LANE + GAP)
    scale = (WIDTH - MARGIN) / (schedule.makespan_us or 1.0)
    told = f"{len(schedule.placed)} launches on {schedule.streams} streams, {schedule.makespan_us:.1f} us as predicted"
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
    """Of every stream, the share of the makespan in which nothing runs on it."""
    busy = [0.0] * schedule.streams
    for placed in schedule.placed:
        busy[placed.stream] += placed.end_us - placed.begin_us
    return [1.0 - used / schedule.makespan_us if schedule.makespan_us else 0.0 for used in busy]
