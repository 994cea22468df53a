"""Deleting what has ended, on SQLite and on PostgreSQL alike: what is in use stays, and nothing is left behind."""

import threading
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import func, insert, select

from kitsune.errors import ConflictError, NotFoundError, QuotaError, StoppedError
from tests.store.samples import (
    OTHER_BATCH,
    START,
    a_plan,
    a_run,
    a_timeline,
    a_trial,
    after,
    an_archive,
    an_environment,
    some_class_tables,
)
from tuner.records import Run, RunStatus
from tuner.store import locks, tables
from tuner.store.database import Database
from tuner.store.engine import open_database
from tuner.store.queries import archives, class_tables, plans, retention, runs, shares, submits, timelines, trials
from tuner.store.queries.submits import Quota, Request
from tuner.store.rows import to_row
from tuner.worker import purge
from tuner.worker.purge import clear

DAY = 86400.0
#: Long after everything in these tests, and after whoever sent an archive might submit a run with it.
NOW = after(100 * DAY)


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(purge, "PAUSE_S", 0.0)


def kept(database: Database) -> dict[str, int]:
    """How many rows each table has, those that have none left out."""
    with database.read() as connection:
        counts = {
            name.removeprefix("kitsune_"): connection.scalar(select(func.count()).select_from(table))
            for name, table in tables.metadata.tables.items()
        }
    return {name: count for name, count in counts.items() if count}


def send(database: Database, *change: object, team: str = "default", at: float = 0.0, **given: Any) -> str:
    archive = an_archive(*change)
    with database.begin() as connection:
        return archives.put(connection, archive.to_bytes(), archive, team=team, now=after(at), **given)[0].sha256


def submit(database: Database, archive: str, *, team: str = "default", at: float = 0.0, **given: Any) -> Run:
    with database.begin() as connection:
        options = {"owner": team, "team": team, "now": after(at), **given}
        return submits.submit(connection, Request(archive=archive), **options)[0]


def finished(database: Database, run: Run, *, at: float, speedup: float = 1.5) -> Run:
    """With a trial, a plan, a timeline and a link."""
    with database.begin() as connection:
        mine = runs.claim_one(connection, run.id, "w", now=after(at))
        assert mine is not None
        trials.add(connection, mine, a_trial(mine))
        shares.create(connection, mine.id, team=mine.team, now=after(at))
        timelines.put(connection, mine, timeline=a_timeline())
        class_tables.put(connection, mine, some_class_tables())
        return runs.finish(connection, mine, plan=a_plan(speedup, fingerprint=run.fingerprint), now=after(at))


def ended_before(database: Database, at: float, **given: Any) -> int:
    with database.begin() as connection:
        return retention.delete_ended(connection, after(at), limit=100, **given)


def ids(database: Database) -> set[str]:
    with database.read() as connection:
        return {run.id for run in runs.page(connection, limit=1000).runs}


