"""The view of a timeline: data for its charts, a summary, and a table of launches."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Final

from kitsune.timeline import Launched, Timeline
from server.charts.drawing import words
from server.charts.drawing.words import microseconds
from server.charts.in_use import Used
from server.charts.timeline import TimeSpan

TOP: Final = 10


@dataclass(frozen=True, slots=True)
class LaunchRow:
    """All launches of one name."""

    name: str
    count: int
    total: str
    share: str
    longest: str
    streams: str


@dataclass(frozen=True, slots=True)
class TimelineView:
    """Data of the charts, a summary in words, and a table. `more`: number of names that are not in `rows`."""

    told: str
    left_out: str
    spans: tuple[TimeSpan, ...]
    used: tuple[Used, ...]
    rows: tuple[LaunchRow, ...]
    more: int


@lru_cache(maxsize=32)
def timeline_view(timeline: Timeline) -> TimelineView | None:
    """None if there are no launches."""
    if not timeline.launches:
        return None
    rows = tuple(launch_rows(timeline))
    return TimelineView(
        told=timeline.told,
        left_out=left_out(timeline),
        spans=tuple(spans(timeline)),
        used=tuple(used(timeline)),
        rows=rows[:TOP],
        more=max(0, len(rows) - TOP),
    )


def left_out(timeline: Timeline) -> str:
    if not timeline.left_out:
        return ""
    whole = len(timeline.launches) + timeline.left_out
    return f"Of {whole:,} launches the {timeline.left_out:,} shortest were not kept, nor what waited for them."


def spans(timeline: Timeline) -> Iterator[TimeSpan]:
    for launch in timeline.launches:
        yield TimeSpan(launch.stream, launch.begin_us, launch.end_us, timeline.name_of(launch))


def used(timeline: Timeline) -> Iterator[Used]:
    """The memory in use at each launch, in the order in which the host issues them; times never decrease."""
    at_us = accumulate((launch.begin_us for launch in timeline.launches), max)
    for launch, moment in zip(timeline.launches, at_us, strict=True):
        yield Used(moment, launch.used_bytes)
    yield Used(timeline.makespan_us, timeline.launches[-1].used_bytes)


def launch_rows(timeline: Timeline) -> Iterator[LaunchRow]:
    """Rows by name, the largest total time first."""
    alike: defaultdict[str, list[Launched]] = defaultdict(list)
    for launch in timeline.launches:
        alike[timeline.name_of(launch)].append(launch)
    total_us = {name: sum(map(took_us, launches)) for name, launches in alike.items()}
    all_us = sum(total_us.values()) or 1.0
    for name, launches in sorted(alike.items(), key=lambda item: (-total_us[item[0]], item[0])):
        yield LaunchRow(
            name=name,
            count=len(launches),
            total=microseconds(total_us[name]),
            share=words.percent(total_us[name] / all_us),
            longest=microseconds(max(map(took_us, launches))),
            streams=", ".join(map(str, sorted({launch.stream for launch in launches}))),
        )


def took_us(launch: Launched) -> float:
    return launch.end_us - launch.begin_us
