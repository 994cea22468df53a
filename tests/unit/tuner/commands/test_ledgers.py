"""`kitsune runs`, `submit` and `plan` against a server, which a script plays; test_runs.py has the database's side."""

import io
import json
from types import SimpleNamespace

import pytest
from rich.console import Console

from kitsune.base.text_format import duration
from kitsune.cli import main
from kitsune.client.http_client import Client
from kitsune.client.server_address import Server
from kitsune.errors import CursorError, RefusedError, UnreachableError
from kitsune.plan import Plan, differences
from kitsune.submission.format.archive import Archive
from tests.scripted_server import ScriptedServer, absent, of_json, problem, raw
from tests.store.samples import a_plan, a_run
from tests.unit.kitsune.submission.hostile import valid
from tests.unit.server.pages import stories
from tests.unit.tuner.sample_run import TRIALS
from tuner.commands import runs
from tuner.commands.server_runs import ServerLedger
from tuner.planning.time_spent import PARTS
from tuner.records import Run, RunStatus
from tuner.terminal import views

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
        code = main.run([*words, "--server", team.server.url])
        return code, *capsys.readouterr()

    return run


def test_the_list(call):
    code, out, err = call("runs", "list")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == ["run", RUN.id, WAITING.id]
    assert "--after next" in err
    listed = json.loads(call("runs", "--limit", "1", "--json")[1])
    assert listed == {"runs": [RUN.model_dump(mode="json")], "after": "next"}


@pytest.mark.parametrize("page", [{}, {"runs": None}, {"runs": 5}])
@pytest.mark.parametrize("words", [("runs", "list"), ("runs", "show", "last")])
def test_what_is_no_page_of_runs_is_not_taken_for_an_empty_one(capsys, page, words):
    server = ScriptedServer(lambda request, connection, _: connection.sendall(of_json(page)))
    with server.running():
        assert main.run([*words, "--server", server.url]) == 6
    assert "the answer holds no list of runs" in capsys.readouterr().err


def test_a_server_without_runs_is_told_how_to_get_one(capsys):
    empty = {"runs": [], "after": None}
    server = ScriptedServer(lambda request, connection, _: connection.sendall(of_json(empty)))
    with server.running():
        assert main.run(["runs", "list", "--server", server.url]) == 0
    assert f"kitsune submit 'zoo:lenet5?batch=64' --trials 12 --server {server.url}" in capsys.readouterr().err


def test_filters_go_to_the_server(call, team):
    call("runs", "list", "--status", "failed", "--after", "c", "--limit", "7")
    assert team.server.seen[0].query == "limit=7&status=failed&after=c"


class Many(Client):
    """A server of `count` runs that gives 200 at most, as ours does."""

    def __init__(self, count: int) -> None:
        super().__init__(Server("http://127.0.0.1:1"))
        self.runs_of_it = [a_run(id=f"r{number}").model_dump(mode="json") for number in range(count)]
        self.limits: list[int] = []

    def runs(self, query):
        limit, begin = int(query["limit"]), int(query.get("after", 0))
        assert 1 <= limit <= 200
        self.limits.append(limit)
        end = begin + limit
        return {"runs": self.runs_of_it[begin:end], "after": str(end) if end < len(self.runs_of_it) else None}


@pytest.mark.parametrize(
    ("count", "limit", "limits", "cursor"),
    [
        (700, 500, [200, 200, 100], "500"),
        (450, 500, [200, 200, 100], None),
        (400, 400, [200, 200], None),
        (300, 20, [20], "20"),
        (0, 1000, [200], None),
    ],
)
def test_a_long_list_is_asked_for_in_parts(count, limit, limits, cursor):
    many = Many(count)
    found, after = ServerLedger(many).page(limit=limit)
    assert [run.id for run in found] == [f"r{number}" for number in range(min(count, limit))]
    assert (many.limits, after) == (limits, cursor)


def test_parts_without_runs_end_a_list():
    class Empty(Client):
        def runs(self, query):
            return {"runs": [], "after": "more"}

    assert ServerLedger(Empty(Server("http://127.0.0.1:1"))).page(limit=500)[0] == []


