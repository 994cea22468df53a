"""`kitsune tune` in this process, with a stand-in for the tuner."""

import json
import os
import signal
import time

import pytest

from kitsune.base import optional_imports
from kitsune.cli import output
from kitsune.errors import BaselineError, NoTrialError
from kitsune.plan import Plan
from tests.store.samples import a_plan
from tests.unit.tuner.sample_run import BF16, GIVEN, INSPECTED, RUN, STREAMED, TRIALS, ablations, in_words
from tuner.api import Result
from tuner.commands import tune
from tuner.records import Source
from tuner.search.proposal import Proposal
from tuner.tuning.events import Ablating, Confirming, Started, Tried, Trying


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
    line = "tune zoo:mlp --trials 7 --budget 5m --device cpu --seed 3 --database sqlite:///x.db --memory-limit 4GiB"
    assert call(*line.split())[0] == 0
    expected = {"trials": 7, "budget": "5m", "device": "cpu", "seed": 3, "database": "sqlite:///x.db"}
    expected["memory_limit"] = "4GiB"
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
