"""The tuner's commands in this process: stored runs from a database of the test's own, tuning with a stand-in."""

import json
import os
import signal
import time
from datetime import UTC, datetime

import pytest

from kitsune.base import optional_imports
from kitsune.cli import main, output
from kitsune.errors import BaselineError, NoTrialError
from kitsune.plan import Plan
from kitsune.submission.format.archive import Archive
from tests.store.samples import a_plan, a_run, after, an_environment
from tests.unit.tuner.sample_run import BF16, INSPECTED, RUN, STREAMED, TRIALS, a_failure, a_trial, ablations
from tuner.api import Result
from tuner.commands import tune
from tuner.planning.ablation import Ablation
from tuner.records import (
    Run,
    RunStatus,
    Source,
    Trial,
    Verdict,
)
from tuner.search.proposal import Proposal
from tuner.settings import Settings
from tuner.store import tables
from tuner.store.engine import open_database
from tuner.store.queries import runs, trials
from tuner.tuning.events import Ablating, Confirming, Started, Tried, Trying


@pytest.fixture
def store():
    """The database that the commands open by default."""
    with open_database(Settings.from_environment().database_url) as database:
        yield database


def stored(database, run: Run, *tried: Trial, plan: Plan | None = None) -> Run:
    """The run as a worker would have left it: finished with a plan, or still running."""
    with database.begin() as connection:
        runs.add(connection, run)
        claimed = runs.claim_one(connection, run.id, "worker")
        claimed = runs.note_inspection(
            connection,
            claimed,
            fingerprint="f" * 64,
            environment=an_environment(),
            inapplicable={"layout=channels_last": "the model has no convolution"},
        )
        for trial in tried:
            trials.add(connection, claimed, trial.model_copy(update={"run_id": run.id}))
        if plan is None:
            return claimed
        return runs.finish(connection, claimed, plan=plan, verdict=Verdict.FASTER)


# runs -----------------------------------------------------------------------------------------------------------------


def test_an_empty_database_teaches_the_first_command(call):
    code, out, err = call("runs")
    assert (code, out) == (0, "")
    assert "kitsune tune" in err
    assert json.loads(call("runs", "list", "--json")[1]) == {"runs": [], "after": None}


def test_list_pages_through_the_runs_newest_first(call, store):
    ids = [stored(store, a_run(created_at=after(number)), plan=a_plan(1.5 + number)).id for number in range(3)]
    first = json.loads(call("runs", "--limit", "2", "--json")[1])
    assert [run["id"] for run in first["runs"]] == [ids[2], ids[1]]
    rest = json.loads(call("runs", "list", "--after", first["after"], "--json")[1])
    assert [run["id"] for run in rest["runs"]] == [ids[0]]
    assert rest["after"] is None
    code, out, err = call("runs", "list", "--limit", "2")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == ["run", ids[2], ids[1]]
    assert "3.50x" in out
    assert first["after"] in err


def test_list_filters_by_status(call, store):
    done = stored(store, a_run(), plan=a_plan())
    stored(store, a_run())
    found = json.loads(call("runs", "list", "--status", "finished", "--json")[1])["runs"]
    assert [run["id"] for run in found] == [done.id]
    assert call("runs", "list", "--status", "cancelled")[:2] == (0, "")
    assert call("runs", "list", "--status", "sleeping")[0] == 2


def test_one_unreadable_plan_does_not_hide_the_list(call, store):
    run = stored(store, a_run(), plan=a_plan())
    with store.begin() as connection:
        connection.execute(tables.plans.update().values(document={}))
    assert run.id in call("runs")[1]
    code, out, _ = call("runs", "show", run.id, "--json")
    assert (code, json.loads(out)["error"]["type"]) == (4, "PlanError")


def test_show_tells_what_was_tried_and_what_was_not_and_why(call, store):
    tried = [a_trial(0, {}, Source.BASELINE, 1.0), a_trial(1, BF16), a_failure(2, "needs 90 GiB")]
    run = stored(store, a_run(workload="zoo:gpt2_small", budget_trials=3), *tried, plan=a_plan())
    code, out, err = call("runs", "show", run.id)
    assert (code, err) == (0, "")
    for text in (
        run.id,
        "zoo:gpt2_small",
        "noise floor",
        "precision=bf16",
        "2.000",
        "1.50x",
        "1.49-1.51",
        "out of memory, warmup: needs 90 GiB",
        "layout=channels_last",
        "the model has no convolution",
        "1.50x faster than the best stock configuration",
    ):
        assert text in out
    assert call("runs", "show", "last") == (code, out, err)


