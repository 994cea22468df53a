"""Submits, on SQLite and on PostgreSQL alike: the same request is one run."""

import pytest
from pydantic import ValidationError
from sqlalchemy import func, select

from kitsune.errors import ConflictError, NotFoundError
from tests.store.samples import OTHER_BATCH, START, after, an_archive
from tuner.records import Run, RunStatus
from tuner.store import tables
from tuner.store.database import Database
from tuner.store.queries import archives, runs, submits
from tuner.store.queries.submits import Request


def stored_archive(database: Database, *change: object) -> str:
    archive = an_archive(*change)
    with database.begin() as connection:
        return archives.put(connection, archive.to_bytes(), archive)[0].sha256


@pytest.fixture
def archive(database: Database) -> str:
    return stored_archive(database)


def sent(
    database: Database, archive: str, *, owner: str = "ann", key: str | None = None, at: float = 0.0, **changes: object
) -> tuple[Run, bool]:
    with database.begin() as connection:
        return submits.submit(connection, Request(archive=archive, **changes), owner=owner, key=key, now=after(at))


def stored(database: Database) -> tuple[list[Run], int]:
    """Every run, and how many keys are remembered."""
    with database.read() as connection:
        return list(runs.page(connection).runs), connection.scalar(select(func.count()).select_from(tables.submits))


def end(database: Database, run: Run, how: str) -> None:
    with database.begin() as connection:
        if how == "cancel":
            assert runs.cancel(connection, run.id) is not None
            return
        mine = runs.claim_one(connection, run.id, "w")
        assert mine is not None
        runs.finish(connection, mine) if how == "finish" else runs.fail(connection, mine, "reason")