def test_names_have_a_column_where_there_are_any(call):
    out = call("runs", "list")[1]
    assert out.splitlines()[0].split()[-1] == "name"
    assert out.splitlines()[1].split()[-1] == "mine"
    shown = call("runs", "show", RUN.id)[1].splitlines()
    assert ["name", "mine"] in [line.split() for line in shown]
    assert "name" not in views_of(WAITING)


def views_of(*runs: Run) -> str:
    """The header of their table, and the screen of the first one."""
    console = Console(file=io.StringIO(), width=200)
    console.print(views.run_table(runs, [None] * len(runs)))
    console.print(*views.run_screen(runs[0], [], None))
    return console.file.getvalue()


def test_a_run_tells_where_its_time_went():
    console = Console(file=io.StringIO(), width=200)
    run, trials, _ = stories.with_a_gain()
    for part in views.run_screen(run, trials, None):
        console.print(part)
    lines = console.file.getvalue().splitlines()
    begin = lines.index("Where the time of this run went:")
    for line, (part, name) in zip(lines[begin + 2 :], PARTS.items(), strict=False):
        assert line.startswith(name)
        assert line.split()[-2] == duration(len(trials) * getattr(stories.SPENT, part))


def test_the_variable_names_a_server_and_a_database_goes_over_it(monkeypatch, team, capsys, tmp_path):
    monkeypatch.setenv("KITSUNE_SERVER", team.server.url)
    assert main.run(["runs"]) == 0
    assert RUN.id in capsys.readouterr().out
    assert main.run(["runs", "--database", f"sqlite:///{tmp_path}/k.db"]) == 0
    assert capsys.readouterr().out == ""
    assert main.run(["runs", "list", "--database", "sqlite:///x", "--server", team.server.url]) == 2


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
    monkeypatch.setattr("tuner.commands.runs.PAUSE_S", 0.01)
    team.statuses = ["queued", "running", "running", "failed"]
    assert call("runs", "watch", WAITING.id, "--json")[0] == 5
    assert len(team.statuses) == 1


AWAY = problem(503, "the database cannot be used now")


class Disturbed(Team):
    """Answers with each of `troubles` once, to what is asked after the first question about a run."""

    def __init__(self) -> None:
        super().__init__()
        self.troubles: list[bytes] = []
        self.asked = 0

    def answer(self, request) -> bytes:
        self.asked += request.path.startswith(f"/api/v1/runs/{WAITING.id}")
        return self.troubles.pop(0) if self.asked > 1 and self.troubles else super().answer(request)


@pytest.fixture
def disturbed(monkeypatch):
    monkeypatch.setattr("tuner.commands.runs.PAUSE_S", 0.01)
    team = Disturbed()
    with team.server.running():
        yield team


