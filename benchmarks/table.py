"""Result files in, the table of the README out: medians of a case come from its newest file.

python -m benchmarks.table
"""

import json
import re
import statistics
from collections.abc import Iterator
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


def newest_cases(folder: Path = RESULTS / "training_step") -> dict[str, list[dict[str, Any]]]:
    """Case -> its lines in the newest file that has it."""
    cases: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(folder.glob("*.jsonl"), key=age):
        found: dict[str, list[dict[str, Any]]] = {}
        for line in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
            if line["kind"] == "case":
                found.setdefault(line["case"], []).append(line)
        cases.update(found)
    return cases


def age(path: Path) -> tuple[str, int]:
    """(day, number of the file on that day), from <day>-<gpu>[-n].jsonl."""
    number = re.search(r"-(\d{1,3})$", path.stem)
    return path.stem[:10], int(number[1]) if number and len(path.stem.split("-")) > 4 else 1


def rows() -> Iterator[str]:
    yield "| ms a step | " + " | ".join(COLUMNS.values()) + " |"
    yield "| --- |" + " ---: |" * len(COLUMNS)
    for case, lines in sorted(newest_cases().items()):
        medians = {line["arm"]: statistics.median(line["step_ms"]) for line in lines}
        yield f"| {case} | " + " | ".join(f"{medians[arm]:.3g}" if arm in medians else "" for arm in COLUMNS) + " |"


if __name__ == "__main__":
    print("\n".join(rows()))
