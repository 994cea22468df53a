"""Suite search: kitsune tune as a user runs it, with cold caches, and its plan beside plain torch in another process.

    python -m benchmarks.tuned hf-llama_125m/8x1024 --budget 5m --out result.jsonl

The plan is timed by benchmarks.training_step, which shares no timing with the tuner. `--again` tunes a second time,
with the store and the caches of the first.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import results_file
from benchmarks.cases import CASES, Case
from kitsune.base.durations import seconds_of
from tuner.records import Source, Trial
from tuner.statistics.plan_evidence import words
from tuner.store.engine import open_database
from tuner.store.queries import runs, trials

RIVALS = ("compile", "reduce_overhead", "graph")
PLAN = "kitsune"


def tuned(case: Case, budget: str, home: Path, plan: Path) -> dict[str, Any]:
    """Runs the command; its summary, with the wall-clock time of the whole process and what its trials tell."""
    command = [sys.executable, "-m", "kitsune", "tune", case.spec, "--budget", budget, "--no-ablation", "--json"]
    begin = time.monotonic()
    done = subprocess.run(
        [*command, "--out", str(plan)], env=of_home(home), stdout=subprocess.PIPE, text=True, check=False
    )
    wall_s = time.monotonic() - begin
    if done.returncode != 0:
        raise SystemExit(f"kitsune tune ended with code {done.returncode}: {done.stdout[-2000:]}")
    summary = json.loads(done.stdout)
    with open_database(database_of(home)) as database, database.read() as connection:
        run = runs.get(connection, summary["run_id"])
        assert run is not None
        tried = trials.list_of(connection, run.id)
    return {"wall_s": wall_s, "summary": summary, "trials": [told(trial, run.created_at) for trial in tried]}


def told(trial: Trial, begin: Any) -> dict[str, Any]:
    return {
        "source": trial.source.value,
        "knobs": words(trial.knobs),
        "speedup": None if trial.comparison is None else trial.comparison.speedup.median,
        "failure": None if trial.failure is None else trial.failure.reason[:300],
        "spent": None if trial.spent is None else trial.spent.model_dump(mode="json"),
        "begin_s": (trial.started_at - begin).total_seconds(),
        "end_s": (trial.finished_at - begin).total_seconds(),
        "arms": [] if trial.measurement is None else [arm_of(arm) for arm in trial.measurement.arms],
        "notes": [] if trial.measurement is None else list(trial.measurement.notes),
    }


def arm_of(arm: Any) -> dict[str, Any]:
    return {
        "name": arm.name,
        "knobs": words(arm.knobs),
        "step_ms": list(arm.step_ms),
        "peak_bytes": arm.peak_bytes,
        "first_step_s": arm.first_step_s,
    }


def database_of(home: Path) -> str:
    return f"sqlite:///{home}/kitsune.db"


def of_home(home: Path) -> dict[str, str]:
    """A new user's: empty store, empty caches."""
    own = {"KITSUNE_HOME": home, "KITSUNE_DATABASE_URL": database_of(home), "TMPDIR": home, "TRITON_CACHE_DIR": home}
    return {**os.environ, **{name: str(value) for name, value in own.items()}}


def raced(case: Case, plan: Path, home: Path, out: Path, arms: Sequence[str]) -> dict[str, float]:
    """Median ms of each arm, by a process of its own that adds its lines to `out`."""
    command = ["-m", "benchmarks.training_step", "--case", case.name, "--plan", str(plan), "--out", str(out)]
    before = len(out.read_text().splitlines())
    subprocess.run([sys.executable, *command, "--arms", *arms], env=of_home(home), check=True)
    lines = [json.loads(line) for line in out.read_text().splitlines()[before:]]
    return {line["arm"]: statistics.median(line["step_ms"]) for line in lines if line["kind"] == "case"}


def report(name: str, found: Mapping[str, Any]) -> None:
    """The course of the run for a reader of the log."""
    for trial in found["trials"]:
        spent = {key.removesuffix("_s"): round(value, 1) for key, value in (trial["spent"] or {}).items() if value}
        first = [round(arm["first_step_s"], 1) for arm in trial["arms"]]
        print(
            f"{name} {trial['begin_s']:6.1f}-{trial['end_s']:6.1f} {trial['source']:9} {trial['knobs'][:90]:90} "
            f"{trial['speedup'] or 0:.3f}x {spent} {first} {(trial['failure'] or '')[:160]}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--budget", default="5m")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--arms", nargs="*", default=RIVALS)
    parser.add_argument("--out", type=Path, help="a new file under benchmarks/results/search otherwise")
    given = parser.parse_args()
    case, out = CASES[given.case], given.out or results_file.free_path("search")
    command = results_file.command_line()
    if not out.exists():
        results_file.append(out, results_file.environment_line(command))
    with tempfile.TemporaryDirectory() as folder:
        home, plan = Path(folder), Path(folder) / "plan.json"
        for name in [f"{case.name}@{given.budget}", f"{case.name}@{given.budget}-again"][: 1 + given.again]:
            found = tuned(case, given.budget, home, plan)
            report(name, found)
            results_file.append(out, {"kind": "tuning", "suite": "search", "case": name, **found})
            figures = [(f"{name}:wall", round(found["wall_s"], 1), "s", 1)]
            figures += [(f"{name}:budget", seconds_of(given.budget, "budget"), "s", 1)]
            searched = [trial for trial in found["trials"] if Source(trial["source"]).is_search]
            figures += [(f"{name}:trials", float(len(searched)), "trials", 1)]
            if given.arms:
                ms = raced(case, plan, home, out, [*given.arms, PLAN])
                best_ms = min(value for arm, value in ms.items() if arm != PLAN)
                figures += [(name, round(ms[PLAN] / best_ms, 4), "ratio", 1)]
            for figure in figures:
                results_file.append(out, results_file.figure_line("search", figure, command))
                print(figure, flush=True)


if __name__ == "__main__":
    main()
