"""Records a space: what dozens of configurations of a workload take on this device, for benchmarks.search.

    python -m benchmarks.spaces resnet50/64 --out benchmarks/results/spaces/resnet50-h200.jsonl --minutes 8

Each configuration has a child process of its own, as in kitsune tune: its numbers are proven, and then it is timed
beside the rival. Children build side by side, and one at a time is timed. What is in the file already is left out, so
that a space is recorded in pieces, and by two GPUs of a host side by side: one of them from the other end, and each on
half of the cores.

    CUDA_VISIBLE_DEVICES=1 taskset -c 16-31 python -m benchmarks.spaces resnet50/64 --out ... --backwards
"""

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import results_file
from benchmarks.cases import CASES
from benchmarks.inspected import inspected
from benchmarks.recorded import Recorded, line_of, rival_of, to_record
from kitsune.device.backend import pick_device
from tuner.measuring.crew import Children, Crew, Finished
from tuner.measuring.protocol import ArmSpec, Job, Limits
from tuner.measuring.scratch import scratch
from tuner.records import Failure, Measurement
from tuner.search.space import Configuration, Space
from tuner.tuning.run import cores
from tuner.tuning.trials_in_flight import ran_out_of_shared_memory

COUNT = 72
ROUNDS = 12
AT_ONCE = {"cuda": 8, "cpu": 1}
CORES_A_CHILD = 2
OVERTIME_S = 60.0


@dataclass(slots=True)
class Recorder:
    """Measures configurations for one file. `job`: what each of them is asked, but for its arms."""

    path: Path
    rival: Configuration
    job: Mapping[str, Any]
    crew: Crew
    at_once: int
    clock: Callable[[], float]
    _begun: dict[int, tuple[Configuration, float]] = field(default_factory=dict)

    def record(self, configurations: Sequence[Configuration], end_s: float) -> None:
        """None is begun after `end_s`, and those that are still at work OVERTIME_S later are not recorded.

        Nor is one begun that another process has recorded in the file meanwhile.
        """
        left = list(configurations)
        while left or self._begun:
            while left and len(self._begun) < self.at_once and self.clock() < end_s:
                if (knobs := left.pop(0)) not in recorded_in(self.path):
                    self._begin(knobs, end_s + OVERTIME_S - self.clock())
            if not self._begun:
                return
            done = self.crew.finished(lambda: None)
            knobs, begun_s = self._begun.pop(done.ticket)
            if ran_out_of_shared_memory(done):
                left.append(knobs)
                self.at_once = max(1, self.at_once - 1)
            elif not self._is_cut_off(done, end_s):
                self._keep(knobs, done, self.clock() - begun_s)

    def _begin(self, knobs: Configuration, left_s: float) -> None:
        arms = (ArmSpec(name="rival", knobs=self.rival), ArmSpec(name="candidate", knobs=knobs))
        ticket = self.crew.begin(Job.model_validate({**self.job, "arms": arms}), Limits(total_s=left_s))
        self._begun[ticket] = (knobs, self.clock())

    def _is_cut_off(self, done: Finished, end_s: float) -> bool:
        return isinstance(done.outcome, Failure) and self.clock() >= end_s + OVERTIME_S - 1

    def _keep(self, knobs: Configuration, done: Finished, took_s: float) -> None:
        assert isinstance(done.outcome, Measurement | Failure)
        line = line_of(knobs, done.outcome, took_s)
        results_file.append(self.path, line)
        print(json.dumps(line)[:200], flush=True)


def begun(path: Path, workload: str, device: str) -> tuple[Space, Configuration]:
    """The space of the file and its rival; a new file begins with what an inspection tells of the workload here."""
    here = results_file.environment_line(results_file.command_line())
    if path.exists():
        with path.open(encoding="utf-8") as file:
            head = json.loads(file.readline())
        if (head["workload"], head["gpu"]) != (workload, here["gpu"]):
            raise SystemExit(f"{path.name} is of {head['workload']} on {head['gpu'] or 'a CPU'}")
        results_file.append(path, here)
        return Space.of(head["inapplicable"]), head["rival"]
    found = inspected(workload, device)
    space = Space.of(found.inapplicable)
    told = {"workload": workload, "inapplicable": dict(found.inapplicable), "rival": rival_of(space)}
    looked = {"step_ms": found.step_ms, "parameters": found.parameters, "batch": found.batch}
    results_file.append(path, here | told | looked)
    return space, rival_of(space)


def recorded_in(path: Path) -> list[Configuration]:
    return [dict(found.knobs) for found in Recorded.load(path).outcomes.values()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a case of benchmarks.cases, or any workload that kitsune tune takes")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=8.0, help="no configuration is begun after these")
    parser.add_argument("--count", type=int, default=COUNT, help="configurations in all")
    parser.add_argument("--backwards", action="store_true", help="the last of them first")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--seed", type=int, default=0, help="of the random ones")
    given = parser.parse_args()
    end_s = time.monotonic() + 60 * given.minutes
    workload = CASES[given.model].spec if given.model in CASES else given.model
    device = pick_device()
    space, rival = begun(given.out, workload, str(device))
    wanted = to_record(space, given.count, given.seed)[:: -1 if given.backwards else 1]
    at_once = max(1, min(AT_ONCE[device.type], cores() // CORES_A_CHILD))
    with Children(workload, str(device), spares=at_once - 1) as crew, scratch() as folder:
        asked = {"workload": workload, "device": str(device), "rounds": given.rounds, "folder": str(folder)}
        Recorder(given.out, rival, asked, crew, at_once, time.monotonic).record(wanted, end_s)
    print(f"{len(recorded_in(given.out))} configurations in {given.out}; {given.count} wanted")


if __name__ == "__main__":
    main()
