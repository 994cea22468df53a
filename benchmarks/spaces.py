"""Records a space: what dozens of configurations of a workload take on this device, for benchmarks.search.

    python -m benchmarks.spaces zoo:resnet50 --out benchmarks/results/spaces/resnet50-h200.jsonl --minutes 8

Each configuration has a child process of its own, by the tuner's measure(): the numbers are proven, and then it is
timed beside the rival. What is in the file already is left out, so that a space is recorded in pieces.
"""

import argparse
import json
import time
from pathlib import Path

from benchmarks import results_file
from benchmarks.cases import CASES
from benchmarks.recorded import line_of, rival_of, to_record
from kitsune.device import pick_device
from tuner import measure
from tuner.protocol import ArmSpec, Job
from tuner.records import Failure
from tuner.space import Configuration, Space

COUNT = 72
ROUNDS = 12


def begun(path: Path, workload: str, device: str) -> Space:
    """The space of the file; a new file begins with what an inspection tells of the workload here."""
    if path.exists():
        with path.open(encoding="utf-8") as file:
            head = json.loads(file.readline())
        if head["workload"] != workload:
            raise SystemExit(f"{path.name} is of {head['workload']}")
        return Space.of(head["inapplicable"])
    found = measure.inspect(workload, device)
    if isinstance(found, Failure):
        raise SystemExit(f"{workload} fails as given: {found.reason}")
    space = Space.of(found.inapplicable)
    told = {"workload": workload, "inapplicable": dict(found.inapplicable), "rival": rival_of(space)}
    looked = {"step_ms": found.step_ms, "parameters": found.parameters, "batch": found.batch}
    results_file.append(path, results_file.environment_line(results_file.command_line()) | told | looked)
    return space


def recorded_in(path: Path) -> list[Configuration]:
    lines = path.read_text(encoding="utf-8").splitlines()[1:]
    return [json.loads(line)["knobs"] for line in lines]


def record(path: Path, workload: str, device: str, knobs: Configuration, space: Space, rounds: int) -> None:
    arms = (ArmSpec(name="rival", knobs=rival_of(space)), ArmSpec(name="candidate", knobs=knobs))
    begin = time.monotonic()
    outcome = measure.measure(Job(workload=workload, device=device, arms=arms, rounds=rounds))
    line = line_of(knobs, outcome, time.monotonic() - begin)
    results_file.append(path, line)
    print(json.dumps(line)[:200], flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a case of benchmarks.cases, or any workload that kitsune tune takes")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=8.0, help="no configuration is begun after these")
    parser.add_argument("--count", type=int, default=COUNT, help="configurations in all")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--seed", type=int, default=0, help="of the random ones")
    given = parser.parse_args()
    end = time.monotonic() + 60 * given.minutes
    workload = CASES[given.model].spec if given.model in CASES else given.model
    device = str(pick_device())
    space = begun(given.out, workload, device)
    done = recorded_in(given.out)
    left = [knobs for knobs in to_record(space, given.count, given.seed) if knobs not in done]
    for knobs in left:
        if time.monotonic() >= end:
            break
        record(given.out, workload, device, knobs, space, given.rounds)
    print(f"{len(recorded_in(given.out))} configurations in {given.out}; {given.count} wanted")


if __name__ == "__main__":
    main()
