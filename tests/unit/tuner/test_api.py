import contextlib
import json
import math
import os
import signal
import tempfile
from datetime import datetime
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kitsune.base.durations import seconds_of
from kitsune.errors import BaselineError, ExportError, SettingsError, UnfitError, WorkloadError
from tests.unit.tuner.machine import GRAPH, GRAPH_WINS, SMALL, Machine, failure
from tuner import api
from tuner.api import new_run, tune, tune_workload
from tuner.records import FailureKind, RunStatus
from tuner.store.engine import open_database
from tuner.store.queries import plans, runs, trials
from tuner.tuning.events import Started, Tried


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/k.db"


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """The children of these tests run on it."""
    made = Machine(step_ms=GRAPH_WINS, inapplicable=SMALL)
    monkeypatch.setattr(api, "Tuning", made.make)
    return made


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which temporary files are made."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def left_in(folder: Path) -> list[str]:
    """What of ours lies there; torch makes a folder of its own the first time that it exports."""
    return [path.name for path in folder.iterdir() if not path.name.startswith("torchinductor")]


def live() -> tuple[torch.nn.Module, object, torch.optim.Optimizer, tuple[torch.Tensor, torch.Tensor]]:
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, torch.nn.functional.mse_loss, optimizer, (torch.randn(8, 4), torch.randn(8, 2))


# Budgets and names ----------------------------------------------------------------------------------------------------


@given(
    st.floats(1e-3, 1e6).map(lambda value: f"{value:.6f}") | st.integers(1, 10**9).map(str),
    st.sampled_from([("", 1), ("s", 1), ("m", 60), ("h", 3600)]),
    st.sampled_from(["", " ", "\t"]),
)
def test_a_budget_is_a_number_and_a_unit(number, unit, space):
    letter, seconds = unit
    assert seconds_of(f"{space}{number}{space}{letter}{space}", "budget") == float(number) * seconds


@given(st.integers(1, 10**9) | st.floats(1e-3, 1e9).filter(lambda value: "e" not in str(value)))
def test_a_budget_may_be_a_number(seconds):
    assert seconds_of(seconds, "budget") == seconds


@given(st.text())
def test_any_text_is_a_positive_time_or_refused(text):
    with contextlib.suppress(SettingsError):
        assert 0 < seconds_of(text, "budget") < math.inf


NO_BUDGETS = ["", "5 minutes", "-5m", "0", "0.0h", "5w", "1e3", "nan", "inf", "True", "9" * 400, "9" * 308 + "h", "٣m"]


@pytest.mark.parametrize("budget", NO_BUDGETS)
def test_no_budget(budget):
    with pytest.raises(SettingsError, match="use seconds or a time"):
        seconds_of(budget, "budget")


@pytest.mark.parametrize("trials", [0, -1, 2.5, "3"])
def test_a_number_of_trials_that_makes_no_sense(trials):
    with pytest.raises(SettingsError, match=r"trials is .*at least 1"):
        new_run("zoo:mlp", "cpu", trials=trials)


@pytest.mark.parametrize(
    ("given_", "budget_trials", "budget_s"),
    [
        ({}, None, None),  # a first look at the model will tell
        ({"trials": 3}, 3, None),
        ({"budget": "5m"}, None, 300.0),
        ({"trials": 3, "budget": 90}, 3, 90.0),
    ],
)
def test_a_new_run(given_, budget_trials, budget_s):
    run = new_run("zoo:mlp", "cpu", seed=4, **given_)
    assert (run.budget_trials, run.budget_s, run.seed) == (budget_trials, budget_s, 4)
    assert (run.workload, run.device, run.status) == ("zoo:mlp", "cpu", RunStatus.QUEUED)
    assert run.memory_limit_bytes is None
    assert new_run("zoo:mlp", "cpu", memory_limit="2GiB").memory_limit_bytes == 2**31
    assert abs((run.created_at - datetime.now(run.created_at.tzinfo)).total_seconds()) < 60


# A workload -----------------------------------------------------------------------------------------------------------


def test_a_workload_is_tuned_and_everything_is_kept(url, machine):
    told = []
    result = tune_workload("zoo:mlp", device="cpu", trials=8, seed=3, database=url, tell=told.append)
    assert isinstance(told[0], Started)
    assert [event.trial for event in told if isinstance(event, Tried)] == list(result.trials)
    assert result.run.status is RunStatus.FINISHED
    assert {job.workload for job in machine.jobs} == {"zoo:mlp"}
    with open_database(url) as database, database.read() as connection:
        assert runs.get(connection, result.run.id) == result.run
        assert tuple(trials.list_of(connection, result.run.id)) == result.trials
        assert plans.get(connection, result.run.plan_id) == result.plan


def test_the_summary_is_json_with_what_the_contract_names(url, machine):
    machine.answer = lambda number, _: failure(kind=FailureKind.OUT_OF_MEMORY) if number == 3 else None
    result = tune_workload("zoo:mlp", device="cpu", trials=8, database=url)
    summary = json.loads(json.dumps(result.summary()))
    assert (summary["run_id"], summary["plan_id"]) == (result.run.id, result.plan.plan_id)
    assert (summary["verdict"], summary["trials"], summary["failed"]) == ("faster", 8, 1)
    assert set(summary["speedup"]) == {"median", "low", "high"}
    assert summary["baseline_step_ms"] / summary["step_ms"] == pytest.approx(summary["speedup"]["median"], rel=0.01)
    assert summary["peak_bytes"] == result.plan.evidence.peak_bytes
    assert summary["plan"] == result.plan.to_json()
    assert summary["interrupted"] is False


