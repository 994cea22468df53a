"""Runs as a team has them after some weeks, for pages to show."""

from datetime import timedelta

from kitsune.plan import Interval
from tests.store.samples import a_run, an_environment
from tuner.records import Run, RunStatus, Verdict
from tuner.store.database import Database
from tuner.store.queries import runs
from tuner.wall_clock import utcnow

_H200 = an_environment()
_A100 = an_environment(gpu="NVIDIA A100-SXM4-80GB", compute_capability="8.0", memory_bytes=85_000_000_000)
_STEPS = (
    ("zoo:resnet18?batch=128", _H200, 1.42, 0.88),
    ("zoo:bert?batch=2", _H200, 1.26, 1.07),
    ("zoo:googlenet", _A100, 1.55, 0.61),
    ("zoo:dlrm", _H200, 1.0, 1.0),
    ("zoo:mlp", None, None, None),
)


def some_weeks_of_runs(database: Database, count: int = 14, **changes: object) -> list[Run]:
    made = [_one(number, **changes) for number in range(count)]
    with database.begin() as connection:
        for run in made:
            runs.add(connection, run)
    return made


def _one(number: int, **changes: object) -> Run:
    workload, machine, gain, memory = _STEPS[number % len(_STEPS)]
    at = utcnow() - timedelta(seconds=20) - timedelta(minutes=7) * number**2
    common = {"id": f"06g0t3n8q4v0e4b6k1m2z5{number:04}", "workload": workload, "device": "cuda:0", "created_at": at}
    if number == 0:
        return a_run(**{**common, "device": "", "name": "recommender, nightly", "status": RunStatus.QUEUED, **changes})
    if number in (1, 2):
        until = at + timedelta(days=1 if number == 1 else -1)
        return a_run(**{**common, "environment": machine, "status": RunStatus.RUNNING, "trials": 7,
                        "worker": "gpu-3:1", "lease_until": until, "attempt": 1, **changes})  # fmt: skip
    if gain is None:
        given = {"status": RunStatus.FAILED, "error": "the workload fails", "trials": 1}
        return a_run(**{**common, "device": "cpu", **given, **changes})
    verdict = Verdict.FASTER if gain > 1 else Verdict.SAME
    given = {"status": RunStatus.FINISHED, "verdict": verdict, "trials": 31, "environment": machine}
    if verdict is Verdict.FASTER:
        gain += number / 100
        given |= {"speedup": Interval(median=gain, low=gain - 0.03, high=gain + 0.04), "memory_ratio": memory}
    return a_run(**{**common, **given, "tags": ("weekly",) if number % 4 == 1 else (), **changes})
