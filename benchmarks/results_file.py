"""Result files: an environment line, then one line a case and arm, as JSON; raw samples always."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kitsune.device.backend import environment, pick_device

RESULTS = Path(__file__).parent / "results"

#: case, value, unit, n
Figure = tuple[str, float, str, int]


def environment_line(command: str) -> dict[str, Any]:
    here = environment(pick_device())
    return {
        "kind": "environment",
        "gpu": here.gpu,
        "driver": here.driver,
        "torch": here.torch,
        "triton": here.triton,
        "cuda": here.cuda,
        "python": here.python,
        "kitsune_commit": commit(),
        "command": command,
        "utc": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def figure_line(suite: str, figure: Figure, command: str, upper_bound_95: float | None = None) -> dict[str, Any]:
    case, value, unit, count = figure
    told = {"kind": "figure", "suite": suite, "case": case, "value": value, "unit": unit, "n": count}
    return {**told, "upper_bound_95": upper_bound_95, "command": command}


def write_figures(
    path: Path, suite: str, figures: Iterable[Figure], bound_of: Callable[[Figure], float | None] = lambda _: None
) -> None:
    """A new file of them, each also on stdout; `bound_of` gives the upper bound of one (95 %)."""
    command = command_line()
    append(path, environment_line(command))
    for figure in figures:
        line = figure_line(suite, figure, command, bound_of(figure))
        append(path, line)
        print(json.dumps(line))


def commit() -> str:
    """The commit of the checkout, or what KITSUNE_COMMIT says: a copy may be without git, or be told of as changed."""
    if told := os.environ.get("KITSUNE_COMMIT"):
        return told
    found = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return found.stdout.strip() or "unknown"


def free_path(suite: str, folder: Path = RESULTS) -> Path:
    """<folder>/<suite>/<day>-<gpu>[-n].jsonl, the first that does not exist: no file is ever edited."""
    gpu = environment(pick_device()).gpu.lower().replace("nvidia ", "").replace("(r)", "").replace(" ", "-")
    stem = f"{datetime.now(UTC):%Y-%m-%d}-{gpu}"
    (folder / suite).mkdir(parents=True, exist_ok=True)
    names = [f"{stem}.jsonl", *(f"{stem}-{number}.jsonl" for number in range(2, 1000))]
    return next(path for path in (folder / suite / name for name in names) if not path.exists())


def append(path: Path, line: Mapping[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def lines_of(path: Path, kind: str) -> list[dict[str, Any]]:
    """Those of a kind that are in the file so far; none where there is no file."""
    lines = map(json.loads, path.read_text(encoding="utf-8").splitlines()) if path.exists() else ()
    return [line for line in lines if line["kind"] == kind]


def command_line() -> str:
    """Without the folders of this machine."""
    words = (Path(word).name if Path(word).is_absolute() else word for word in sys.argv[1:])
    return "python -m benchmarks." + " ".join([Path(sys.argv[0]).stem, *words])
