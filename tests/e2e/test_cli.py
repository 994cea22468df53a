"""`kitsune` as users run it: a process of its own, on the CPU, with a KITSUNE_HOME of its own.

What mostly waits (a model that hangs, a database that is locked) is started first and looked at last.
"""

import json
import signal
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kitsune.plan import Plan
from tests.e2e.command import Command
from tuner.records import Run, RunStatus, Trial, Verdict

TINY = "zoo:mlp?size=tiny"

WORKLOADS = """
import os, time
import torch
from kitsune import Workload


def workload(behave):
    class Model(torch.nn.Linear):
        def forward(self, x):
            behave()
            return super().forward(x)

    model = Model(4, 2)
    batch = torch.randn(8, 4), torch.randn(8, 2)
    return Workload(model, torch.nn.functional.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1), batch)


def raises():
    def behave():
        raise ValueError("no such luck")
    return workload(behave)


def hangs():
    open(os.environ["PID_FILE"], "w").write(str(os.getpid()))
    return workload(lambda: time.sleep(600))
"""


@pytest.fixture
def kitsune(tmp_path) -> Iterator:
    """Starts commands in the folder of the test, and leaves none behind."""
    started = []

    def start(*words: str, **environment: str) -> Command:
        started.append(Command(tmp_path, *words, **environment))
        return started[-1]

    (tmp_path / "work.py").write_text(WORKLOADS)
    yield start
    for command in started:
        command.close()


@pytest.fixture(scope="module", autouse=True)
def waiting(tmp_path_factory) -> Iterator[dict[str, Command]]:
    """Commands that take long without using the machine."""
    hanging, locked = tmp_path_factory.mktemp("hanging"), tmp_path_factory.mktemp("locked")
    (hanging / "work.py").write_text(WORKLOADS)
    lock = sqlite3.connect(locked / "busy.db", isolation_level=None)
    lock.execute("BEGIN EXCLUSIVE")
    commands = {
        "hanging": Command(hanging, "tune", "work.py:hangs", "--budget", "1s", "--json", PID_FILE=str(hanging / "pid")),
        "locked": Command(locked, "runs", "--database", f"sqlite:///{locked / 'busy.db'}", "--json"),
    }
    yield commands
    for command in commands.values():
        command.close()
    lock.close()


def error_of(out: str) -> tuple[str, str]:
    """Type and message of the one object on stdout."""
    assert len(out.splitlines()) == 1
    found = json.loads(out)["error"]
    return found["type"], found["message"]


