"""Times the first steps of a training process: with cold caches, and as the next processes find them.

    python -m benchmarks.starts bert_base/16x128
    python -m benchmarks.starts bert_base/16x128 --plan plan.json --processes 4

Each process is fresh, and builds the model and trains by the plan until nothing more is compiled or captured. Those of
an arm have caches of their own: empty for the first one, and what it has left for the others. Without a plan, the best
guess of the search with kernels of ours. Beside it the strongest mode of plain torch.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final

from benchmarks import results_file
from benchmarks.cases import CASES
from benchmarks.inspected import inspected
from benchmarks.results_file import Figure
from kitsune.device.backend import pick_device
from kitsune.plan import Plan
from tuner.building.arms import LiveArm, prepare
from tuner.measuring.protocol import ArmSpec, Job
from tuner.search.presets import OPENING, RIVAL, Preset, resolved
from tuner.search.space import Configuration, Space

SUITE: Final = "starts"
PROCESSES: Final = 3
OURS: Final[Sequence[Preset]] = (*[each for each in OPENING if "fusion" in each.needs], OPENING[0])
FOLDERS: Final = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "KITSUNE_HOME")


def started(spec: str, device: str, knobs: Configuration) -> dict[str, Any]:
    """What this process took until its step was settled, in s, and what it found compiled."""
    begin_s = time.monotonic()
    arms = (ArmSpec(name="eager"), ArmSpec(name="candidate", knobs=dict(knobs)))
    job = Job(workload=spec, device=device, arms=arms, rounds=1)
    prepare(job)
    arm = LiveArm(job, job.arms[-1])
    build_s, calls_s = time.monotonic() - begin_s, []
    while not (calls_s and arm.step.is_settled):
        begin_s = time.monotonic()
        arm(*arm.workload.batch).item()
        calls_s.append(time.monotonic() - begin_s)
    told = {"build_s": build_s, "calls_s": calls_s, "declined": dict(arm.step.report.declined), **compiled()}
    arm.close()
    return told


def compiled() -> dict[str, int]:
    """Graphs that AOTAutograd found or traced, those that Inductor compiled, how often it timed a kernel: as torch
    counts them, whose compiler is loaded only where something is compiled."""
    compiler = sys.modules.get("torch._dynamo.utils")
    counters: Any = {} if compiler is None else compiler.counters
    traced, made = counters.get("aot_autograd", {}), counters.get("inductor", {})
    return {
        "traced_found": traced.get("autograd_cache_hit", 0),
        "traced_anew": traced.get("autograd_cache_miss", 0) + traced.get("autograd_cache_bypass", 0),
        "graphs_compiled": made.get("fxgraph_cache_miss", 0) + made.get("fxgraph_cache_bypass", 0),
        "kernels_timed": sum(count for name, count in made.items() if name.startswith("benchmarking.")),
    }


def in_a_process(spec: str, device: str, knobs: Configuration, folder: Path) -> dict[str, Any]:
    """As `started`, by a fresh process with these caches; `whole_s` is from its start to its end."""
    command = [sys.executable, "-m", "benchmarks.starts", spec, "--one", device, "--knobs", json.dumps(dict(knobs))]
    caches = {name: str(folder / name.lower()) for name in FOLDERS}
    begin_s = time.monotonic()
    done = subprocess.run(command, env={**os.environ, **caches}, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"a process that trains {spec} by {dict(knobs)} ended with code {done.returncode}")
    return {**json.loads(done.stdout.splitlines()[-1]), "whole_s": time.monotonic() - begin_s}


def arms_of(spec: str, device: str, plan: Path | None) -> dict[str, Configuration]:
    """By name: the strongest of plain torch, and the plan or the best guess for this device."""
    space = Space.of(inspected(spec, device).inapplicable)
    stock, *others = (each.knobs for each in resolved((RIVAL, *OURS), space))
    if plan is not None:
        return {"stock": stock, "plan": Plan.load(plan).knobs}
    return {"stock": stock, **({"best_guess": others[0]} if others else {})}


def figures(case: str, lines: Sequence[Mapping[str, Any]]) -> Iterator[Figure]:
    for arm in dict.fromkeys(line["arm"] for line in lines):
        first, *others = [sum(line["calls_s"]) for line in lines if line["arm"] == arm]
        yield f"{case}, {arm}: first steps, cold", first, "s", 1
        if others:
            yield f"{case}, {arm}: first steps, warm", median(others), "s", len(others)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", help="a case of benchmarks.cases, or any workload that kitsune tune takes")
    parser.add_argument("--plan", type=Path)
    parser.add_argument("--processes", type=int, default=PROCESSES, help="of an arm, the first of them cold")
    parser.add_argument("--out", type=Path, help="a new file under benchmarks/results/starts otherwise")
    parser.add_argument("--one", metavar="DEVICE", help=argparse.SUPPRESS)
    parser.add_argument("--knobs", type=json.loads, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(started(given.case, given.one, given.knobs)))
        return
    spec = CASES[given.case].spec if given.case in CASES else given.case
    device, path, command = str(pick_device()), given.out or results_file.free_path(SUITE), results_file.command_line()
    lines = []
    results_file.append(path, results_file.environment_line(command))
    for arm, knobs in arms_of(spec, device, given.plan).items():
        with tempfile.TemporaryDirectory() as folder:
            for number in range(given.processes):
                told = {"kind": "start", "suite": SUITE, "case": given.case, "arm": arm, "knobs": dict(knobs)}
                line = {**told, "process": number, **in_a_process(spec, device, knobs, Path(folder))}
                results_file.append(path, line)
                print(json.dumps(line), flush=True)
                lines.append(line)
    for figure in figures(given.case, lines):
        results_file.append(path, results_file.figure_line(SUITE, figure, command))
        print(figure, flush=True)


if __name__ == "__main__":
    main()
