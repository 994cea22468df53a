"""Repeats `kitsune doctor --measure` on this machine and counts what would have been claimed.

    python -m benchmarks.checkups --minutes 8 --out checkups.jsonl

A confirmation is five fresh processes that time a step, the same again, and the same with 1 % and 3 % planted. Each is
one line of the file. Called again with the same file it goes on, on all GPUs at once or those of `--device`; with the
last confirmation come the figures. While a process measures on a GPU the next ones import torch, and wait.
The exit code is 1 when more than one difference was claimed where there is none, or fewer than 95 % of the slowdowns
were found: those of 1 % where processes differ by 0.1 % at most, otherwise those of 3 %.
"""

import argparse
import json
import math
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count, islice, pairwise
from pathlib import Path
from statistics import median
from threading import Lock
from typing import Any, Final

import torch

from benchmarks import results_file
from benchmarks.results_file import Figure
from tuner.records import Measurement, Verdict
from tuner.statistics.block_statistics import log_ratios
from tuner.statistics.plan_evidence import CERTAIN
from tuner.statistics.process_statistics import PROCESSES
from tuner.timing.checkup import PLANTED, STEP, claims_of, started, told

SUITE: Final = "verdicts"
ALIKE: Final = 0.001
MOST_FALSE: Final = 1
LEAST_FOUND: Final = 95.0
#: Processes that import torch while one measures. On hosts of H200s that takes 2 s and more, and measuring 2: with one
#: of them a confirmation of five took 23 s.
AHEAD: Final = 3

Line = Mapping[str, Any]


def measured(device: str, seeds: Iterator[int]) -> Generator[Measurement]:
    """By one fresh process each, without an end."""
    if device == "cpu":  # importing would take the cores from what is measured
        yield from (told(started(device, seed)) for seed in seeds)
        return
    ahead = deque(started(device, next(seeds)) for _ in range(AHEAD))
    try:
        while True:
            ahead.append(started(device, next(seeds)))
            yield told(ahead.popleft())
    finally:
        for process in ahead:
            with process:
                process.kill()


def confirmations(device: str, asked: int, end_s: float, seeds: Iterator[int]) -> Iterator[dict[str, Any]]:
    """Up to so many, none of them begun after `end_s`."""
    found = measured(device, seeds)
    try:
        for _ in range(asked):
            begin_s = time.monotonic()
            if begin_s > end_s:
                return
            processes = list(islice(found, PROCESSES))
            yield line_of(device, processes, time.monotonic() - begin_s)
    finally:
        found.close()


def line_of(device: str, processes: Sequence[Measurement], took_s: float) -> dict[str, Any]:
    """`log_speedups`: the median of each process, by arm. `step_ms`: the step as it is, of each."""
    arms = [{arm.name: arm.step_ms for arm in found.arms} for found in processes]
    return {
        "kind": "confirmation",
        "suite": SUITE,
        "device": device,
        "took_s": round(took_s, 1),
        "step_ms": [median(found[STEP]) for found in arms],
        "log_speedups": {name: [median(log_ratios(found[STEP], found[name])) for found in arms] for name in PLANTED},
        "claims": [claim.model_dump(mode="json") for claim in claims_of(processes)],
        "causes": sorted({cause.seen for found in processes for cause in found.causes}),
    }


def figures(lines: Sequence[Line]) -> Iterator[Figure]:
    """Of all confirmations; shares in %."""
    runs = len(lines)
    for at, (name, planted) in enumerate(PLANTED.items()):
        claims = [line["claims"][at] for line in lines]
        said = [Verdict(claim["verdict"]) for claim in claims]
        case = f"{name}: " if planted else "nothing planted: "
        if planted:
            yield f"{case}found", 100 * said.count(Verdict.SLOWER) / runs, "%", runs
        else:
            yield f"{case}a difference claimed", 100 * sum(map(said.count, CERTAIN)) / runs, "%", runs
            held = sum(claim["speedup"]["low"] <= 1 <= claim["speedup"]["high"] for claim in claims)
            yield f"{case}interval holds", 100 * held / runs, "%", runs
            yield from _foreseen(case, lines)
        yield f"{case}called the same", 100 * said.count(Verdict.SAME) / runs, "%", runs
        yield f"{case}too noisy to tell", 100 * said.count(Verdict.TOO_NOISY) / runs, "%", runs
        apart = math.sqrt(sum(claim["process_spread"] ** 2 for claim in claims) / runs)
        yield f"{case}processes differ by", 100 * apart, "%", runs
        middle = median([math.exp(-value) - 1 for line in lines for value in line["log_speedups"][name]])
        yield f"{case}slower by", 100 * middle, "%", runs * PROCESSES
    yield "a confirmation took", median([line["took_s"] for line in lines]), "s", runs