class TestSubmits:
    # A new run

    def test_a_run_is_what_was_asked_for(self, database: Database, archive: str) -> None:
        run, is_new = sent(database, archive, device="cuda", trials=7, budget_s=60, seed=3, name="my ResNet")
        assert is_new
        assert run == Run(
            id=run.id,
            name="my ResNet",
            workload="archive",
            archive=archive,
            fingerprint=an_archive().fingerprint,
            device="cuda",
            budget_trials=7,
            budget_s=60,
            seed=3,
            created_at=START,
        )
        assert stored(database) == ([run], 0)

    @pytest.mark.parametrize(
        ("given", "budget"),
        [({}, (None, None)), ({"trials": 3}, (3, None)), ({"budget_s": 9.5}, (None, 9.5))],
    )
    def test_a_run_has_the_budget_that_was_asked_for_and_none_otherwise(
        self, database: Database, archive: str, given: dict[str, float], budget: tuple[int | None, float | None]
    ) -> None:
        run, _ = sent(database, archive, **given)
        assert (run.budget_trials, run.budget_s) == budget

    @pytest.mark.parametrize("key", [None, "k"])
    def test_an_archive_that_nobody_sent_is_refused_and_nothing_remembered(
        self, database: Database, archive: str, key: str | None
    ) -> None:
        request = Request(archive="0" * 64)
        with database.begin() as connection, pytest.raises(NotFoundError, match=r"no archive '0000.*send it first"):
            submits.submit(connection, request, owner="ann", key=key)
        assert stored(database) == ([], 0)
        assert sent(database, archive, key=key)[1], "the key is free for a request that can be met"

    @pytest.mark.parametrize(
        "changes",
        [
            {"trials": 0},
            {"trials": 2**63},
            {"budget_s": 0},
            {"budget_s": float("inf")},
            {"seed": 2**63},
            {"device": "cuda:0"},
            {"workload": "train.py:make_workload"},
        ],
        ids=str,
    )
    def test_a_request_that_makes_no_sense_is_none(self, changes: dict[str, object]) -> None:
        with pytest.raises(ValidationError):
            Request(archive="0" * 64, **changes)

    # By its key

    @pytest.mark.parametrize("ending", ["", "cancel", "finish", "fail"])
    def test_a_key_names_its_run_for_good(self, database: Database, archive: str, ending: str) -> None:
        run, _ = sent(database, archive, key="k", seed=1)
        if ending:
            end(database, run, ending)
        again, is_new = sent(database, archive, key="k", seed=1, at=1000)
        assert (again.id, again.created_at, is_new) == (run.id, START, False)
        assert again.status.is_finished == bool(ending)
        assert stored(database) == ([again], 1)

    @pytest.mark.parametrize(
        "changes", [{"device": "cpu"}, {"trials": 25}, {"budget_s": 1}, {"seed": 1}, {"name": "n"}], ids=str
    )
    def test_a_key_with_another_request_is_refused(
        self, database: Database, archive: str, changes: dict[str, object]
    ) -> None:
        run, _ = sent(database, archive, key="k")
        with pytest.raises(ConflictError, match=rf"'k' belongs to run {run.id}.*new key"):
            sent(database, archive, key="k", **changes)
        assert stored(database) == ([run], 1)

    def test_a_key_with_another_archive_is_refused_also_when_that_is_not_stored(
        self, database: Database, archive: str
    ) -> None:
        sent(database, archive, key="k")
        for other in (stored_archive(database, *OTHER_BATCH), "0" * 64):
            with pytest.raises(ConflictError):
                sent(database, other, key="k")

    def test_a_key_is_its_owners(self, database: Database, archive: str) -> None:
        mine, _ = sent(database, archive, owner="ann", key="k")
        other, is_new = sent(database, archive, owner="bob", key="k", seed=2)
        assert is_new
        assert mine.id != other.id

    def test_owner_and_key_do_not_run_together(self, database: Database, archive: str) -> None:
        ids = {sent(database, archive, owner=owner, key=key)[0].id for owner, key in (("a", "bc"), ("ab", "c"))}
        assert len(ids) == 2

    def test_another_key_is_another_run(self, database: Database, archive: str) -> None:
        assert len({sent(database, archive, key=key)[0].id for key in ("a", "A", "", "ä")}) == 4

    # By its content

    @pytest.mark.parametrize("is_running", [False, True])
    def test_an_unfinished_run_answers_the_same_request(
        self, database: Database, archive: str, is_running: bool
    ) -> None:
        run, _ = sent(database, archive, seed=1)
        if is_running:
            with database.begin() as connection:
                run = runs.claim(connection, "w", device="cpu")
        assert sent(database, archive, seed=1, at=9) == (run, False)
        assert stored(database) == ([run], 0)

    @pytest.mark.parametrize("ending", ["cancel", "finish", "fail"])
    def test_a_run_that_has_ended_does_not(self, database: Database, archive: str, ending: str) -> None:
        run, _ = sent(database, archive)
        end(database, run, ending)
        again, is_new = sent(database, archive)
        assert is_new
        assert again.id != run.id
        assert again.status is RunStatus.QUEUED

    @pytest.mark.parametrize(
        "changes",
        [{"owner": "bob"}, {"device": "cpu"}, {"trials": 2}, {"budget_s": 1}, {"seed": 1}, {"name": "n"}],
        ids=str,
    )
    def test_another_owner_or_request_is_another_run(
        self, database: Database, archive: str, changes: dict[str, object]
    ) -> None:
        first, _ = sent(database, archive)
        second, is_new = sent(database, archive, **changes)
        assert is_new
        assert first.id != second.id

    def test_the_same_step_in_other_bytes_is_another_run(self, database: Database, archive: str) -> None:
        first, _ = sent(database, archive)
        second, is_new = sent(database, stored_archive(database, *OTHER_BATCH))
        assert is_new
        assert first.fingerprint == second.fingerprint

    def test_a_run_with_a_key_answers_a_request_without_one(self, database: Database, archive: str) -> None:
        """Of several it is the oldest, which ends first."""
        first, second = (sent(database, archive, key=key, at=at)[0] for key, at in (("a", 1), ("b", 0)))
        assert sent(database, archive, at=2) == (second, False)
        end(database, second, "cancel")
        assert sent(database, archive, at=3) == (first, False)

    # Whole or not at all

    @pytest.mark.parametrize("key", [None, "k"])
    def test_a_submit_that_is_rolled_back_never_was(self, database: Database, archive: str, key: str | None) -> None:
        def send_and_fail() -> None:
            with database.begin() as connection:
                submits.submit(connection, Request(archive=archive), owner="ann", key=key)
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            send_and_fail()
        assert stored(database) == ([], 0)
        assert sent(database, archive, key=key)[1]
