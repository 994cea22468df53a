"""Attacks a real `kitsune serve` in every way that is known to us, and counts what came of it.

    python -m benchmarks.attacks

`api`: requests that schemathesis makes up from the description of the API. `archives`: hostile ones, by hand and by
chance. `names`: foreign hosts and origins, and paths that lead out of a folder. `uploads`: endless, slow and bombs,
while its health is asked for. `flips`: single bits of what is stored. A fault is told on stderr, and then the exit code
is 1.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from benchmarks import (
    attack_api,
    attack_archives,
    attack_flips,
    attack_names,
    attack_uploads,
    machine,
    results_file,
)
from benchmarks.attack_uploads import Samples
from benchmarks.results_file import Figure
from tests.unit.kitsune.submission import hostile
from tests.unit.kitsune.submission.steps import archive_of

SUITE: Final = "attacks"
#: Steps whose archives are broken by chance, beside the one that the hostile ones are made of.
BASES: Final = ("towers", "own_loss", "mixed", "lenet", "graph", "encoder")
#: What must not happen at all, by the end of the name of a figure.
NEVER: Final = frozenset(
    (
        "accepted anyway", "answers of 500", "answers of 5xx", "answers unlike the reading",
        "answers with a byte of a file outside", "cases without an answer", "code run", "files opened, code run",
        "found by a look-up", "given by id", "health not told", "kept otherwise than accepted",
        "not mended by sending them again", "operations left out", "read as another plan", "read by the library",
        "reading gone wrong", "reading processes lost", "rebuilding gone wrong", "routes that do not answer",
        "servers lost", "sound plans not found", "taken by a worker", "tracebacks", "undocumented answers",
    )
)  # fmt: skip
#: What may take so long at most.
AT_MOST: Final[Mapping[str, float]] = {"health p99": 1000.0, "slowest reading": 1.0, "slowest answer": 1.0}


def parts(asked: argparse.Namespace) -> Mapping[str, Callable[[Path], Iterator[Figure | Samples]]]:
    return {
        "api": lambda folder: attack_api.attacked(folder, asked.examples, asked.seed),
        "archives": lambda folder: attack_archives.attacked(folder, bases(), asked.archives, asked.seed),
        "names": attack_names.attacked,
        "uploads": lambda folder: attack_uploads.attacked(folder, asked.seconds),
        "flips": lambda folder: attack_flips.attacked(folder, asked.flips, asked.seed),
    }


def bases() -> list[Any]:
    return [hostile.valid(), *map(archive_of, BASES)]


def is_fault(figure: Figure, at_most: Mapping[str, float] = AT_MOST) -> bool:
    case, value, _, _ = figure
    kind = case.rpartition(": ")[2]
    return value > at_most.get(kind, float("inf")) or (kind in NEVER and value != 0)


def line_of(figure: Figure | Samples, command: str) -> dict[str, Any]:
    """With the rule of three where nothing happened in n cases: then, at 95 %, it happens in less than 3/n of them."""
    if isinstance(figure, Samples):
        return {"kind": "samples", "suite": SUITE, **figure._asdict()}
    case, value, _, count = figure
    bound = 3 / count if case.rpartition(": ")[2] in NEVER and value == 0 and count > 1 else None
    return results_file.figure_line(SUITE, figure, command, bound)


def main() -> int:
    asked = arguments()
    command, faults = results_file.command_line(), 0
    os.environ["KITSUNE_REQUESTS_PER_MINUTE"] = "0"  # 429 would be the answer to most of it
    path = asked.out or results_file.free_path(SUITE)
    results_file.append(path, results_file.environment_line(command))
    for name, attacked in parts(asked).items():
        if name not in (asked.part or parts(asked)):
            continue
        begin, before = time.monotonic(), machine.ticks()
        with tempfile.TemporaryDirectory(prefix=f"kitsune-{name}-") as folder:
            for figure in attacked(Path(folder)):
                line = line_of(figure, command)
                results_file.append(path, line)
                if not isinstance(figure, Samples):
                    print(json.dumps(line), flush=True)
                    faults += is_fault(figure)
        took = f"{name}: all of it", time.monotonic() - begin, "s", 1
        results_file.append(path, line_of(took, command))
        results_file.append(path, {"kind": "conditions", "suite": SUITE, "case": name, **machine.conditions(before)})
    return int(faults > 0)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", action="append", choices=("api", "archives", "names", "uploads", "flips"))
    parser.add_argument("--examples", type=int, default=1700, help="by chance for each operation of the API")
    parser.add_argument("--archives", type=int, default=10_000, help="made by chance")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each kind of upload")
    parser.add_argument("--flips", type=int, default=1000, help="in texts of plans, in their columns, in archives")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="a new file under benchmarks/results otherwise")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