def _foreseen(case: str, lines: Sequence[Line]) -> Iterator[Figure]:
    """How often the prediction of a confirmation holds the first process of the next one on its device."""
    by_device: dict[str, list[Line]] = {}
    for line in lines:
        by_device.setdefault(line["device"], []).append(line)
    held = []
    for of_device in by_device.values():
        for line, following in pairwise(of_device):
            again = math.exp(following["log_speedups"]["again"][0])
            prediction = line["claims"][0]["prediction"]
            held.append(prediction["low"] <= again <= prediction["high"])
    if held:
        yield f"{case}prediction holds", 100 * sum(held) / len(held), "%", len(held)


def bound_of(figure: Figure) -> float | None:
    """The rule of three, in %."""
    case, value, _, runs = figure
    return min(100.0, 100 * 3 / runs) if case.endswith("a difference claimed") and value == 0 else None


def is_broken(found: Iterable[Figure]) -> bool:
    told_of = {case: (value, runs) for case, value, _, runs in found}
    false, runs = told_of["nothing planted: a difference claimed"]
    planted = "1 %" if told_of["nothing planted: processes differ by"][0] <= 100 * ALIKE else "3 %"
    return false * runs / 100 > MOST_FALSE + 0.5 or told_of[f"{planted} slower: found"][0] < LEAST_FOUND


def go_on(path: Path, devices: Sequence[str], missing: int, end_s: float) -> None:
    """Adds up to `missing` confirmations to the file, on each device as many; what is there when killed stays."""
    lock, share, begun = Lock(), math.ceil(missing / len(devices)), len(results_file.lines_of(path, "confirmation"))

    def on(place: int) -> None:
        seeds = count(1000 * begun + 100_000 * place)
        for line in confirmations(devices[place], share, end_s, seeds):
            with lock:
                results_file.append(path, line)

    with ThreadPoolExecutor(len(devices)) as pool:
        list(pool.map(on, range(len(devices))))


def every_device() -> list[str]:
    return [f"cuda:{index}" for index in range(torch.cuda.device_count())] or ["cpu"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--confirmations", type=int, default=100, help="in all")
    parser.add_argument("--minutes", type=float, default=8.0, help="after which no other one is begun")
    parser.add_argument("--device", action="append", metavar="cpu|cuda:N", help="every GPU otherwise")
    parser.add_argument("--out", type=Path, help="the file to go on with; a new one of this day and machine otherwise")
    asked = parser.parse_args()
    path, command = asked.out or results_file.free_path(SUITE), results_file.command_line()
    missing = asked.confirmations - len(results_file.lines_of(path, "confirmation"))
    if missing <= 0:
        parser.error(f"{path} is complete: no file is edited")
    results_file.append(path, results_file.environment_line(command))  # of each call: they may be of several commits
    go_on(path, asked.device or every_device(), missing, time.monotonic() + 60 * asked.minutes)
    lines = results_file.lines_of(path, "confirmation")
    found, is_complete = list(figures(lines)) if lines else [], len(lines) >= asked.confirmations
    for figure in found:
        line = results_file.figure_line(SUITE, figure, command, bound_of(figure))
        print(json.dumps(line))
        if is_complete:
            results_file.append(path, line)
    print(f"{len(lines)} of {asked.confirmations} confirmations are in {path}")
    return int(is_complete and is_broken(found))


if __name__ == "__main__":
    raise SystemExit(main())
