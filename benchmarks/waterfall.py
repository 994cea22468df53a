"""Result files of suite breakdown in, a waterfall as SVG out: a bar for each arm, from the baseline down.

    python -m benchmarks.waterfall --out docs/assets/breakdown.svg

A case counts with the newest file that has it. The picture is made to be shown by <img>: it follows the reader's choice
of a light or a dark page by itself. The same lines give the same bytes.
"""

import argparse
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from benchmarks.results_file import RESULTS
from benchmarks.table import newest_cases

BASELINE = "baseline"
WIDTH, LEFT, RIGHT = 720, 110, 520  # bars lie between LEFT and RIGHT, names and figures beside them
HEAD, PITCH, BAR, GAP = 34, 24, 16, 14
ATTRIBUTES = 'role="img" font-family="sans-serif" font-size="12" fill="currentColor"'
STYLE = ":root{color:#1f2328}@media (prefers-color-scheme:dark){:root{color:#e6edf3}}"
#: What a step takes, and what the last optimisation saved or cost.
TAKEN, SAVED, COST = '"currentColor" fill-opacity="0.75"', '"currentColor" fill-opacity="0.15"', '"#d1242f"'


@dataclass(frozen=True, slots=True)
class Bar:
    """What a step takes, and what it took with one optimisation less."""

    arm: str
    took_ms: float
    before_ms: float
    factor: float
    is_declined: bool

    @property
    def label(self) -> str:
        told = f"{self.took_ms:.3g} ms"
        if self.arm != BASELINE:
            told += f", {self.factor:.2f}x"
        return told + (", declined in part" if self.is_declined else "")


def bars_of(lines: Iterable[Mapping[str, Any]]) -> list[Bar]:
    """In the order in which the arms were measured; without a baseline none, of an arm without samples nothing."""
    found = [line for line in lines if line["step_ms"]]
    medians = [statistics.median(line["step_ms"]) for line in found]
    if not found or found[0]["arm"] != BASELINE:
        return []
    befores = [medians[0], *medians[:-1]]
    return [
        Bar(line["arm"], took_ms, before_ms, medians[0] / took_ms, "declined  " in line["notes"])
        for line, took_ms, before_ms in zip(found, medians, befores, strict=True)
    ]


def svg_of(cases: Mapping[str, Sequence[Bar]]) -> str:
    """One below the other. Raises ValueError when none of them has bars."""
    shown = {case: bars for case, bars in cases.items() if bars}
    if not shown:
        raise ValueError("no breakdown has a baseline; run python -m benchmarks.breakdown --case resnet18/128 first")
    heights = [HEAD + PITCH * len(bars) + GAP for bars in shown.values()]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {sum(heights)}" {ATTRIBUTES}>',
            f"<style>{STYLE}</style>",
            f"<title>{escape(in_words(shown))}</title>",
            *(
                element
                for number, (case, bars) in enumerate(shown.items())
                for element in panel(case, bars, sum(heights[:number]))
            ),
            "</svg>\n",
        ]
    )


def in_words(cases: Mapping[str, Sequence[Bar]]) -> str:
    return ". ".join(f"{case}: {'; '.join(f'{bar.arm} {bar.label}' for bar in bars)}" for case, bars in cases.items())


def panel(case: str, bars: Sequence[Bar], top: float) -> Iterator[str]:
    """A case, on a scale of its own."""
    per_ms = (RIGHT - LEFT) / max(bar.took_ms for bar in bars)
    yield f'<text x="0" y="{top + 18:g}" font-size="14" font-weight="700">{escape(case)}</text>'
    for number, bar in enumerate(bars):
        yield from drawn(bar, top + HEAD + number * PITCH, per_ms)


def drawn(bar: Bar, top: float, per_ms: float) -> Iterator[str]:
    """The name; in full what a step took before and takes now, the rest as saved or as a cost; the figures."""
    took, before = bar.took_ms * per_ms, bar.before_ms * per_ms
    base = top + BAR - 4
    yield f'<text x="0" y="{base:g}">{escape(bar.arm)}</text>'
    yield rect(LEFT, top, min(took, before), TAKEN)
    if took != before:
        yield rect(LEFT + min(took, before), top, abs(took - before), SAVED if took < before else COST)
    yield f'<text x="{LEFT + max(took, before) + 6:.2f}" y="{base:g}">{escape(bar.label)}</text>'


def rect(left: float, top: float, width: float, fill: str) -> str:
    return f'<rect x="{left:.2f}" y="{top:g}" width="{width:.2f}" height="{BAR}" fill={fill}/>'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS / "breakdown", help="folder of the result files")
    parser.add_argument("--case", help="this case alone; otherwise all of them, one below the other")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    cases = {case: bars_of(lines) for case, lines in newest_cases(arguments.results).items()}
    wanted = {case: bars for case, bars in sorted(cases.items()) if arguments.case in (None, case)}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(svg_of(wanted), encoding="utf-8")


if __name__ == "__main__":
    main()