class TestRuns:
    def test_a_run_goes_with_all_that_refers_to_it_and_its_plan_stays(self, database: Database) -> None:
        sent = send(database)
        old = finished(database, submit(database, sent, key="old"), at=10)
        new = finished(database, submit(database, sent, key="new", at=1), at=30, speedup=2.0)
        with database.read() as connection:
            assert retention.count_ended(connection, after(20)) == (1, 1)
        assert ended_before(database, 20) == 1
        assert ids(database) == {new.id}
        assert kept(database) == {
            "runs": 1, "trials": 1, "submits": 1, "shares": 1, "timelines": 1, "class_tables": 1, "plans": 2,
            "archives": 1, "archive_owners": 1, "models": 1,
        }  # fmt: skip
        with database.read() as connection:
            assert plans.get(connection, str(old.plan_id)) is not None
            assert len(plans.find(connection, an_archive().model_fingerprint, an_environment())) == 2

    def test_the_moment_of_its_end_decides(self, database: Database) -> None:
        run = finished(database, submit(database, send(database)), at=10)
        assert ended_before(database, 10) == 0
        assert ended_before(database, 10.000001) == 1
        assert run.id not in ids(database)

    @pytest.mark.parametrize("status", RunStatus)
    def test_only_what_has_ended_goes(self, database: Database, status: RunStatus) -> None:
        end = after(1) if status.is_finished else None
        with database.begin() as connection:
            run = runs.add(connection, a_run(status=status, finished_at=end))
        assert ended_before(database, DAY) == int(status.is_finished)
        assert (run.id in ids(database)) == (not status.is_finished)

    def test_the_oldest_go_first_and_no_more_than_asked_for(self, database: Database) -> None:
        with database.begin() as connection:
            made = [
                runs.add(connection, a_run(status=RunStatus.FAILED, created_at=after(n), finished_at=after(n)))
                for n in (3, 1, 2)
            ]
            assert retention.delete_ended(connection, after(DAY), limit=2) == 2
        assert ids(database) == {made[0].id}

    def test_a_key_is_free_again(self, database: Database) -> None:
        sent = send(database)
        first = finished(database, submit(database, sent, key="k"), at=10)
        assert submit(database, sent, key="k").id == first.id
        ended_before(database, DAY)
        assert submit(database, sent, key="k").id != first.id

    def test_plans_go_when_that_is_asked_for_unless_another_run_has_them(self, database: Database) -> None:
        sent = send(database)
        shared = finished(database, submit(database, sent, key="a"), at=10)
        own = finished(database, submit(database, sent, key="b"), at=11, speedup=2.0)
        with database.begin() as connection:
            runs.add(connection, a_run(plan_id=shared.plan_id))
        assert ended_before(database, DAY, with_plans=True) == 2
        with database.read() as connection:
            assert plans.get(connection, str(shared.plan_id)) is not None
            assert plans.get(connection, str(own.plan_id)) is None

    def test_many_at_once_delete_each_run_once(self, database: Database, url: str) -> None:
        with database.begin() as connection:
            old = [a_run(status=RunStatus.CANCELLED, finished_at=after(1)) for _ in range(60)]
            connection.execute(insert(tables.runs), list(map(to_row, old)))
        counts: list[int] = []

        def sweep() -> None:
            with open_database(url) as mine:
                counts.append(clear(mine, after(2)))

        threads = [threading.Thread(target=sweep) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sum(counts) == 60
        assert kept(database) == {}


class TestOneRun:
    def test_it_goes_with_its_archive_and_without_its_plan(self, database: Database) -> None:
        run = finished(database, submit(database, send(database), key="k"), at=10)
        with database.begin() as connection:
            deleted = retention.delete_run(connection, run.id)
        assert deleted == run
        assert kept(database) == {"plans": 1, "models": 1}

    def test_with_its_plan_nothing_is_left_but_of_which_model_it_was(self, database: Database) -> None:
        run = finished(database, submit(database, send(database)), at=10)
        with database.begin() as connection:
            retention.delete_run(connection, run.id, with_plan=True)
        assert kept(database) == {"models": 1}

    def test_an_archive_that_another_run_of_the_team_has_stays(self, database: Database) -> None:
        sent = send(database)
        run, other = (submit(database, sent, key=key) for key in "ab")
        finished(database, run, at=10)
        with database.begin() as connection:
            retention.delete_run(connection, run.id)
            assert archives.get(connection, sent) is not None
            assert runs.get(connection, other.id) is not None

    def test_the_archive_of_another_team_stays(self, database: Database) -> None:
        sent = send(database)
        assert send(database, team="red") == sent
        run = finished(database, submit(database, sent), at=10)
        with database.begin() as connection:
            retention.delete_run(connection, run.id)
            assert archives.get(connection, sent) is None
            assert archives.get(connection, sent, team="red") is not None
            assert archives.content(connection, sent) is not None

    @pytest.mark.parametrize("is_claimed", [False, True])
    def test_one_that_has_not_ended_is_refused(self, database: Database, is_claimed: bool) -> None:
        run = submit(database, send(database))
        with database.begin() as connection:
            if is_claimed:
                runs.claim_one(connection, run.id, "w")
        with database.begin() as connection, pytest.raises(ConflictError, match=r"is (queued|running); cancel it"):
            retention.delete_run(connection, run.id)
        assert ids(database) == {run.id}

    @pytest.mark.parametrize("team", ["red", None])
    def test_what_is_not_there_or_of_another_team_is_none(self, database: Database, team: str | None) -> None:
        run = finished(database, submit(database, send(database)), at=10)
        with database.begin() as connection:
            assert retention.delete_run(connection, run.id if team else "no", team=team) is None
        assert ids(database) == {run.id}


class TestArchives:
    def test_those_that_nobody_uses_go_and_plans_are_still_found_by_their_model(self, database: Database) -> None:
        used, unused = send(database), send(database, *OTHER_BATCH)
        submit(database, used)
        gone = finished(database, submit(database, unused), at=10)
        assert clear(database, NOW) == 1
        with database.read() as connection:
            assert archives.get(connection, used) is not None
            assert archives.get(connection, unused) is None
            assert archives.content(connection, unused) is None
            [found] = plans.find(connection, an_archive().model_fingerprint, an_environment(), team="default")
        assert found.plan_id == gone.plan_id

    def test_one_that_was_just_sent_again_stays(self, database: Database) -> None:
        sent = send(database)
        send(database, at=50)
        with database.read() as connection:
            assert retention.unused_archives(connection, after(50), limit=9) == []
            assert retention.unused_archives(connection, after(51), limit=9) == [("default", sent)]

    def test_whoever_sent_one_within_the_hour_is_about_to_submit(self) -> None:
        assert retention.latest_unused(START, now=NOW) == START
        assert retention.latest_unused(NOW, now=NOW) == NOW - timedelta(hours=1)

    def test_what_came_into_use_meanwhile_stays(self, database: Database) -> None:
        sent = send(database)
        with database.read() as connection:
            found = retention.unused_archives(connection, NOW, limit=9)
        submit(database, sent)
        with database.begin() as connection:
            assert (len(found), retention.delete_archives(connection, found, NOW)) == (1, 0)
        assert kept(database)["archives"] == 1

    def test_a_submit_and_a_deletion_in_the_same_moment_leave_no_run_without_its_archive(self, url: str) -> None:
        with open_database(url) as mine, open_database(url) as rivals:
            sent = send(mine)
            outcome: list[object] = []

            def delete() -> None:
                with rivals.begin() as connection:
                    outcome.append(retention.delete_archives(connection, [retention.Owned("default", sent)], NOW))

            thread = threading.Thread(target=delete)
            with mine.begin() as connection:
                submits.submit(connection, Request(archive=sent), owner="ann")
                thread.start()
                thread.join(0.3)
                assert outcome == [], "it waits for the submit"
            thread.join()
            assert outcome == [0]
            assert kept(mine)["archives"] == 1

    def test_a_submit_after_a_deletion_says_what_to_do(self, url: str) -> None:
        with open_database(url) as mine, open_database(url) as rivals:
            sent = send(mine)
            errors: list[BaseException] = []

            def late() -> None:
                try:
                    submit(rivals, sent)
                except NotFoundError as error:
                    errors.append(error)

            thread = threading.Thread(target=late)
            with mine.begin() as connection:
                assert retention.delete_archives(connection, [retention.Owned("default", sent)], NOW) == 1
                thread.start()
                thread.join(0.3)
                assert errors == [], "it waits for the deletion"
            thread.join()
            assert len(errors) == 1
            assert "send it first" in str(errors[0])
            assert send(mine, at=60) == sent
            assert submit(mine, sent).archive == sent

    def test_who_refers_to_an_archive_does_not_wait_for_others_who_do(self, url: str) -> None:
        with open_database(url) as mine, open_database(url) as rivals:
            if mine.engine.dialect.name == "sqlite":
                return  # which has one writer at a time
            with mine.begin() as connection, rivals.begin() as other:
                locks.together(connection, locks.ARCHIVES)
                locks.together(other, locks.ARCHIVES)


class TestClearing:
    def test_it_goes_on_until_nothing_is_left(self, database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(purge, "RUNS_AT_ONCE", 2)
        monkeypatch.setattr(purge, "ARCHIVES_AT_ONCE", 1)
        sent = [send(database, "sizes", "s0", size) for size in (8, 9, 10)]
        for number in range(5):
            finished(database, submit(database, sent[number % 3], key=str(number)), at=10 + number, speedup=1 + number)
        assert clear(database, NOW) == 5
        assert kept(database) == {"plans": 5, "models": 1}

    def test_it_ends_between_two_steps_when_that_is_asked_for(
        self, database: Database, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(purge, "RUNS_AT_ONCE", 1)
        monkeypatch.setattr(purge, "PAUSE_S", 0.01)
        with database.begin() as connection:
            for _ in range(3):
                runs.add(connection, a_run(status=RunStatus.FAILED, finished_at=after(1)))

        def stop() -> None:
            raise StoppedError("enough")

        with pytest.raises(StoppedError):
            clear(database, NOW, check=stop)
        assert kept(database) == {"runs": 2}


class TestQuotas:
    def test_no_more_unfinished_runs_than_allowed(self, database: Database) -> None:
        sent = send(database)
        first = submit(database, sent, key="a", quota=Quota(team=2))
        submit(database, sent, key="b", quota=Quota(team=2))
        with pytest.raises(QuotaError, match="has 2 runs that have not ended"):
            submit(database, sent, key="c", quota=Quota(team=2))
        assert submit(database, sent, key="a", quota=Quota(team=2)) == first, "it was asked for before"
        with database.begin() as connection:
            runs.cancel(connection, first.id)
        submit(database, sent, key="c", quota=Quota(team=2))
        with database.begin() as connection, pytest.raises(QuotaError):
            submits.retry(connection, first.id, owner="ann", quota=Quota(team=2))
        with database.begin() as connection:
            assert submits.retry(connection, first.id, owner="ann", quota=Quota(team=3)) is not None

    def test_owners_do_not_count_for_each_other_and_a_retry_is_of_whoever_asks(self, database: Database) -> None:
        sent, one = send(database), Quota(owner=1)
        first = submit(database, sent, owner="ann", quota=one)
        with pytest.raises(QuotaError, match="this token has 1 runs that have not ended"):
            submit(database, sent, owner="ann", key="b", quota=one)
        submit(database, sent, owner="bob", quota=one)
        with database.begin() as connection:
            runs.cancel(connection, first.id)
        with database.begin() as connection, pytest.raises(QuotaError):
            submits.retry(connection, first.id, owner="bob", quota=one)
        with database.begin() as connection:
            assert submits.retry(connection, first.id, owner="ann", quota=one) is not None
        with pytest.raises(QuotaError):
            submit(database, sent, owner="ann", key="c", quota=one)

    def test_teams_do_not_count_for_each_other(self, database: Database) -> None:
        submit(database, send(database), quota=Quota(team=1))
        submit(database, send(database, team="red"), team="red", quota=Quota(team=1))

    def test_no_more_bytes_of_archives_than_allowed(self, database: Database) -> None:
        size = len(an_archive().to_bytes())
        sent = send(database, most_bytes=size)
        assert send(database, most_bytes=1) == sent, "it is there already"
        with pytest.raises(QuotaError, match="archives of the team default may have"):
            send(database, *OTHER_BATCH, most_bytes=2 * size - 1)
        assert kept(database)["archives"] == 1
        send(database, *OTHER_BATCH, team="red", most_bytes=2 * size)
        run = submit(database, sent)
        with database.begin() as connection:
            runs.cancel(connection, run.id)
            retention.delete_run(connection, run.id)
        send(database, *OTHER_BATCH, most_bytes=2 * size - 1)
