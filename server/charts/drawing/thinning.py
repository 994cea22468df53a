"""Reduces the number of marks in a chart: of marks that overlap one is drawn, and the chart says so."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

AT_MOST: Final = 600  # marks; a drawing of them is about 100 KB
FIRST_CELL_PX: Final = 2.0
COARSER: Final = 1.25


@dataclass(frozen=True, slots=True)
class Thinned:
    """The indices to draw, sorted; each of the others lies within `within_px` of one of them."""

    drawn: tuple[int, ...]
    left_out: int
    within_px: int

    def note(self, many: str) -> str:
        """A note for the reader; "" if all are drawn."""
        if not self.left_out:
            return ""
        whole = len(self.drawn) + self.left_out
        return (
            f"Drawn are {len(self.drawn):,} of {whole:,} {many}: "
            f"each of the others lies within {self.within_px} px of one that is drawn."
        )


def thinned(places: Sequence[tuple[float, float]], kept: Collection[int] = (), at_most: int = AT_MOST) -> Thinned:
    """One point of each grid cell, with the finest grid that leaves at most `at_most`; `kept` are always drawn."""
    if len(places) <= at_most:
        return Thinned(tuple(range(len(places))), 0, 0)
    cell_px = FIRST_CELL_PX
    while len(drawn := first_of_cells(places, kept, cell_px)) > at_most + len(kept):
        cell_px *= COARSER
    return Thinned(tuple(sorted(drawn)), len(places) - len(drawn), math.ceil(cell_px * math.sqrt(2)))


def first_of_cells(places: Sequence[tuple[float, float]], kept: Collection[int], cell_px: float) -> set[int]:
    first: dict[tuple[float, float], int] = {}
    for index in [*kept, *range(len(places))]:
        x, y = places[index]
        first.setdefault((x // cell_px, y // cell_px), index)
    return {*first.values(), *kept}
