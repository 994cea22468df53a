"""`kitsune runs`, `submit` and `plan` against a server, which a script plays; the database's side is in test_cli.py."""

import json

import pytest

from kitsune import cli
from kitsune.client import Client
from kitsune.errors import UnreachableError
from kitsune.plan import Plan
from kitsune.plan_diff import differences
from kitsune.server_address import Server
from kitsune.submission.archive import Archive
from tests.scripted_server import ScriptedServer, absent, of_json, problem, raw
from tests.store.samples import a_plan, a_run
from tests.unit.submission.hostile import valid
from tests.unit.tuner.terminal import TRIALS
from tuner.records import RunStatus
from tuner.server_ledger import ServerLedger

PLAN = a_plan()
RUN = a_run(id="06g0t3n8", name="mine", status=RunStatus.FINISHED, plan_id=PLAN.plan_id)
WAITING = a_run(id="06g0t3n9")


class Team:
    """A server with two runs, the first with trials; `statuses` is how the other one stands, question by question."""

    def __init__(self) -> None:
        self.server = ScriptedServer(self.play)
        self.trials = [trial.model_dump(mode="json") for trial in TRIALS]
        self.statuses = ["queued"]

    def play(self, request, connection, _):
        connection.sendall(self.answer(request))

    def answer(self, request) -> bytes:
        query = dict(part.split("=") for part in request.query.split("&") if part)
        first = {**RUN.model_dump(mode="json"), "links": {"self": "x"}, "of_the_future": 1}
        other = {**WAITING.model_dump(mode="json"), "links": {}}
        if request.path == "/healthz":
            return raw(200, b"ok\n")
        if request.path.startswith("/api/v1/archives/"):
            return of_json({"sha256": "ab" * 32}, 201)
        if request.path == "/api/v1/runs" and request.method == "POST":
            return of_json(other, 201)
        if request.path == "/api/v1/runs":
            return of_json(
                {"runs": [first, other][: int(query["limit"])], "after": "next" if len(query) == 1 else None}
            )
        if request.path == f"/api/v1/runs/{RUN.id}":
            return of_json(first)
        if request.path == f"/api/v1/runs/{WAITING.id}":
            status = self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]
            return of_json({**other, "status": status})
        if request.path == f"/api/v1/runs/{WAITING.id}/cancel":
            return of_json({**other, "status": "cancelled"})
        if request.path.endswith("/trials"):
            mine = self.trials if RUN.id in request.path else []
            return of_json({"trials": [t for t in mine if t["number"] > int(query["after"])][:2]})
        if request.path == f"/api/v1/plans/{PLAN.plan_id}":
            return of_json(PLAN.to_json())
        if request.path == "/api/v1/plans":
            return of_json({"match": "none", "reason": "no run of it has finished", "plan": None})
        return problem(404, "there is no such thing")


@pytest.fixture
def team():
    team = Team()
    with team.server.running():
        yield team


@pytest.fixture
def call(capsys, team):
    """Runs a command line against the server; gives its exit code, stdout and stderr."""

    def run(*words: str) -> tuple[int, str, str]:
        code = cli.run([*words, "--server", team.server.url])
        return code, *capsys.readouterr()

    return run


def test_the_list(call):
    code, out, err = call("runs", "list")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == ["run", RUN.id, WAITING.id]
    assert "--after next" in err
    listed = json.loads(call("runs", "--limit", "1", "--json")[1])
    assert listed == {"runs": [RUN.model_dump(mode="json")], "after": "next"}


def test_filters_go_to_the_server(call, team):
    call("runs", "list", "--status", "failed", "--after", "c", "--limit", "7")
    assert team.server.seen[0].query == "limit=7&status=failed&after=c"


def test_the_variable_names_a_server_and_a_database_goes_over_it(monkeypatch, team, capsys, tmp_path):
    monkeypatch.setenv("KITSUNE_SERVER", team.server.url)
    assert cli.run(["runs"]) == 0
    assert RUN.id in capsys.readouterr().out
    assert cli.run(["runs", "--database", f"sqlite:///{tmp_path}/k.db"]) == 0
    assert capsys.readouterr().out == ""
    assert cli.run(["runs", "list", "--database", "sqlite:///x", "--server", team.server.url]) == 2


def test_one_run_with_all_pages_of_its_trials(call):
    shown = json.loads(call("runs", "show", RUN.id, "--json")[1])
    assert shown["run"]["name"] == "mine"
    assert [trial["number"] for trial in shown["trials"]] == [trial.number for trial in TRIALS]
    assert Plan.from_json(shown["plan"]) == PLAN
    assert call("runs", "show", "last", "--json")[1] == json.dumps(shown) + "\n"


@pytest.mark.parametrize("name", ["nonsense", "../plans", "%2e%2e", "."])
@pytest.mark.parametrize("command", ["show", "plan", "watch", "cancel"])
def test_a_run_that_does_not_exist(call, team, command, name):
    code, _, err = call("runs", command, name)
    assert code == 4
    assert f"there is no run {name!r}" in err
    assert all(request.path.startswith("/api/v1/runs/") and ".." not in request.path for request in team.server.seen)