def test_show_as_json_holds_the_records(call, store):
    run = stored(store, a_run(), a_trial(0, BF16), plan=a_plan())
    found = json.loads(call("runs", "show", run.id, "--json")[1])
    assert Run.model_validate(found["run"]) == run
    assert [Trial.model_validate(trial).knobs for trial in found["trials"]] == [BF16]
    assert Plan.from_json(found["plan"]).plan_id == run.plan_id


#: What `ablations` say, a line each.
GIVEN = (
    "What each choice gives (a step takes 10.00 ms as given, 4.000 ms by the plan; 16 blocks):",
    "precision=bf16 +3.000 +3.000 to +3.000 50%",
    "capture=step, without streams +0.750 +0.750 to +0.750 12%",
    "streams=4 +1.500 +1.500 to +1.500 25%",
    "interaction: what these leave +0.750 +0.750 to +0.750 12%",
    "all together +6.000 +6.000 to +6.000 100%",
)


def in_words(out: str) -> list[str]:
    return [" ".join(line.split()) for line in out.splitlines()]


def test_show_tells_what_each_choice_gives(call, store):
    run = stored(store, a_run(), a_trial(0, STREAMED.knobs), *ablations(1), plan=STREAMED)
    assert set(GIVEN) <= set(in_words(call("runs", "show", run.id)[1]))
    found = Ablation.model_validate(json.loads(call("runs", "show", run.id, "--json")[1])["ablation"])
    assert [(part.knob, part.saved_ms.median, part.share) for part in found.contributions] == [
        ("precision", 3.0, 0.5),
        ("capture", 0.75, 0.125),
        ("streams", 1.5, 0.25),
    ]
    assert found.unmeasured == {}


def test_show_of_a_run_without_an_ablation_says_nothing_of_it(call, store):
    run = stored(store, a_run(), a_trial(0, STREAMED.knobs), plan=STREAMED)
    assert "each choice" not in call("runs", "show", run.id)[1]
    assert json.loads(call("runs", "show", run.id, "--json")[1])["ablation"] is None


def test_show_of_a_run_that_failed_ends_with_its_error(call, store):
    with store.begin() as connection:
        runs.add(connection, a_run(id="broken", status=RunStatus.FAILED, error="the workload fails as given: oh"))
    code, out, _ = call("runs", "show", "broken")
    assert code == 0
    assert out.splitlines()[-1] == "the workload fails as given: oh"


def test_text_from_the_database_steers_no_terminal(call, store):
    run = stored(store, a_run(workload="zoo:\x1b[2Jx"), a_failure(0, "a \x1b]0;title\x07 b"))
    assert "\x1b" not in call("runs", "show", run.id)[1]
    assert "\x1b" not in call("runs")[1]


def test_a_cursor_that_is_none_is_a_bad_argument(call):
    code, out, _ = call("runs", "list", "--after", "zzz", "--json")
    assert (code, json.loads(out)["error"]["type"]) == (2, "CursorError")


@pytest.mark.parametrize("words", [["show", "nope"], ["plan", "nope"], ["show", "last"]])
def test_a_run_that_is_not_there(words, call):
    code, out, _ = call("runs", *words, "--json")
    assert (code, json.loads(out)["error"]["type"]) == (4, "NotFoundError")


def test_plan_goes_to_stdout_or_into_a_file(call, store, tmp_path):
    plan = a_plan()
    run = stored(store, a_run(), plan=plan)
    assert Plan.from_json(json.loads(call("runs", "plan", run.id)[1])) == plan
    path = tmp_path / "plan.json"
    assert call("runs", "plan", "last", "--out", str(path))[:2] == (0, "")
    assert Plan.load(path) == plan
    code, out, _ = call("runs", "plan", run.id, "--out", str(tmp_path / "no" / "plan.json"), "--json")
    assert (code, json.loads(out)["error"]["type"]) == (2, "SettingsError")


