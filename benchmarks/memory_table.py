"""Result files of suite memory in, a table in markdown out: the peak of each arm, and its share of the given step's.

    python -m benchmarks.memory_table

A case counts with the newest file that has it.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.results_file import RESULTS
from benchmarks.table import files

GIVEN = "eager_fp32"
MIB = 2**20


def peaks_of(lines: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Case -> arm -> its peak in bytes."""
    found: dict[str, dict[str, float]] = {}
    for line in lines:
        if line["kind"] == "figure" and line["unit"] == "bytes":
            case, _, arm = line["case"].partition(" ")
            found.setdefault(case, {})[arm] = line["value"]
    return found


def newest_peaks(folder: Path = RESULTS / "memory") -> dict[str, dict[str, float]]:
    cases: dict[str, dict[str, float]] = {}
    for _, lines in files(folder):
        cases.update(peaks_of(lines))
    return {case: peaks for case, peaks in cases.items() if GIVEN in peaks}


def table_of(cases: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
    arms = list(dict.fromkeys(arm for peaks in cases.values() for arm in peaks))
    yield f"| {' | '.join(['case', *arms])} |"
    yield "| --- |" + " ---: |" * len(arms)
    for case, peaks in sorted(cases.items()):
        yield f"| {' | '.join([case, *(cell(peaks, arm) for arm in arms)])} |"


def cell(peaks: Mapping[str, float], arm: str) -> str:
    if arm not in peaks:
        return ""
    told = f"{peaks[arm] / MIB:.0f} MiB"
    return told if arm == GIVEN else f"{told} ({peaks[arm] / peaks[GIVEN]:.0%})"


def main() -> None:
    print("\n".join(table_of(newest_peaks())))


if __name__ == "__main__":
    main()
