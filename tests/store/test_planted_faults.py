"""Runs into which faults are planted, on both databases: what is kept, who goes on, and what is said."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kitsune.errors import GpuError, StoreFullError
from tests.store.carrying import carried_out, claimed, stored
from tests.unit.tuner.machine import GRAPH, GRAPH_WINS, SMALL, Machine, failure
from tuner import fault_injection
from tuner.measuring.gpu_health import Fitness
from tuner.measuring.protocol import Job
from tuner.records import Failure, RunStatus
from tuner.statistics.plan_evidence import words
from tuner.statistics.process_statistics import PROCESSES
from tuner.store.database import Database
from tuner.store.queries import runs
from tuner.worker import run_execution

ASSERT = "CUDA error: device-side assert triggered"
SICK = Fitness("cuda:0", (sys.executable, "-c", 'print(\'{"broken": ["the GPU"]}\')'))
WELL = Fitness("cuda:0", (sys.executable, "-c", "print('{\"broken\": []}')"))


@pytest.fixture(autouse=True)
def nothing_planted() -> Iterator[None]:
    yield
    fault_injection.plant(())


def a_machine(**changes: object) -> Machine:
    return Machine(**{"step_ms": GRAPH_WINS, "inapplicable": SMALL, **changes})


def third(child: int, _: Job) -> Failure | None:
    return failure(ASSERT) if child == 2 else None


def plant(text: str) -> None:
    fault_injection.plant(fault_injection.parsed(text))


def test_a_broken_gpu_ends_the_run_here_and_another_worker_goes_on(database: Database) -> None:
    run = claimed(database, workload="zoo:mlp")
    with pytest.raises(GpuError, match=r"cuda:0 is quarantined: its self-test fails: the GPU"):
        carried_out(database, run, a_machine(answer=third), diagnose=SICK.why_unfit)
    left, tried = stored(database, run)
    assert (left.status, left.deaths, left.worker, left.error) == (RunStatus.QUEUED, 1, None, None)
    assert len(tried) == 3
    with database.begin() as connection:
        heir = runs.claim(connection, "heir", device="cpu")
    assert heir is not None
    machine = a_machine()
    ended, conclusion = carried_out(database, heir, machine)
    assert ended.status is RunStatus.FINISHED
    assert words(conclusion.plan.knobs) == GRAPH
    assert len(machine.jobs) == 3 + PROCESSES, "what was tried is not tried again"


def test_a_sticky_error_of_a_gpu_that_works_is_a_failed_trial(database: Database) -> None:
    ended, _ = carried_out(database, claimed(database), a_machine(answer=third), diagnose=WELL.why_unfit)
    assert ended.status is RunStatus.FINISHED
    assert [trial.number for trial in stored(database, ended)[1] if trial.failure] == [2]


def test_a_step_that_breaks_gpus_before_its_first_trial_does_not_go_from_one_to_the_next(database: Database) -> None:
    run = claimed(database, workload="zoo:mlp")
    machine = a_machine()
    machine.inspect = lambda *_, **__: failure("CUDA error: GPU is lost")
    for number in range(runs.MAX_DEATHS):
        with pytest.raises(GpuError):
            carried_out(database, run, machine, diagnose=SICK.why_unfit)
        assert stored(database, run)[0].deaths == number + 1
        with database.begin() as connection:
            heir = runs.claim(connection, "heir", device="cpu")
        run = heir or run
    assert heir is None, "it was given up"
    assert stored(database, run)[0].status is RunStatus.FAILED


def test_a_database_that_is_full_once_costs_nothing_where_there_is_patience(database: Database, caplog) -> None:
    run = claimed(database)
    plant("database-full@4")
    ended, conclusion = carried_out(database, run, a_machine(), patience_s=30)
    assert "planted fault database-full strikes" in caplog.text
    assert ended.status is RunStatus.FINISHED
    assert words(conclusion.plan.knobs) == GRAPH


def test_a_database_that_stays_full_ends_the_run_with_its_trials_kept(database: Database, caplog) -> None:
    run = claimed(database)
    plant("database-full@7+")
    with pytest.raises(StoreFullError, match="has no space left"):
        carried_out(database, run, a_machine())
    assert "planted fault database-full strikes" in caplog.text
    left, tried = stored(database, run)
    assert left.status is RunStatus.RUNNING
    assert [trial.number for trial in tried] == list(range(left.trials))
    assert tried


def test_a_database_that_is_away_is_written_again(database: Database, caplog) -> None:
    run = claimed(database)
    plant("database-away@3")
    ended, _ = carried_out(database, run, a_machine(), patience_s=30)
    assert "planted fault database-away strikes" in caplog.text
    assert ended.status is RunStatus.FINISHED


def test_a_heart_that_stops_has_its_run_taken_over_and_writes_nothing_more(database: Database, caplog, monkeypatch):
    monkeypatch.setattr(run_execution, "BEAT_S", 0.01)
    run = claimed(database)
    plant("heart-stop@1+")
    with run_execution.Heartbeat(database, run, 60).running():
        while "planted fault heart-stop strikes" not in caplog.text:
            pass
    assert stored(database, run)[0].heartbeat_at == run.heartbeat_at


def test_a_worker_is_killed_at_an_event() -> None:
    script = (
        "from tuner import fault_injection as faults; from tuner.worker import run_execution as worker\n"
        "from tests.store.samples import a_run\n"
        "from tests.unit.tuner.machine import Machine\n"
        "faults.plant(faults.parsed('worker-kill=tried@2'))\n"
        "writer = type('L', (), {'check': lambda s: None, 'write': lambda s, entry: None})()\n"
        "worker._follow(Machine().tuning(a_run(budget_trials=3)).steps(), writer, print)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert done.stdout.count("Tried(") == 1
    assert "planted fault worker-kill=tried strikes" in done.stderr


def small_disk(folder: Path, command: list[str]) -> subprocess.CompletedProcess[str]:
    """The command with a disk of 3 MB at the folder; skips where this user may not mount one."""
    mount = f'mount -t tmpfs -o size=3m none "{folder}" || exit 99; exec "$@"'
    given = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount, "sh", *command]
    try:
        done = subprocess.run(
            given, capture_output=True, text=True, check=False, timeout=120, cwd=Path(__file__).parents[2]
        )
    except FileNotFoundError:
        pytest.skip("there is no unshare")
    if done.returncode == 99 or done.stderr.startswith("unshare:"):
        pytest.skip(f"no disk can be mounted here: {done.stderr:.100}")
    return done


def test_a_run_on_a_disk_of_3_mb_that_fills_up_keeps_what_it_has_and_says_why(tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    folder.mkdir()
    done = small_disk(folder, [sys.executable, "-m", "tests.store.full_disk", str(folder)])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "has no space left" in done.stdout
    assert "Traceback" not in done.stderr
    assert os.listdir(folder) == []