def test_a_run_without_a_plan_says_where_it_stands(call, store):
    run = stored(store, a_run())
    code, _, err = call("runs", "plan", run.id)
    assert code == 4
    assert "it is running" in err


def test_a_run_whose_worker_has_vanished_is_lost_and_not_running(call, store):
    live = stored(store, a_run(workload="live"))
    long_ago = datetime(2024, 1, 31, tzinfo=UTC)
    gone = {"status": RunStatus.RUNNING, "worker": "host:1", "attempt": 1, "lease_until": long_ago}
    lost = [a_run(workload=workload, **gone) for workload in ("zoo:mlp", "train.py:make")]
    with store.begin() as connection:
        for run in lost:
            runs.add(connection, run)
    shown = {line.split()[0]: line.split()[3] for line in call("runs")[1].splitlines()}
    assert shown == {"run": "status", live.id: "running", lost[0].id: "lost", lost[1].id: "lost"}
    assert "No plan: the run is running." in call("runs", "show", live.id)[1]
    for run, what_next in zip(lost, ("the next worker goes on with it", "start it again"), strict=True):
        out = call("runs", "show", run.id)[1]
        assert "lost (host:1, attempt 1)" in out
        assert f"silent beyond 2024-01-31 00:00:00 UTC; {what_next}." in out.replace("\n", " ")
    assert json.loads(call("runs", "show", lost[0].id, "--json")[1])["run"]["status"] == "running"


def test_an_option_before_the_subcommand_is_refused_rather_than_ignored(call):
    code, out, _ = call("runs", "--json", "show", "last")
    assert (code, json.loads(out)["error"]["type"]) == (2, "UsageError")


def test_another_database_can_be_named(call, tmp_path):
    url = f"sqlite:///{tmp_path / 'other.db'}"
    with open_database(url) as database:
        run = stored(database, a_run(), plan=a_plan())
    assert run.id in call("runs", "--database", url)[1]
    assert call("runs")[1] == ""


# export ---------------------------------------------------------------------------------------------------------------


def test_export_writes_an_archive_and_names_it(call, tmp_path):
    path = tmp_path / "mlp.ksn"
    code, out, _ = call("export", "zoo:mlp?size=tiny", "--out", str(path), "--json")
    found = json.loads(out)
    assert code == 0
    assert found == {"fingerprint": Archive.load(path).fingerprint, "bytes": path.stat().st_size, "file": str(path)}
    again = call("export", "zoo:mlp?size=tiny", "--out", str(path))[1]
    assert found["fingerprint"] in again


def test_what_a_workload_prints_is_not_data(call, tmp_path):
    file = tmp_path / "loud.py"
    file.write_text("print('loading')\ndef make():\n    print('making')\n    raise ValueError('no such luck')\n")
    code, out, err = call("export", f"{file}:make", "--out", str(tmp_path / "x.ksn"), "--json")
    assert (code, json.loads(out)["error"]["type"]) == (4, "WorkloadError")
    assert "no such luck" in err
    assert "making" in err


def test_what_goes_to_stdout_past_python_is_not_data_either(tmp_path, capfd):
    file = tmp_path / "loud.py"
    file.write_text("import os\nos.write(1, b'loading')\ndef make():\n    os.write(1, b'making')\n")
    assert main.run(["export", f"{file}:make", "--out", str(tmp_path / "x.ksn"), "--json"]) == 4
    out, err = capfd.readouterr()
    assert json.loads(out)["error"]["type"] == "WorkloadError"
    assert "loadingmaking" in err


@pytest.mark.parametrize(("spec", "code"), [("zoo:nope", 4), ("nope", 4), ("x.ksn", 4)])
def test_export_refuses_what_it_cannot_take(spec, code, call, tmp_path):
    ended, out, err = call("export", spec, "--out", str(tmp_path / "x.ksn"))
    assert (ended, out) == (code, "")
    assert err.startswith("Error: ")
    assert "Traceback" not in err


