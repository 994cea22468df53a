"""The chart of a search: the speedup of each trial, and the best so far."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from markupsafe import Markup

from server.charts.drawing import axes, words
from server.charts.drawing.axes import check_finite, whole_ticks
from server.charts.drawing.layout import Entry, drawing
from server.charts.drawing.marks import SHAPES, Thinned, shape, thinned
from server.charts.drawing.svg import WIDE_PX, empty, line, mark, path, responsive, steps
from server.charts.speedups import ground, interval_entries, plot_of, whisker

TITLE: Final = "Speedup over the baseline, trial by trial"
FAILURES_PX: Final = 22.0  # height of the strip for failed trials, below the plot
CROSS_PX: Final = 14.0  # width for one cross with a margin; closer ones overlap
NO_NUMBER: Final = "no measurement"


@dataclass(frozen=True, slots=True)
class TrialPoint:
    """A trial; a failed one has no speedup. `source`: what proposed it."""

    number: int
    speedup: float | None
    low: float | None
    high: float | None
    source: str
    label: str
    failure: str = ""


@dataclass(frozen=True, slots=True)
class SearchHistory:
    """All trials by number, those with a speedup, and the shape and colour of each source."""

    every: tuple[TrialPoint, ...]
    measured: tuple[tuple[TrialPoint, float], ...]
    looks: dict[str, tuple[str, str]]


def search_history(tried: Sequence[TrialPoint]) -> Markup:
    """The chart. Raises ChartError for numbers out of range."""
    if not tried:
        return empty(TITLE, "No trial has ended yet.")
    for trial in tried:
        check_finite((trial.number, trial.speedup, trial.low, trial.high), f"trial {trial.number}")
    return responsive(partial(draw, history_of(tried)))


def history_of(tried: Sequence[TrialPoint]) -> SearchHistory:
    every = tuple(sorted(tried, key=lambda trial: trial.number))
    measured = tuple((trial, trial.speedup) for trial in every if trial.speedup is not None)
    sources = dict.fromkeys(trial.source for trial, _ in measured)
    looks = {source: look(index) for index, source in enumerate(sources)}
    return SearchHistory(every, measured, looks)


def look(index: int) -> tuple[str, str]:
    """A shape and a colour; after the last shape, they repeat as outlines."""
    kind = "series" if index < len(SHAPES) else "outline"
    return SHAPES[index % len(SHAPES)], f"{kind}-{index % len(SHAPES) + 1}"


def best_so_far(history: SearchHistory) -> list[TrialPoint]:
    """The trials that were better than all earlier ones."""
    found: list[TrialPoint] = []
    best = -math.inf
    for trial, speedup in history.measured:
        if speedup > best:
            found.append(trial)
            best = speedup
    return found


def draw(history: SearchHistory, width: int) -> Markup:
    ends = [end for trial, speedup in history.measured for end in (speedup, trial.low, trial.high)]
    plot = plot_of((trial.number for trial in history.every), ends, width, 260.0 if width >= WIDE_PX else 200.0)
    places = [plot.place(trial.number, speedup) for trial, speedup in history.measured]
    best = best_so_far(history)
    better = {id(trial) for trial in best}
    few = thinned(places, kept=[index for index, (trial, _) in enumerate(history.measured) if id(trial) in better])
    failed = [trial for trial in history.every if trial.speedup is None]
    few_failed = thinned([(plot.x.place(trial.number), 0.0) for trial in failed], at_most=int(width / CROSS_PX))
    bottom = plot.y.start_px + FAILURES_PX * bool(failed)
    first, last = history.every[0].number, history.every[-1].number
    ticks = axes.named(whole_ticks(first, last, axes.count_along(plot.x)))
    stairs = list(steps(plot.place(trial.number, trial.speedup or 0.0) for trial in best))
    return drawing(
        TITLE,
        description_of(history, best, few),
        width,
        bottom,
        ground(plot, ticks, ("trial", "speedup over the baseline"), bottom, width),
        *(whisker(history.measured[index][0], places[index][0], plot) for index in few.drawn),
        path([*stairs, (plot.x.end_px, stairs[-1][1])], "best") if stairs else "",
        *(draw_trial(history, index, places[index]) for index in few.drawn),
        *(draw_failure(failed[index], plot.x.place(failed[index].number), bottom) for index in few_failed.drawn),
        entries=entries(history, bool(failed)),
        note=words.joined(few.note("measured trials"), few_failed.note("failed trials")),
    )


def draw_trial(history: SearchHistory, index: int, place: tuple[float, float]) -> Markup:
    trial, _ = history.measured[index]
    return mark(tooltip_of(trial), shape(history.looks[trial.source][0], *place, history.looks[trial.source][1]))


def draw_failure(trial: TrialPoint, x: float, bottom: float) -> Markup:
    return mark(tooltip_of(trial), shape("cross", x, bottom - FAILURES_PX / 2, "failed", 5.5))


def tooltip_of(trial: TrialPoint) -> str:
    """The trial in words: number, source, configuration and result."""
    begin = f"trial {trial.number} ({trial.source}), {trial.label}"
    if trial.speedup is None:
        return f"{begin}: {trial.failure or NO_NUMBER}"
    return f"{begin}: {words.gain(trial.speedup)}{words.interval(trial.low, trial.high, words.gain)}"


def entries(history: SearchHistory, has_failed: bool) -> Iterator[Entry]:
    for source, (name, css) in history.looks.items():
        yield partial(shape, name, css=css), source
    if has_failed:
        yield partial(shape, "cross", css="failed"), "failed"
    if history.measured:
        yield lambda x, y: line(x - 8, y, x + 8, y, "best"), "best so far"
    yield from interval_entries((trial for trial, _ in history.measured), "the baseline")


def description_of(history: SearchHistory, best: Sequence[TrialPoint], few: Thinned) -> str:
    failed = len(history.every) - len(history.measured)
    head = f"{words.count(len(history.every), 'trial')}, {failed:,} of them failed."
    if best:
        head += f" The best is trial {best[-1].number} with {words.gain(best[-1].speedup or 0.0)}."
    return words.joined(head, words.listed([tooltip_of(trial) for trial in history.every]), few.note("measured trials"))