def is_alive(pid_file: Path) -> bool:
    """Whether the process is there, and more than a zombie that nobody has reaped."""
    try:
        state = Path(f"/proc/{int(pid_file.read_text())}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


# The main job ---------------------------------------------------------------------------------------------------------


@pytest.mark.timeout(500)
def test_tune_keeps_a_plan_and_everything_that_was_tried(kitsune, tmp_path):
    # Without a C++ compiler the trial that compiles ends with a reason instead of after a minute.
    tuning = kitsune("tune", TINY, "--trials", "2", "--json", "--out", "plan.json", CXX="/no/compiler")
    code, out, err = tuning.wait(400)
    assert code == 0, err
    assert len(out.splitlines()) == 1
    assert "\x1b" not in out + err
    assert "[2 of 2] " in err
    found = json.loads(out)
    assert found["verdict"] in set(Verdict) - {Verdict.SLOWER}
    for interval in (found["speedup"], found["speedup_over_eager"]):
        assert interval["low"] <= interval["median"] <= interval["high"]
    assert min(found["baseline_step_ms"], found["step_ms"]) > 0
    assert (found["trials"], found["interrupted"]) == (2, False)
    assert {"run_id", "plan_id", "baseline", "peak_bytes", "failed", "plan"} <= set(found)

    plan = Plan.load(tmp_path / "plan.json")
    assert Plan.from_json(found["plan"]) == plan
    assert plan.plan_id == found["plan_id"]
    assert plan.evidence.run_id == found["run_id"]

    code, out, _ = kitsune("runs", "show", found["run_id"], "--json").wait()
    assert code == 0
    stored = json.loads(out)
    run = Run.model_validate(stored["run"])
    trials = [Trial.model_validate(trial) for trial in stored["trials"]]
    assert (run.status, run.workload, run.plan_id) == (RunStatus.FINISHED, TINY, plan.plan_id)
    assert [trial.number for trial in trials] == list(range(len(trials)))
    assert sum(trial.source.is_search for trial in trials) == 2
    assert all(trial.measurement or trial.failure for trial in trials)
    assert found["failed"] == sum(trial.failure is not None for trial in trials)
    reasons = [*run.inapplicable.values(), *(trial.failure.reason for trial in trials if trial.failure)]
    assert any("C++ compiler" in reason for reason in reasons)
    assert Plan.from_json(stored["plan"]) == plan

    assert Plan.from_json(json.loads(kitsune("runs", "plan", "last").wait()[1])) == plan
    assert json.loads(kitsune("plan", "check", "plan.json", "--device", "cpu", "--json").wait()[1])["match"] == "exact"


# Ctrl-C ---------------------------------------------------------------------------------------------------------------


@pytest.mark.minutes
@pytest.mark.timeout(400)
def test_ctrl_c_gives_the_best_so_far(kitsune):
    tuning = kitsune("tune", TINY, "--trials", "50", "--device", "cpu", "--json", CXX="/no/compiler")
    tuning.wait_for("[1 of 50] ")
    tuning.process.send_signal(signal.SIGINT)
    code, out, err = tuning.wait()
    found = json.loads(out)
    assert code == 130
    assert found["interrupted"] is True
    assert found["trials"] < 50
    assert Plan.from_json(found["plan"]).plan_id == found["plan_id"]
    assert "Ctrl-C once more" in err
    _, out, _ = kitsune("runs", "show", "last", "--json").wait()
    assert Run.model_validate(json.loads(out)["run"]).status is RunStatus.FINISHED


@pytest.mark.timeout(400)
@pytest.mark.minutes
def test_ctrl_c_twice_stops_at_once_and_what_was_tried_is_kept(kitsune):
    tuning = kitsune("tune", TINY, "--trials", "50", "--json")
    tuning.wait_for("[1 of 50] ")
    tuning.process.send_signal(signal.SIGINT)
    tuning.wait_for("measuring the best afresh")
    tuning.process.send_signal(signal.SIGINT)
    code, out, _ = tuning.wait(40)
    assert (code, error_of(out)[0]) == (130, "Interrupted")
    _, out, _ = kitsune("runs", "show", "last", "--json").wait()
    stored = json.loads(out)
    assert stored["run"]["status"] == "cancelled"  # no other process goes on with it
    assert len(stored["trials"]) >= 1


def test_sigterm_ends_the_measuring_process_too(kitsune, tmp_path):
    pid_file = tmp_path / "pid"
    tuning = kitsune("tune", "work.py:hangs", PID_FILE=str(pid_file))
    end = time.monotonic() + 120
    while not (pid_file.exists() and pid_file.read_text()):
        assert time.monotonic() < end
        time.sleep(0.05)
    assert is_alive(pid_file)
    tuning.process.terminate()
    code, out, _ = tuning.wait(40)
    assert (code, out) == (143, "")
    assert not is_alive(pid_file)


# Bad input ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("workload", "kind", "words"),
    [
        # tests/unit/tuner/commands/test_tune.py has these within one process
        pytest.param("zoo:mpl", "WorkloadError", "did you mean 'mlp'", marks=pytest.mark.minutes),
        pytest.param("broken.ksn", "ArchiveError", "too short to be a zip file", marks=pytest.mark.minutes),
        ("work.py:raises", "BaselineError", "no such luck"),
    ],
)
def test_a_workload_that_cannot_be_tuned(workload, kind, words, kitsune, tmp_path):
    (tmp_path / "broken.ksn").write_bytes(b"PK\x03\x04 and nothing else")
    code, out, err = kitsune("tune", workload, "--device", "cpu", "--json").wait()
    found, message = error_of(out)
    assert (code, found) == (4, kind)
    assert words in message
    assert err.endswith(f"Error: {message}\n")
    if kind == "BaselineError":  # it came as far as a run, and the run is not lost
        stored = json.loads(kitsune("runs", "show", "last", "--json").wait()[1])["run"]
        assert (stored["status"], stored["error"]) == ("failed", message)


def test_a_database_of_another_kind(kitsune, tmp_path):
    (tmp_path / "text.db").write_text("dear diary, " * 100)
    with sqlite3.connect(tmp_path / "foreign.db") as foreign:
        foreign.execute("CREATE TABLE kitsune_runs (distance REAL)")
    foreign.close()
    for name, kind, words in (
        ("text.db", "StoreError", "is not an SQLite database"),
        ("foreign.db", "SchemaError", "something else made them"),
    ):
        code, out, _ = kitsune("runs", "--database", f"sqlite:///{tmp_path / name}", "--json").wait()
        found, message = error_of(out)
        assert (code, found) == (11, kind)
        assert words in message


@pytest.mark.minutes  # tests/unit/tuner/commands/test_tune.py has it within one process
def test_tune_refuses_a_database_before_it_measures_anything(kitsune, tmp_path):
    (tmp_path / "text.db").write_text("dear diary, " * 100)
    code, out, err = kitsune("tune", TINY, KITSUNE_DATABASE_URL=f"sqlite:///{tmp_path / 'text.db'}").wait()
    assert (code, out) == (11, "")
    assert err.startswith("Error: the database ")


def test_a_database_that_stays_locked(waiting):
    code, out, _ = waiting["locked"].wait()
    kind, message = error_of(out)
    assert (code, kind) == (11, "StoreBusyError")
    assert "try again" in message


def test_a_model_that_hangs_is_killed(waiting):
    code, out, _ = waiting["hanging"].wait()
    kind, message = error_of(out)
    assert (code, kind) == (4, "BaselineError")
    assert "limit of 30 s" in message
    assert not is_alive(waiting["hanging"].home.parent / "pid")