UNTRAINABLE = """
import torch
from kitsune import Workload

def workload(optimizer, model):
    batch = torch.randn(8, 4), torch.randn(8, 2)
    return Workload(model, torch.nn.functional.mse_loss, optimizer, batch)

def lbfgs():
    model = torch.nn.Linear(4, 2)
    return workload(torch.optim.LBFGS(model.parameters()), model)

def frozen():
    model = torch.nn.Linear(4, 2).requires_grad_(False)
    return workload(torch.optim.SGD(model.parameters(), lr=0.1), model)

def stranger():
    return workload(torch.optim.SGD(torch.nn.Linear(4, 2).parameters(), lr=0.1), torch.nn.Linear(4, 2))
"""


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("lbfgs", "LBFGS evaluates a closure several times a step"),
        ("frozen", "every parameter of the model is frozen"),
        ("stranger", "the optimizer holds none of the model's parameters"),
    ],
)
def test_export_of_what_is_no_training_step(function, words, call, tmp_path):
    (tmp_path / "train.py").write_text(UNTRAINABLE)
    code, out, _ = call("export", f"{tmp_path}/train.py:{function}", "--out", str(tmp_path / "x.ksn"), "--json")
    error = json.loads(out)["error"]
    assert (code, error["type"]) == (4, "WorkloadError")
    assert words in error["message"]


TRAINABLE = """
import torch
from kitsune import Workload

def make():
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Workload(model, torch.nn.functional.mse_loss, optimizer, (torch.randn(8, 4), torch.randn(8, 2)))
"""


@pytest.mark.parametrize(
    ("words", "name"),
    [(("export", "--out"), "step.ksn"), (("explain", "--device", "cpu", "--trace"), "step.json")],
    ids=["export", "explain"],
)
def test_a_file_lands_where_the_user_stands_though_the_workload_changes_its_folder(
    words, name, call, tmp_path, monkeypatch
):
    (tmp_path / "sub").mkdir()
    moves = "import os\nos.chdir(os.path.dirname(os.path.abspath(__file__)))\n"
    (tmp_path / "sub" / "train.py").write_text(moves + TRAINABLE)
    monkeypatch.chdir(tmp_path)
    code, _, err = call(words[0], "sub/train.py:make", *words[1:], name)
    assert code == 0, err
    assert (tmp_path / name).is_file()
    assert not (tmp_path / "sub" / name).exists()


def test_export_to_where_nothing_can_be_written(call, tmp_path):
    code, _, err = call("export", "zoo:mlp?size=tiny", "--out", str(tmp_path / "no" / "x.ksn"))
    assert code == 2
    assert "cannot be written" in err


# tune -----------------------------------------------------------------------------------------------------------------


def result(**changes: object) -> Result:
    return Result(**{"run": RUN, "plan": a_plan(), "trials": TRIALS, **changes})


@pytest.fixture
def tuning(monkeypatch):
    """Replaces the tuner by a function of the test; gives the options that reached it."""
    given: dict[str, object] = {}

    def replace(function):
        def tune_workload(spec, *, tell, interrupts, **options):
            given.update(options, spec=spec)
            tell(Started(RUN))
            return function(tell)

        monkeypatch.setattr(tune, "tune_workload", tune_workload)
        return given

    return replace


def test_tune_hands_its_options_down(call, tuning):
    given = tuning(lambda tell: result())
    before_s = time.monotonic()
    line = "tune zoo:mlp --trials 7 --budget 5m --device cpu --seed 3 --database sqlite:///x.db"
    assert call(*line.split())[0] == 0
    expected = {"trials": 7, "budget": "5m", "device": "cpu", "seed": 3, "database": "sqlite:///x.db"}
    assert before_s <= given.pop("begun_s") <= time.monotonic()
    assert given == {"spec": "zoo:mlp", **expected, "ablation": True}
    assert call(*line.split(), "--no-ablation")[0] == 0
    assert given["ablation"] is False


def test_tune_without_a_budget_leaves_the_default_to_the_tuner(call, tuning):
    given = tuning(lambda tell: result())
    call("tune", "zoo:mlp")
    assert (given["trials"], given["budget"], given["seed"]) == (None, None, 0)


