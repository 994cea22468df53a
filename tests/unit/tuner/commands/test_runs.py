"""`kitsune runs` in this process, on a database of the test's own."""

import json
from datetime import UTC, datetime

import pytest

from kitsune.plan import Plan
from tests.store.samples import a_plan, a_run, after, an_environment
from tests.unit.tuner.sample_run import BF16, GIVEN, STREAMED, a_failure, a_trial, ablations, in_words
from tuner.planning.ablation import Ablation
from tuner.records import Run, RunStatus, Source, Trial, Verdict
from tuner.settings import Settings
from tuner.store import tables
from tuner.store.engine import open_database
from tuner.store.queries import runs, trials


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
