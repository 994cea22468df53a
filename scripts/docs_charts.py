"""Draws results as horizontal bars: SVG, with the same figures as text. Pure.

Colours are those of the page: `currentColor`, and the theme's colour of links for what is Kitsune's.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Final

from benchmarks.table import medians_of

#: Case -> its lines: "arm", and "step_ms" with one number a block.
Cases = Mapping[str, Sequence[Mapping[str, Any]]]

COMPILE_MODES: Final = {
    "compile": "torch.compile",
    "reduce_overhead": "torch.compile, reduce-overhead",
    "max_autotune": "torch.compile, max-autotune",
}
OTHER_ARMS: Final = {"graph": "graph by hand", "kitsune_dropin": "drop-in", "kitsune": "TrainStep"}
ENGINE_ARMS: Final = {"graph": "one CUDA graph", "k1": "1 stream", "k4": "up to 4 streams", "k8": "up to 8 streams"}

THEIRS: Final = "currentColor"
OURS: Final = "var(--md-typeset-a-color, currentColor)"
#: Arm -> colour and opacity. Every bar has its name beside it: nobody needs the colours.
PAINTS: Final = {
    **dict.fromkeys(COMPILE_MODES, (THEIRS, 0.35)),
    "graph": (THEIRS, 0.6),
    "k1": (THEIRS, 0.35),
    "kitsune_dropin": (OURS, 0.6),
    "k4": (OURS, 0.6),
    "kitsune": (OURS, 1.0),
    "k8": (OURS, 1.0),
}

WIDTH: Final = 720
LEFT: Final = 300  # where bars begin: names stand left of it
RIGHT: Final = 610  # where the longest bar ends: figures stand in a column right of it
BAR: Final = 12
PITCH: Final = 16
HEAD: Final = 22
GAP: Final = 10


@dataclass(frozen=True, slots=True)
class Bar:
    """`share`: the length, as a share of the unit. `took_ms`: the median that it stands for."""

    arm: str
    name: str
    share: float
    took_ms: float


@dataclass(frozen=True, slots=True)
class Group:
    """The bars of one case, from top to bottom."""

    case: str
    bars: tuple[Bar, ...]


@dataclass(frozen=True, slots=True)
class Chart:
    """`unit` says what the length 1 is."""

    title: str
    unit: str
    groups: tuple[Group, ...]


def training_chart(cases: Cases) -> Chart:
    """Against the best mode of torch.compile; a case without any mode is left out, an arm without samples too."""
    groups = (training_group(case, medians_of(lines)) for case, lines in cases.items())
    return Chart(
        "Time of a training step: the best mode of torch.compile is 1, shorter is faster",
        "the best mode of torch.compile",
        ranked(groups, "kitsune"),
    )


def training_group(case: str, medians: Mapping[str, float]) -> Group:
    modes = [arm for arm in COMPILE_MODES if arm in medians]
    if not modes:
        return Group(case, ())
    best = min(modes, key=lambda arm: medians[arm])
    return group_of(case, medians, {best: COMPILE_MODES[best], **OTHER_ARMS}, unit_ms=medians[best])


def engine_chart(cases: Cases) -> Chart:
    """Against one plain CUDA graph; a case without it is left out, an arm without samples too."""
    medians = {case: medians_of(lines) for case, lines in cases.items()}
    groups = (group_of(case, each, ENGINE_ARMS, each["graph"]) for case, each in medians.items() if "graph" in each)
    return Chart(
        "Time of the same kernels on several streams: one plain CUDA graph is 1, shorter is faster",
        "one plain CUDA graph",
        ranked(groups, "k4"),
    )


def group_of(case: str, medians: Mapping[str, float], names: Mapping[str, str], unit_ms: float) -> Group:
    found = {arm: name for arm, name in names.items() if arm in medians}
    return Group(case, tuple(Bar(arm, name, medians[arm] / unit_ms, medians[arm]) for arm, name in found.items()))


def ranked(groups: Iterable[Group], arm: str) -> tuple[Group, ...]:
    """Those with bars, the one in which this arm gains most first; without the arm last, by name."""

    def rank(group: Group) -> tuple[float, str]:
        return min((bar.share for bar in group.bars if bar.arm == arm), default=float("inf")), group.case

    return tuple(sorted((group for group in groups if group.bars), key=rank))


def svg(chart: Chart) -> str:
    """One <svg> on one line, which Markdown leaves alone. Raises ValueError where there is nothing to show."""
    if not chart.groups:
        raise ValueError(f"no results to draw: {chart.title}")
    name = re.sub(r"\W+", "-", chart.unit.lower())
    unit_px = (RIGHT - LEFT) / max(1.0, *(bar.share for group in chart.groups for bar in group.bars))
    parts, top = [], HEAD
    for group in chart.groups:
        parts.append(text(0, top + BAR - 2, group.case, 'font-weight="700"'))
        for bar in group.bars:
            parts += drawn(bar, top, unit_px)
            top += PITCH
        top += GAP
    height, one = top, LEFT + unit_px
    parts.append(
        f'<line x1="{one:.2f}" x2="{one:.2f}" y1="{HEAD - 4}" y2="{height - GAP}" stroke="currentColor" '
        'stroke-opacity="0.6" stroke-dasharray="3 3"/>'
    )
    parts.append(text(one, HEAD - 8, "1", 'text-anchor="middle"'))
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-labelledby="{name}-title {name}-text" '
        f'fill="currentColor" font-size="12" style="display:block;width:100%;min-width:{WIDTH - 120}px">'
        f'<title id="{name}-title">{escape(chart.title)}</title><desc id="{name}-text">{escape(in_words(chart))}</desc>'
        f"{''.join(parts)}</svg>"
    )


def drawn(bar: Bar, top: float, unit_px: float) -> list[str]:
    """The name, the bar and the figure of one arm."""
    colour, opacity = PAINTS[bar.arm]
    length = bar.share * unit_px
    return [
        text(LEFT - 8, top + BAR - 2, bar.name, 'text-anchor="end"'),
        f'<rect x="{LEFT}" y="{top}" width="{length:.2f}" height="{BAR}" fill="{colour}" fill-opacity="{opacity}"/>',
        text(RIGHT + 8, top + BAR - 2, f"{bar.share:.2f} ({bar.took_ms:.3g} ms)"),
    ]


def text(x: float, y: float, words: str, attributes: str = "") -> str:
    return f'<text x="{x:.2f}" y="{y:.2f}"{" " * bool(attributes)}{attributes}>{escape(words)}</text>'


def in_words(chart: Chart) -> str:
    """What the chart shows, for those who do not see it."""
    cases = (f"{group.case}: {', '.join(map(bar_in_words, group.bars))}" for group in chart.groups)
    return f"Shares of the time of {chart.unit}, and milliseconds. {'; '.join(cases)}."


def bar_in_words(bar: Bar) -> str:
    return f"{bar.name} {bar.share:.2f} ({bar.took_ms:.3g} ms)"


def figure(chart: Chart) -> str:
    """The chart as a block of a page. What is too wide for a small screen is scrolled sideways."""
    return (
        '<figure style="margin:1em 0;overflow-x:auto" tabindex="0" data-search-exclude>'
        f'{svg(chart)}<figcaption style="max-width:none">{escape(chart.title)}.</figcaption></figure>'
    )