def test_tune_prints_what_was_tried_and_what_was_found(call, tuning):
    tuning(lambda tell: result())
    code, out, err = call("tune", "zoo:mlp", "-q")
    assert (code, err) == (0, "")
    for text in (
        "noise floor",
        "out of memory, warmup: no luck",
        "1.50x faster than the best stock configuration (compile=default), 95 % interval 1.35-1.65; 1.50x over eager.",
        "autocast to bfloat16",
        "kitsune runs plan the-run --out plan.json",
        'kitsune.Plan.load("plan.json")',
        "kitsune.TrainStep(model, loss_fn, optimizer, plan=plan)",
    ):
        assert text in out


def test_a_plan_that_changes_nothing_is_not_offered_for_training(call, tuning):
    kept = a_plan(1.0).evidence.model_copy(update={"verdict": "same"})
    tuning(lambda tell: result(plan=Plan(evidence=kept)))
    code, out, _ = call("tune", "zoo:mlp")
    assert code == 0
    assert "No gain found: keep your baseline." in out
    assert "TrainStep" not in out


def test_tune_as_json_is_the_summary_and_nothing_else(call, tuning, tmp_path):
    tuning(lambda tell: result())
    code, out, _ = call("tune", "zoo:mlp", "--json", "--out", str(tmp_path / "plan.json"))
    assert code == 0
    assert json.loads(out) == json.loads(json.dumps(result().summary()))
    assert Plan.load(tmp_path / "plan.json") == a_plan()


def test_an_output_that_cannot_be_written_is_told_before_anything_is_measured(call, tuning, tmp_path):
    given = tuning(lambda tell: result())
    code, _, err = call("tune", "zoo:mlp", "--out", str(tmp_path / "no" / "plan.json"))
    assert code == 2
    assert "cannot be written" in err
    assert given == {}


def test_an_output_that_becomes_unwritable_does_not_lose_the_plan(call, tuning, tmp_path):
    def vanish(tell):
        (tmp_path / "sub").rmdir()
        return result()

    (tmp_path / "sub").mkdir()
    tuning(vanish)
    code, out, err = call("tune", "zoo:mlp", "--out", str(tmp_path / "sub" / "plan.json"), "--json")
    assert (code, json.loads(out)["error"]["type"]) == (2, "SettingsError")
    assert "the plan is in the database" in err


@pytest.mark.parametrize(
    ("workload", "kind", "words"),
    [
        ("zoo:mpl", "WorkloadError", "did you mean 'mlp'"),
        ("broken.ksn", "ArchiveError", "too short to be a zip file"),
    ],
)
def test_tune_refuses_what_it_cannot_take(workload, kind, words, call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.ksn").write_bytes(b"PK\x03\x04 and nothing else")
    code, out, err = call("tune", workload, "--device", "cpu", "--json")
    error = json.loads(out)["error"]
    assert (code, error["type"]) == (4, kind)
    assert words in error["message"]
    assert err.endswith(f"Error: {error['message']}\n")


def test_tune_refuses_a_database_before_it_measures_anything(call, tmp_path):
    (tmp_path / "text.db").write_text("dear diary, " * 100)
    code, out, err = call("tune", "zoo:mlp?size=tiny", "--database", f"sqlite:///{tmp_path / 'text.db'}")
    assert (code, out) == (11, "")
    assert err.startswith("Error: the database ")


@pytest.mark.parametrize(("error", "code"), [(NoTrialError("all 2 trials failed"), 5), (BaselineError("it raises"), 4)])
def test_errors_of_the_tuner_keep_their_code(error, code, call, tuning):
    def fails(tell):
        raise error

    tuning(fails)
    ended, out, err = call("tune", "zoo:mlp", "--json")
    assert (ended, json.loads(out)["error"]["type"]) == (code, type(error).__name__)
    assert err.endswith(f"Error: {error}\n")


def press_ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.05)  # the handler runs in the main thread, between two of its instructions


def test_ctrl_c_during_the_search_prints_the_best_so_far(call, tuning):
    def interrupted(tell):
        tell(INSPECTED)
        tell(Trying(0, 2, Proposal({}, Source.BASELINE)))
        tell(Tried(TRIALS[0]))
        press_ctrl_c()
        return result(interrupted=True)

    tuning(interrupted)
    before = signal.getsignal(signal.SIGINT)
    code, out, err = call("tune", "zoo:mlp", "--json")
    assert (code, json.loads(out)["interrupted"]) == (130, True)
    assert "the best so far is measured afresh" in err
    assert signal.getsignal(signal.SIGINT) is before


