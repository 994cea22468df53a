"""`kitsune runs delete`: told first, done with --yes, in the database of this machine and on a server."""

import json
from datetime import timedelta

import pytest

from kitsune.client.http_client import Client
from kitsune.client.server_address import Server
from kitsune.errors import RefusedError
from tests.store.samples import START, a_plan, a_run, a_trial, after
from tuner.commands.server_runs import ServerLedger
from tuner.records import RunStatus
from tuner.settings import Settings
from tuner.store.engine import open_database
from tuner.store.queries import plans, runs, trials
from tuner.wall_clock import utcnow
from tuner.worker import purge


@pytest.fixture
def store(monkeypatch):
    """The database that the commands open by default."""
    monkeypatch.setattr(purge, "PAUSE_S", 0.0)
    with open_database(Settings.from_environment().database_url) as database:
        yield database


def ended(database, days: float, speedup: float = 1.5):
    """A run that found a plan so many days ago."""
    at = utcnow() - timedelta(days=days)
    with database.begin() as connection:
        run = runs.add(connection, a_run(created_at=at))
        mine = runs.claim_one(connection, run.id, "w", now=at)
        trials.add(connection, mine, a_trial(mine))
        return runs.finish(connection, mine, plan=a_plan(speedup), now=at)


def kept(database) -> tuple[set[str], int]:
    """Runs, and how many plans there are."""
    with database.read() as connection:
        return {run.id for run in runs.page(connection).runs}, plans.extent(connection).plans


def test_old_runs_are_counted_and_then_deleted(call, store):
    _, old, new = ended(store, 91), ended(store, 95, 2.0), ended(store, 89, 3.0)
    code, out, err = call("runs", "delete", "--older-than", "90d")
    assert (code, out) == (0, "")
    assert "This would delete 2 runs that ended before " in err
    assert "with 2 trials; plans stay" in err and "add --yes" in err
    assert len(kept(store)[0]) == 3
    code, out, err = call("runs", "delete", "--older-than", "90d", "--yes")
    assert (code, out) == (0, "")
    assert err.startswith("Deleted: 2 runs that ended before ")
    assert kept(store) == ({new.id}, 3)
    assert call("runs", "show", old.id)[0] == 4


def test_plans_go_where_that_is_asked_for(call, store):
    ended(store, 91)
    assert "and plans with them" in call("runs", "delete", "--older-than", "90d", "--plans")[2]
    call("runs", "delete", "--older-than", "90d", "--plans", "--yes")
    assert kept(store) == (set(), 0)


def test_one_run_is_deleted(call, store):
    run, other = ended(store, 1), ended(store, 2, 2.0)
    code, out, _ = call("runs", "delete", run.id, "--json")
    assert (code, json.loads(out)) == (0, {"runs": 1, "trials": 1, "deleted": False})
    code, out, _ = call("runs", "delete", "last", "--yes", "--json")
    assert (code, json.loads(out)) == (0, {"runs": 1, "trials": 1, "deleted": True})
    assert kept(store) == ({other.id}, 2)
    assert call("runs", "delete", run.id, "--yes")[0] == 4


def test_a_run_that_goes_on_is_not_deleted(call, store):
    with store.begin() as connection:
        run = runs.add(connection, a_run())
    for words in ((), ("--yes",)):
        code, _, err = call("runs", "delete", run.id, *words)
        assert code == 2
        assert "is queued; cancel it first" in err
    assert call("runs", "delete", "--older-than", "1s", "--yes")[0] == 0
    assert kept(store)[0] == {run.id}


@pytest.mark.parametrize(
    "words",
    [(), ("r1", "--older-than", "90d"), ("--older-than", "soon"), ("--older-than", "99999999999d"), ("--yes",)],
    ids=" ".join,
)
def test_what_makes_no_sense_deletes_nothing(call, store, words):
    run = ended(store, 1000)
    assert call("runs", "delete", *words)[0] == 2
    assert kept(store)[0] == {run.id}


class Team(Client):
    """A server with runs of every status, the oldest first; it gives two at a time."""

    def __init__(self) -> None:
        super().__init__(Server("http://127.0.0.1:1"))
        self.known = [
            a_run(id=f"{status}{day}", status=status, created_at=after(day), finished_at=after(day + 0.5), trials=3)
            for status in RunStatus
            if status.is_finished
            for day in range(5)
        ]
        self.asked: list[tuple[str, bool]] = []

    def runs(self, query):
        assert (query["sort"], query["order"]) == ("created", "asc")
        mine = [run for run in self.known if run.status == query["status"]]
        begin = int(query.get("after", 0))
        found = [run.model_dump(mode="json") for run in mine[begin : begin + 2]]
        return {"runs": found, "after": str(begin + 2) if begin + 2 < len(mine) else None}

    def delete_run(self, run_id, *, with_plan=False):
        self.asked.append((run_id, with_plan))
        if run_id == "failed1":
            raise RefusedError("here", 404, "somebody else was faster")
        self.known = [run for run in self.known if run.id != run_id]
        return {"id": run_id}


def test_a_server_is_asked_for_what_is_old_and_then_to_delete_each():
    team = Team()
    ledger = ServerLedger(team)
    assert ledger.count_ended(after(2.1)) == (6, 18)
    assert team.asked == []
    assert ledger.delete_ended(after(2.1), with_plans=True) == 5
    assert sorted(team.asked) == [
        (f"{how}{day}", True) for how in ("cancelled", "failed", "finished") for day in (0, 1)
    ]
    assert ledger.count_ended(START) == (0, 0)


def test_a_refusal_for_another_reason_is_told():
    class Refusing(Team):
        def delete_run(self, run_id, *, with_plan=False):
            raise RefusedError("here", 409, "it goes on")

    with pytest.raises(RefusedError, match="it goes on"):
        ServerLedger(Refusing()).delete("finished0", with_plan=False)