def test_the_plan_of_a_run(call, tmp_path):
    assert call("runs", "plan", RUN.id, "--out", str(tmp_path / "plan.json"))[0] == 0
    assert Plan.load(tmp_path / "plan.json") == PLAN
    assert call("runs", "plan", WAITING.id)[0] == 4


def test_watching_a_run_that_ended(call):
    code, out, err = call("runs", "watch", RUN.id)
    assert code == 0
    assert len(err.splitlines()) == len(TRIALS)
    assert RUN.id in out


def test_watching_a_run_to_its_end(call, team, monkeypatch):
    monkeypatch.setattr("tuner.history.PAUSE_S", 0.01)
    team.statuses = ["queued", "running", "running", "failed"]
    assert call("runs", "watch", WAITING.id, "--json")[0] == 5
    assert len(team.statuses) == 1


def test_cancelling(call, team):
    code, out, err = call("runs", "cancel", WAITING.id)
    assert (code, out) == (0, "")
    assert "cancelled" in err
    assert team.server.seen[-1].method == "POST"
    assert json.loads(call("runs", "cancel", WAITING.id, "--json")[1])["run"]["status"] == "cancelled"


def test_submitting_an_archive(call, team, tmp_path):
    path = tmp_path / "model.ksn"
    valid().save(path)
    code, out, err = call("submit", str(path), "--trials", "3", "--budget", "5m", "--name", "mine")
    assert (code, out) == (0, f"{WAITING.id}\n")
    assert f"kitsune runs watch {WAITING.id} --server {team.server.url}" in err
    put, post = team.server.seen[-2:]
    assert Archive.from_bytes(put.body) == valid()
    assert json.loads(post.body) == {
        "archive": "ab" * 32, "device": "", "name": "mine", "trials": 3, "budget_s": 300.0,
    }  # fmt: skip


def test_submitting_and_waiting(call, team, tmp_path, monkeypatch):
    monkeypatch.setattr("tuner.history.PAUSE_S", 0.01)
    path = tmp_path / "model.ksn"
    valid().save(path)
    team.statuses = ["running", "finished"]
    code, out, err = call("submit", str(path), "--wait", "--json")
    assert code == 0
    assert WAITING.id in err
    assert json.loads(out)["run"]["status"] == "finished"


def test_no_plan_on_the_server(call, tmp_path):
    path = tmp_path / "model.ksn"
    valid().save(path)
    code, _, err = call("plan", "fetch", str(path), "--device", "cpu")
    assert code == 4
    assert "no run of it has finished" in err


@pytest.mark.parametrize(
    "words", [("runs",), ("runs", "cancel", "x"), ("submit", "zoo:mlp"), ("plan", "diff", "0" * 64, "1" * 64)]
)
def test_no_server(words, capsys):
    code = cli.run([*words, "--server", absent(), "--json"])
    assert code == 6
    assert json.loads(capsys.readouterr().out)["error"]["type"] == "UnreachableError"


def test_switched_off_nothing_is_submitted(monkeypatch, call, team):
    monkeypatch.setenv("KITSUNE_DISABLE", "1")
    assert call("submit", "zoo:mlp")[0] == 3
    assert team.server.seen == []


def test_a_server_that_repeats_itself_is_not_read_for_ever(team):
    class Repeating(Client):
        def trials(self, run_id, after=-1):
            return team.trials[:2]

    with pytest.raises(UnreachableError, match="the same trials again"):
        ServerLedger(Repeating(Server(team.server.url))).trials(RUN.id)


@pytest.mark.parametrize(
    "page", [{"runs": [1]}, {"runs": [{"id": "x"}]}, {"runs": [{**RUN.model_dump(mode="json"), "seed": "x"}]}]
)
def test_runs_that_are_none(page):
    def play(request, connection, _):
        connection.sendall(of_json(page))

    with ScriptedServer(play).running() as server, pytest.raises(UnreachableError, match="that it sent is"):
        ServerLedger(Client(Server(server.url))).page(limit=1)


# plan diff ------------------------------------------------------------------------------------------------------------


def test_differences_are_named_once_with_both_values():
    one, other = a_plan(1.5), a_plan(2.5, fingerprint="g" * 64)
    rows = {name: values for name, *values in differences(one, other)}
    assert rows["fingerprint"] == [one.fingerprint, "g" * 64]
    assert rows["evidence.speedup.median"] == ["1.5", "2.5"]
    assert "environment.gpu" not in rows
    assert differences(one, one) == []


def test_choices_are_compared_with_the_default_where_a_plan_is_silent():
    rows = differences(Plan.by_hand(precision="bf16"), Plan.by_hand(capture="step"))
    assert rows == [("knobs.precision", "bf16", "fp32"), ("knobs.capture", "none", "step")]


def test_a_file_against_a_plan_of_the_server(call, tmp_path):
    Plan.by_hand(precision="bf16").save(tmp_path / "plan.json")
    found = json.loads(call("plan", "diff", str(tmp_path / "plan.json"), PLAN.plan_id, "--json")[1])["differences"]
    assert {"field": "environment.gpu", "one": "-", "other": PLAN.environment.gpu} in found
    code, out, err = call("plan", "diff", PLAN.plan_id, PLAN.plan_id)
    assert (code, out, "the same" in err) == (0, "", True)
    assert call("plan", "diff", "no-such-file", PLAN.plan_id)[0] == 2