def test_watching_outlasts_a_server_that_starts_anew(disturbed, capsys):
    disturbed.troubles = [AWAY, b"", AWAY]
    disturbed.statuses = ["queued", "running", "finished"]
    assert main.run(["runs", "watch", WAITING.id, "--server", disturbed.server.url, "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["run"]["status"] == "finished"
    away, back = err.splitlines()
    assert "The server is away, and the run goes on without it" in away
    assert "the database cannot be used now" in away
    assert back == "The server is back."


def test_submitting_and_waiting_outlasts_it_too(disturbed, capsys, tmp_path):
    valid().save(tmp_path / "model.ksn")
    disturbed.troubles = [AWAY] * 3
    disturbed.statuses = ["running", "finished"]
    words = ["submit", str(tmp_path / "model.ksn"), "--wait", "--server", disturbed.server.url]
    assert main.run(words) == 0
    assert capsys.readouterr().err.count("The server is away") == 1


def test_watching_a_server_that_stays_away_ends(disturbed, capsys, monkeypatch):
    monkeypatch.setattr("tuner.commands.runs.PATIENCE_S", 0.2)
    disturbed.troubles = [AWAY] * 1000
    assert main.run(["runs", "watch", WAITING.id, "--server", disturbed.server.url]) == 6
    assert "Error: " in capsys.readouterr().err.splitlines()[-1]


@pytest.fixture
def seconds(monkeypatch):
    """A clock that goes on only where the watcher pauses: PAUSE_S from look to look."""
    clock = SimpleNamespace(now=0.0)
    clock.monotonic = lambda: clock.now

    def sleep(pause_s: float) -> None:
        clock.now += pause_s

    clock.sleep = sleep
    monkeypatch.setattr(runs, "time", clock)
    return clock


@pytest.mark.usefixtures("seconds")
def test_a_run_that_nobody_takes_is_told_of_once(call, team):
    team.statuses = ["queued"] * 40 + ["running", "finished"]
    code, _, err = call("runs", "watch", WAITING.id)
    assert code == 0
    assert err == f"run {WAITING.id} is queued; is a worker running? (kitsune worker)\n"


def test_the_wait_begins_anew_for_a_run_that_was_put_back(call, team, seconds):
    team.statuses = ["running"] * 20 + ["queued"] * 9 + ["running", "finished"]
    assert call("runs", "watch", WAITING.id)[2] == ""
    assert seconds.now > 2 * runs.QUEUE_S


@pytest.mark.usefixtures("seconds")
def test_a_run_that_is_taken_soon_needs_no_hint(call, team):
    team.statuses = ["queued"] * 9 + ["running", "finished"]
    assert call("runs", "watch", WAITING.id)[2] == ""


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
        "archive": "ab" * 32, "device": "", "seed": 0, "name": "mine", "trials": 3, "budget_s": 300.0,
    }  # fmt: skip
    assert call("submit", str(path), "--device", "cuda", "--seed", "-7")[0] == 0
    assert {"device": "cuda", "seed": -7}.items() <= json.loads(team.server.seen[-1].body).items()
    assert call("submit", str(path), "--device", "cuda:0")[0] == 2


def test_submitting_and_waiting(call, team, tmp_path, monkeypatch):
    monkeypatch.setattr("tuner.commands.runs.PAUSE_S", 0.01)
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
    code = main.run([*words, "--server", absent(), "--json"])
    assert code == 6
    assert json.loads(capsys.readouterr().out)["error"]["type"] == "UnreachableError"


def test_a_plan_for_which_there_is_no_place_is_not_fetched(call, team, tmp_path):
    valid().save(tmp_path / "model.ksn")
    words = ["plan", "fetch", str(tmp_path / "model.ksn"), "--out", str(tmp_path / "no" / "p.json")]
    code, _, err = call(*words)
    assert code == 2
    assert "no is missing or not yours to write" in err
    assert "database" not in err
    assert team.server.seen == []


def test_what_keeps_a_plan_that_cannot_be_saved_is_told(call, tmp_path):
    code, _, err = call("runs", "plan", RUN.id, "--out", str(tmp_path / "no" / "p.json"))
    assert code == 2
    assert f"run {RUN.id} keeps the plan" in err
    assert "database" not in err


def test_a_token_that_is_missing_is_asked_for(capsys):
    refused = problem(401, "send one header 'Authorization: Bearer TOKEN'")
    with ScriptedServer(lambda _, connection, __: connection.sendall(refused)).running() as server:
        assert main.run(["runs", "--server", server.url]) == 6
    assert "set KITSUNE_TOKEN to a token of this server" in capsys.readouterr().err


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


@pytest.mark.parametrize(("after", "error"), [("zzz", CursorError), (None, RefusedError)])
def test_a_refused_cursor_is_told_of_as_a_database_does(after, error):
    class Refusing(Client):
        def runs(self, query):
            raise RefusedError(self.server.url, 422, "The cursor is invalid")

    with pytest.raises(error, match="The cursor is invalid"):
        ServerLedger(Refusing(Server("http://127.0.0.1:1"))).page(after=after, limit=1)


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


def test_a_plan_that_the_server_does_not_have_is_not_there_as_a_run_is_not(call, team):
    code, out, _ = call("plan", "diff", PLAN.plan_id, "0" * 64, "--json")
    assert (code, json.loads(out)["error"]["type"]) == (4, "NotFoundError")
    assert f"{team.server.url} has no plan {'0' * 64}" in json.loads(out)["error"]["message"]
