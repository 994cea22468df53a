"""Draws the charts of pages from their views."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TypeVar

from markupsafe import Markup

from kitsune.errors import ChartError
from server.charts.in_use import in_use
from server.charts.pareto import pareto
from server.charts.samples import samples
from server.charts.search import search_history
from server.charts.timeline import timeline
from server.charts.waterfall import waterfall
from server.pages.views.run_view import RunView
from server.pages.views.timeline_view import TimelineView

T = TypeVar("T")


def charts_of(view: RunView) -> dict[str, Markup]:
    """The charts of the page of a run as SVG, under their names in the templates; empty where there is no data."""
    return {
        "waterfall": drawn(waterfall, view.bars),
        "search": drawn(search_history, view.tried),
        "pareto": drawn(pareto, view.points),
        "confirmation": drawn(samples, view.strips),
        "baseline": drawn(samples, view.same_strips),
        **timeline_charts(view.timeline),
    }


@lru_cache(maxsize=32)  # timelines never change, and drawing one of 800 launches takes 0.1 s
def timeline_charts(view: TimelineView | None) -> dict[str, Markup]:
    """The charts of a timeline, under their names in the templates."""
    return {
        "timeline": drawn(timeline, view.spans if view else ()),
        "in_use": drawn(in_use, view.used if view else ()),
    }


def drawn(draw: Callable[[Sequence[T]], Markup], data: Sequence[T]) -> Markup:
    """The chart, or a message if it cannot be drawn, so that the rest of the page is still shown."""
    try:
        return draw(data) if data else Markup("")
    except ChartError as error:
        return Markup('<p class="muted">This chart cannot be drawn: {}.</p>').format(str(error))