def test_the_database_is_in_the_home_unless_told_otherwise(kitsune_home, machine):
    tune_workload("zoo:mlp", device="cpu", trials=1)
    assert (kitsune_home / "kitsune.db").is_file()


@pytest.mark.parametrize(
    ("given_", "error"),
    [
        ({"spec": "zoo:nosuch"}, WorkloadError),
        ({"device": "cuda:99"}, UnfitError),
        ({"budget": "soon"}, SettingsError),
        ({"trials": 0}, SettingsError),
    ],
)
def test_nonsense_is_refused_before_anything_is_stored(given_, error, tmp_path, machine):
    path = tmp_path / "k.db"
    with pytest.raises(error):
        tune_workload(**{"spec": "zoo:mlp", "device": "cpu", "database": f"sqlite:///{path}", **given_})
    assert not path.exists()
    assert machine.jobs == []


def test_an_interrupted_run_says_so(url, machine):
    def interrupt(number, _):
        if number == 5:
            raise KeyboardInterrupt

    machine.answer = interrupt
    result = tune_workload("zoo:mlp", device="cpu", database=url)
    assert result.interrupted
    assert result.summary()["interrupted"] is True
    assert result.run.status is RunStatus.FINISHED


# A live model ---------------------------------------------------------------------------------------------------------


def test_a_live_model_travels_as_an_archive_that_is_removed(url, machine, temporary):
    seen = []
    machine.answer = lambda _, job: seen.append((Path(job.workload).is_file(), job.workload))
    plan = tune(*live(), trials=5, database=url)
    assert plan.evidence is not None
    assert {exists for exists, _ in seen} == {True}
    assert {Path(path).suffix for _, path in seen} == {".ksn"}
    assert left_in(temporary) == []
    with open_database(url) as database, database.read() as connection:
        (run,) = runs.page(connection).runs
    assert (run.workload, run.plan_id) == (runs.LIVE, plan.plan_id)


def test_the_archive_is_removed_when_tuning_fails(url, machine, temporary):
    machine.inspect = lambda *_, **__: failure("no such luck")
    with pytest.raises(BaselineError, match="no such luck"):
        tune(*live(), trials=5, database=url)
    assert left_in(temporary) == []


def test_a_model_that_cannot_travel_is_told_the_way_out(url, machine, temporary):
    class Branches(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x) if x.sum() > 0 else super().forward(-x)

    model = Branches(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ExportError, match=r"(?s)kitsune tune .*\.py:") as caught:
        tune(model, torch.nn.functional.mse_loss, optimizer, (torch.randn(8, 4), torch.randn(8, 2)), database=url)
    assert "test_api.py" in str(caught.value), "the line is named"
    assert machine.jobs == []
    assert left_in(temporary) == []


def test_a_live_model_that_cannot_be_trained_step_by_step(url, machine):
    model, loss_fn, _, batch = live()
    with pytest.raises(WorkloadError, match="model is a NoneType"):
        tune(None, loss_fn, None, batch, database=url)
    with pytest.raises(WorkloadError, match="LBFGS evaluates a closure"):
        tune(model, loss_fn, torch.optim.LBFGS(model.parameters()), batch, database=url)
    frozen = model.requires_grad_(False)
    with pytest.raises(WorkloadError, match="every parameter of the model is frozen"):
        tune(frozen, loss_fn, torch.optim.SGD(frozen.parameters(), lr=0.1), batch, database=url)
    assert machine.jobs == []


@pytest.mark.parametrize("given_", [{"budget": "soon"}, {"trials": 0}])
def test_a_bad_budget_is_told_before_the_model_is_exported(given_, machine, monkeypatch):
    monkeypatch.setattr(api, "to_archive", lambda _: pytest.fail("it was exported"))
    with pytest.raises(SettingsError):
        tune(*live(), **given_)


def test_the_off_switch(url, machine, monkeypatch):
    monkeypatch.setenv("KITSUNE_DISABLE", "1")
    monkeypatch.setattr(api, "to_archive", lambda _: pytest.fail("it was exported"))
    with pytest.raises(UnfitError, match="KITSUNE_DISABLE is set"):
        tune(*live(), database=url)
    with pytest.raises(UnfitError, match="KITSUNE_DISABLE is set"):
        tune_workload("zoo:mlp", device="cpu", database=url)
    assert machine.jobs == []


def test_a_live_model_is_tuned_to_the_end_when_ctrl_c_is_pressed_between_two_trials(url, machine):
    def answer(number, _):
        if number == 4:
            os.kill(os.getpid(), signal.SIGINT)

    machine.answer = answer
    before = signal.getsignal(signal.SIGINT)
    assert tune(*live(), trials=12, database=url).evidence is not None
    assert len(machine.jobs) < 12
    assert signal.getsignal(signal.SIGINT) is before


def test_the_children_find_the_file_from_every_folder(url, machine, tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)
    result = tune_workload("train.py:make", device="cpu", trials=1, database=url)
    assert {job.workload for job in machine.jobs} == {f"{tmp_path}/train.py:make"}
    assert result.run.workload == "train.py:make"


def test_the_plan_of_a_live_model_is_the_confirmed_one(url, machine):
    plan = tune(*live(), trials=8, database=url)
    assert plan.knobs == dict(item.split("=") for item in GRAPH.split(", "))
