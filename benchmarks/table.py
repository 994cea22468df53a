"""Result files in, the table of the README out: medians of a case come from its newest file.

python -m benchmarks.table
"""

import json
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.results_file import RESULTS

COLUMNS = {
    "eager_fp32": "eager fp32",
    "eager_bf16": "eager bf16",
    "compile": "compile",
    "reduce_overhead": "reduce-overhead",
    "max_autotune": "max-autotune",
    "graph": "graph by hand",
    "kitsune_dropin": "**drop-in**",
    "kitsune": "**TrainStep**",
}


def files(folder: Path) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """(name, lines) of every result file, the oldest first."""
    for path in sorted(folder.glob("*.jsonl"), key=age):
        yield path.name, [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def newest_cases(folder: Path = RESULTS / "training_step") -> dict[str, list[dict[str, Any]]]:
    """Case -> its lines in the newest file that has it."""
    cases: dict[str, list[dict[str, Any]]] = {}
    for _, lines in files(folder):
        found: dict[str, list[dict[str, Any]]] = {}
        for line in lines:
            if line["kind"] == "case":
                found.setdefault(line["case"], []).append(line)
        cases.update(found)
    return cases


def medians_of(lines: Iterable[Mapping[str, Any]], samples: str = "step_ms") -> dict[str, float]:
    """Arm -> the median of its samples; of an arm without any nothing."""
    return {line["arm"]: statistics.median(line[samples]) for line in lines if line[samples]}


def age(path: Path) -> tuple[str, int]:
    """(day, number of the file on that day), from <day>-<gpu>[-n].jsonl."""
    number = re.search(r"-(\d{1,3})$", path.stem)
    return path.stem[:10], int(number[1]) if number and len(path.stem.split("-")) > 4 else 1


def rows() -> Iterator[str]:
    yield "| ms a step | " + " | ".join(COLUMNS.values()) + " |"
    yield "| --- |" + " ---: |" * len(COLUMNS)
    for case, lines in sorted(newest_cases().items()):
        medians = medians_of(lines)
        yield f"| {case} | " + " | ".join(f"{medians[arm]:.3g}" if arm in medians else "" for arm in COLUMNS) + " |"


if __name__ == "__main__":
    print("\n".join(rows()))
