"""The page of a run in; its charts, drawn, out."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from markupsafe import Markup

from kitsune.errors import ChartError
from server.charts.pareto import pareto
from server.charts.samples import samples
from server.charts.search import search_history
from server.charts.waterfall import waterfall
from server.pages.run_view import RunView

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Charts:
    """SVG; empty where there is nothing to draw."""

    waterfall: Markup
    search: Markup
    pareto: Markup
    confirmation: Markup
    baseline: Markup


def charts_of(view: RunView) -> Charts:
    return Charts(
        waterfall=drawn(waterfall, view.bars),
        search=drawn(search_history, view.tried),
        pareto=drawn(pareto, view.points),
        confirmation=drawn(samples, view.strips),
        baseline=drawn(samples, view.same_strips),
    )


def drawn(draw: Callable[[Sequence[T]], Markup], data: Sequence[T]) -> Markup:
    """A chart that cannot be drawn must not hide the rest of its page."""
    try:
        return draw(data) if data else Markup("")
    except ChartError as error:
        return Markup('<p class="muted">This chart cannot be drawn: {}.</p>').format(str(error))
