"""Result files of suite kernels in, a table in markdown out: how many times as long eager and Inductor take.

    python -m benchmarks.kernel_table

A case counts with the newest file that has it. Ratios are of medians within that file.
"""

import argparse
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.results_file import RESULTS
from benchmarks.table import medians_of, newest_cases

RIVALS = ("eager", "inductor")
#: Less lies within what blocks of one arm differ by: it is no win.
LEAST_WIN = 1.02
HEADER = (
    "| kernel | dtype | eager / kitsune | inductor / kitsune | wins over both |",
    "| --- | --- | ---: | ---: | --- |",
)

Medians = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Row:
    """A kernel in a dtype, with the medians of each shape."""

    kernel: str
    dtype: str
    shapes: Mapping[str, Medians]

    def told(self) -> str:
        columns = [self.kernel, self.dtype, *(range_of(self.ratios(rival)) for rival in RIVALS), self.wins()]
        return "| " + " | ".join(columns) + " |"

    def ratios(self, rival: str) -> list[float]:
        return [us[rival] / us["kitsune"] for us in self.shapes.values() if {rival, "kitsune"} <= us.keys()]

    def wins(self) -> str:
        """In how many shapes both rivals take longer, of those in which all three were measured."""
        whole = {shape: us for shape, us in self.shapes.items() if {*RIVALS, "kitsune"} <= us.keys()}
        won = [shape for shape, us in whole.items() if all(us[each] >= LEAST_WIN * us["kitsune"] for each in RIVALS)]
        missing = len(self.shapes) - len(whole)
        untold = f" ({missing} of {len(self.shapes)} not measured against both)" if missing else ""
        if not whole:
            return "not measured against both"
        if not won:
            return f"never wins over both{untold}"
        return f"{len(won)} of {len(whole)} shapes{untold}"


def range_of(ratios: Sequence[float]) -> str:
    """Their median, and from which to which they are."""
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})" if ratios else "-"


def rows_of(cases: Mapping[str, Iterable[Mapping[str, Any]]]) -> list[Row]:
    """In the order in which they were measured; an arm without samples is as if it were not there."""
    found: dict[tuple[str, str], dict[str, Medians]] = {}
    for case, lines in cases.items():
        kernel, shape, dtype = case.split("/")
        medians = medians_of(lines, "us")
        found.setdefault((kernel, dtype), {})[shape] = medians
    return [Row(kernel, dtype, shapes) for (kernel, dtype), shapes in found.items()]


def table_of(cases: Mapping[str, Iterable[Mapping[str, Any]]]) -> Iterator[str]:
    yield from HEADER
    yield from (row.told() for row in sorted(rows_of(cases), key=lambda row: (row.kernel, row.dtype)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS / "kernels", help="folder of the result files")
    arguments = parser.parse_args()
    print("\n".join(table_of(newest_cases(arguments.results))))


if __name__ == "__main__":
    main()
