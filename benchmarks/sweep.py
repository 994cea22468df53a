"""Tunes and measures many cases, one case a GPU at a time, and joins the results in one file.

    python -m benchmarks.sweep --trials 10 --out results.jsonl --plans plans/ --minutes 9

Cases wait in a queue; each GPU takes the next. Stages: `tune` writes plans/<case>.json, `measure` reads it.
"""

import argparse
import json
import os
import queue
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch

from benchmarks import results_file
from benchmarks.cases import CASES, Case
from benchmarks.serving import KITSUNE


class Sweep:
    """The cases still to do, and what came of those done."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.deadline = time.monotonic() + arguments.minutes * 60
        self.waiting: queue.SimpleQueue[Case] = queue.SimpleQueue()
        for name in arguments.cases:
            self.waiting.put(CASES[name])
        self.lock = threading.Lock()

    def run(self) -> None:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        gpus = visible.split(",") if visible else list(map(str, range(torch.cuda.device_count())))
        threads = [threading.Thread(target=self.work, args=(gpu,)) for gpu in gpus]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def work(self, gpu: str) -> None:
        while True:
            try:
                case = self.waiting.get_nowait()
            except queue.Empty:
                return
            for stage in self.arguments.stages:
                begin = time.monotonic()
                ended = self.call(gpu, case, self.command(case, stage))
                self.say(f"{case.name} {stage} on GPU {gpu}: {ended} after {time.monotonic() - begin:.0f} s")
                if ended != "done":
                    break

    def command(self, case: Case, stage: str) -> list[str]:
        plan = str(self.plan_of(case))
        if stage == "tune":
            budget = ["--budget", self.arguments.budget] if self.arguments.budget else []
            tune = [KITSUNE, "tune", case.spec, "--trials", self.arguments.trials, *budget]
            return [*tune, "--no-ablation", "--out", plan, "--json"]
        measure = [sys.executable, "-m", "benchmarks.training_step", "--case", case.name, "--plan", plan]
        return [*measure, "--out", str(self.part_of(case))]

    def call(self, gpu: str, case: Case, command: list[str]) -> str:
        left_s = self.deadline - time.monotonic()
        if left_s < 5:
            return "not begun: no time left"
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": gpu}
        with self.log_of(case).open("a") as log:
            try:
                ended = subprocess.run(command, env=environment, stdout=log, stderr=log, timeout=left_s, check=False)
            except subprocess.TimeoutExpired:
                return "stopped: no time left"
        return "done" if ended.returncode == 0 else f"failed with exit code {ended.returncode}"

    def say(self, text: str) -> None:
        with self.lock:
            print(text, flush=True)

    def join(self) -> None:
        """One file with one environment line, in the order of the cases; incomplete parts are left out."""
        path: Path = self.arguments.out or results_file.free_path("training_step")
        results_file.append(path, results_file.environment_line(results_file.command_line()))
        for name in self.arguments.cases:
            part = self.part_of(CASES[name])
            for line in part.read_text().splitlines() if part.exists() else ():
                if json.loads(line)["kind"] == "case":
                    results_file.append(path, json.loads(line))

    def plan_of(self, case: Case) -> Path:
        return self.arguments.plans / f"{slug(case)}.json"

    def part_of(self, case: Case) -> Path:
        return self.arguments.plans / f"{slug(case)}.jsonl"

    def log_of(self, case: Case) -> Path:
        return self.arguments.plans / f"{slug(case)}.log"


def slug(case: Case) -> str:
    return case.name.replace("/", "-")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    swept = [case.name for case in CASES.values() if case.is_swept]
    parser.add_argument("--cases", nargs="*", default=swept, choices=CASES)
    parser.add_argument("--stages", nargs="*", default=["tune", "measure"], choices=["tune", "measure"])
    parser.add_argument("--trials", default="10", help="of each tune")
    parser.add_argument("--budget", help="of each tune, as 9m")
    parser.add_argument("--minutes", type=float, default=60.0, help="for the whole sweep")
    parser.add_argument("--plans", type=Path, required=True, help="folder of plans, parts and logs")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    arguments.plans.mkdir(parents=True, exist_ok=True)
    sweep = Sweep(arguments)
    sweep.run()
    if "measure" in arguments.stages:
        sweep.join()


if __name__ == "__main__":
    main()
