"""The chart of the launches of a step: a lane for each stream, so that overlap and waits are visible."""

import string
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from markupsafe import Markup

from kitsune.errors import ChartError
from server.charts.drawing import axes, words
from server.charts.drawing.axes import Scale, finite, span
from server.charts.drawing.layout import Entry, drawing
from server.charts.drawing.svg import WIDE_PX, empty, mark, rect, responsive, text, width_px

TITLE: Final = "Launches of a step, stream by stream"
LANE_PX: Final = 26.0
GAP_PX: Final = 6.0
TOP_PX: Final = 4.0
EDGE_PX: Final = 8.0
LANE_WORDS_PX: Final = 156.0
ABOVE_PX: Final = 18.0
VISIBLE_PX: Final = 1.0  # narrower boxes are merged with their neighbours
LETTER_PX: Final = 12.0
RIMMED_PX: Final = 4.0  # narrower boxes have no border: it would cover them
KINDS: Final = 6  # kernel names with their own colour and letter
NAMED_AT_MOST: Final = 5


@dataclass(frozen=True, slots=True)
class TimeSpan:
    """A launch on a stream."""

    stream: int
    start_us: float
    end_us: float
    name: str


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle: one launch, or several neighbours that are too narrow to be visible alone."""

    spans: tuple[TimeSpan, ...]

    @property
    def start_us(self) -> float:
        return self.spans[0].start_us

    @property
    def end_us(self) -> float:
        return max(span.end_us for span in self.spans)

    @property
    def tooltip(self) -> str:
        lasts = f"{words.microseconds(self.start_us)} to {words.microseconds(self.end_us)} µs"
        if len(self.spans) == 1:
            return f"{self.spans[0].name}, stream {self.spans[0].stream}: {lasts}"
        names = ", ".join(list(dict.fromkeys(span.name for span in self.spans))[:NAMED_AT_MOST])
        return (
            f"{words.count(len(self.spans), 'launch', 'launches')} on stream {self.spans[0].stream}: {lasts}; {names}"
        )


def timeline(spans: Sequence[TimeSpan]) -> Markup:
    """The chart. Raises ChartError for numbers out of range, and for a launch that ends before it begins."""
    if not spans:
        return empty(TITLE, "No launches of this step were recorded.")
    for each in spans:
        check(each)
    return responsive(partial(draw, by_stream(spans), key_of(spans)))


def check(each: TimeSpan) -> None:
    finite(each.start_us, f"the beginning of {each.name!r}")
    finite(each.end_us, f"the end of {each.name!r}")
    if each.end_us < each.start_us:
        raise ChartError(f"the launch {each.name!r}", f"ends at {each.end_us:g} µs, before it begins")


def by_stream(spans: Iterable[TimeSpan]) -> dict[int, list[TimeSpan]]:
    found: dict[int, list[TimeSpan]] = defaultdict(list)
    for each in sorted(spans, key=lambda span: (span.stream, span.start_us)):
        found[each.stream].append(each)
    return found


def key_of(spans: Iterable[TimeSpan]) -> dict[str, float]:
    """The names that take the most time, with their share of the total time of all launches."""
    took: dict[str, float] = defaultdict(float)
    for each in spans:
        took[each.name] += each.end_us - each.start_us
    whole = sum(took.values()) or 1.0
    return {name: took[name] / whole for name in sorted(took, key=lambda name: (-took[name], name))[:KINDS]}


def draw(lanes: Mapping[int, Sequence[TimeSpan]], key: Mapping[str, float], width: int) -> Markup:
    is_wide = width >= WIDE_PX
    ends = [end for spans in lanes.values() for each in spans for end in (each.start_us, each.end_us)]
    scale = Scale(*span(ends), *plot_ends(width))
    pitch = LANE_PX + GAP_PX + (0 if is_wide else ABOVE_PX)
    bottom = TOP_PX + pitch * len(lanes)
    tops = {stream: TOP_PX + pitch * row + (0 if is_wide else ABOVE_PX) for row, stream in enumerate(lanes)}
    boxes = {stream: boxes_of(spans, scale) for stream, spans in lanes.items()}
    note = merged_note(lanes, boxes)
    return drawing(
        TITLE,
        words.joined(description_of(lanes, key), note),
        width,
        bottom,
        axes.along_bottom(scale, 0, bottom, axes.ticks_along(scale), "µs", width),
        *(lane(stream, spans, tops[stream], scale, is_wide) for stream, spans in lanes.items()),
        *(draw_box(box, tops[stream], scale, key) for stream, found in boxes.items() for box in found),
        entries=entries(key, boxes),
        note=note,
    )


def plot_ends(width: int) -> tuple[float, float]:
    """Start and end of the time axis in px; the memory chart below uses the same."""
    return (LANE_WORDS_PX if width >= WIDE_PX else EDGE_PX), width - EDGE_PX


def boxes_of(spans: Sequence[TimeSpan], scale: Scale) -> list[Box]:
    """A box for each launch, or for neighbours that are merged."""
    found: list[list[TimeSpan]] = []
    for each in spans:
        if found and is_merged(found[-1][-1], each, scale):
            found[-1].append(each)
        else:
            found.append([each])
    return [Box(tuple(each)) for each in found]


def is_merged(one: TimeSpan, other: TimeSpan, scale: Scale) -> bool:
    """Whether two neighbours and the gap between them are too narrow to be visible."""
    parts = ((one.start_us, one.end_us), (one.end_us, other.start_us), (other.start_us, other.end_us))
    return all(scale.place(end) - scale.place(begin) < VISIBLE_PX for begin, end in parts)


def lane(stream: int, spans: Sequence[TimeSpan], top: float, scale: Scale, is_wide: bool) -> Markup:
    busy = words.percent(busy_us(spans) / (scale.high - scale.low))
    label, base = f"stream {stream}, {busy} busy", top + LANE_PX / 2 + 4 if is_wide else top - 5
    ground = rect(scale.start_px, top, scale.end_px - scale.start_px, LANE_PX, "lane")
    return mark(label, ground, text(0, base, label, room_px=LANE_WORDS_PX - EDGE_PX if is_wide else scale.end_px))


def busy_us(spans: Sequence[TimeSpan]) -> float:
    """The time in which anything runs; overlaps count once."""
    busy, reached = 0.0, spans[0].start_us
    for each in spans:
        busy += max(0.0, each.end_us - max(reached, each.start_us))
        reached = max(reached, each.end_us)
    return busy


def kind_of(box: Box, key: Mapping[str, float]) -> int | None:
    """The index of its name in the legend, if all launches of the box have that name."""
    names = {each.name for each in box.spans}
    return list(key).index(box.spans[0].name) if len(names) == 1 and names <= key.keys() else None


def draw_box(box: Box, top: float, scale: Scale, key: Mapping[str, float]) -> Markup:
    kind = kind_of(box, key)
    left = scale.place(box.start_us)
    width = max(scale.place(box.end_us) - left, VISIBLE_PX / 2)
    css = "other" if kind is None else f"series-{kind + 1}"
    ground = rect(left, top, width, LANE_PX, css if width >= RIMMED_PX else f"{css} rimless")
    return mark(box.tooltip, ground, *inside(box, kind, left + width / 2, top + LANE_PX / 2 + 4, width))


def inside(box: Box, kind: int | None, middle: float, base: float, room_px: float) -> Iterator[Markup]:
    """The name if it fits, else the letter of its kind if that fits."""
    name = box.spans[0].name if len(box.spans) == 1 else ""
    if name and width_px(name) + 4 <= room_px:
        yield text(middle, base, name, "inside", "middle")
    elif kind is not None and room_px >= LETTER_PX:
        yield text(middle, base, string.ascii_uppercase[kind], "inside", "middle")


def entries(key: Mapping[str, float], boxes: Mapping[int, Sequence[Box]]) -> Iterator[Entry]:
    for index, (name, share) in enumerate(key.items()):
        yield partial(symbol, index), f"{name}, {words.percent(share)}"
    if any(kind_of(box, key) is None for found in boxes.values() for box in found):
        yield lambda x, y: rect(x - 8, y - 8, 16, 16, "other"), "others, or several together"


def symbol(kind: int, x: float, y: float) -> Markup:
    letter = text(x, y + 4, string.ascii_uppercase[kind], "inside", "middle")
    return mark(string.ascii_uppercase[kind], rect(x - 8, y - 8, 16, 16, f"series-{kind + 1}"), letter)


def merged_note(lanes: Mapping[int, Sequence[TimeSpan]], boxes: Mapping[int, Sequence[Box]]) -> str:
    launches, drawn_as = sum(map(len, lanes.values())), sum(map(len, boxes.values()))
    if launches == drawn_as:
        return ""
    return f"{launches:,} launches in {drawn_as:,} boxes: neighbours too short to be seen are drawn as one."


def description_of(lanes: Mapping[int, Sequence[TimeSpan]], key: Mapping[str, float]) -> str:
    ends = [end for spans in lanes.values() for each in spans for end in (each.start_us, each.end_us)]
    whole = max(ends) - min(ends)
    by_lane = [
        f"stream {stream}: {words.count(len(spans), 'launch', 'launches')}, "
        f"busy for {words.microseconds(busy_us(spans))} of {words.microseconds(whole)} µs"
        for stream, spans in lanes.items()
    ]
    most = ", ".join(f"{name} {words.percent(share)}" for name, share in key.items())
    return f"{words.listed(by_lane)} Most of the time goes into {most}."