def test_the_first_ctrl_c_does_not_break_the_confirmation_and_the_second_does(call, tuning):
    def confirming(tell):
        tell(Confirming(BF16))
        press_ctrl_c()
        return result()

    tuning(confirming)
    code, out, _ = call("tune", "zoo:mlp", "--json")
    found = json.loads(out)
    assert (code, found["interrupted"], found["plan_id"]) == (130, True, a_plan().plan_id)

    def twice(tell):
        tell(Confirming(BF16))
        press_ctrl_c()
        press_ctrl_c()
        return result()

    tuning(twice)
    code, out, err = call("tune", "zoo:mlp", "--json")
    assert (code, json.loads(out)["error"]["type"]) == (130, "Interrupted")
    assert "kitsune runs show the-run" in err


def test_tune_ends_with_what_each_choice_gives(call, tuning):
    given = result(plan=STREAMED, trials=(*TRIALS, *ablations(3)))
    tuning(lambda tell: given)
    code, out, _ = call("tune", "zoo:mlp")
    assert code == 0
    assert set(GIVEN) <= set(in_words(out))
    assert out.index("What each choice gives") > out.index("faster than the best stock configuration")
    found = json.loads(call("tune", "zoo:mlp", "--json")[1])
    assert found["ablation"] == json.loads(given.ablation.model_dump_json())
    assert found["trials"] == 2, "it is no search"


def test_one_ctrl_c_ends_the_ablation(call, tuning):
    def ablating(tell):
        tell(Ablating(("precision", "streams")))
        press_ctrl_c()
        return result(interrupted=True)

    tuning(ablating)
    code, out, err = call("tune", "zoo:mlp", "--json")
    assert (code, json.loads(out)["interrupted"]) == (130, True)
    assert "the plan without precision and without streams" in err
    assert "Stopping: the plan stays as it was measured." in err


def test_ctrl_c_where_no_run_is_under_way_yet_is_an_error_too(call, monkeypatch):
    def opening(spec, **_):
        press_ctrl_c()

    monkeypatch.setattr(tune, "tune_workload", opening)
    code, out, err = call("tune", "zoo:mlp", "--json")
    message = "stopped before there was a result"
    assert json.loads(out) == {"error": {"type": "Interrupted", "message": message, "exit_code": 130}}
    assert (code, err) == (130, f"Error: {message}\n")


@pytest.mark.parametrize(("code", "name"), [(143, "SIGTERM"), (129, "SIGHUP")])
def test_a_signal_that_ends_the_process_is_told_of_as_json(code, name, call, tuning):
    def stopped(tell):
        raise SystemExit(code)  # as the handler of the command line does

    tuning(stopped)
    ended, out, _ = call("tune", "zoo:mlp", "--json")
    message = f"stopped by {name}; what was tried is kept: kitsune runs show the-run"
    assert json.loads(out) == {"error": {"type": "Interrupted", "message": message, "exit_code": code}}
    assert ended == code


def test_a_terminal_that_went_away_does_not_change_the_code(call, tuning, monkeypatch):
    class Gone:
        def print(self, *_, **__):
            raise OSError(5, "Input/output error")

    def hung_up(tell):
        monkeypatch.setattr(output, "stderr", Gone)
        raise SystemExit(129)

    tuning(hung_up)
    assert call("tune", "zoo:mlp", "-q")[0] == 129


def test_ctrl_c_before_anything_was_measured(call, tuning):
    def nothing_yet(tell):
        tell(Trying(0, 2, Proposal({}, Source.BASELINE)))
        press_ctrl_c()
        raise NoTrialError("the search was interrupted before anything was measured")

    tuning(nothing_yet)
    code, out, _ = call("tune", "zoo:mlp", "--json")
    assert code == 130
    assert "before anything was measured" in json.loads(out)["error"]["message"]


def test_a_missing_extra_is_told_with_the_way_out(call, monkeypatch):
    def missing(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}", name="optuna.samplers")

    monkeypatch.setattr(optional_imports.importlib, "import_module", missing)
    code, _, err = call("tune", "zoo:mlp")
    assert code == 3
    assert "pip install 'kitsune-torch[tuner]'" in err
