"""Which runs a worker of the queue takes, on SQLite and on PostgreSQL alike."""

import pytest

from tests.store.samples import START, a_run, a_trial, after, an_archive, an_environment
from tuner.records import Run, RunStatus
from tuner.store.database import Database
from tuner.store.queries import archives, runs, trials

#: Stands for the archive that the test has stored.
STORED = "stored"


def added(database: Database, workload: str, *, archive: str | None = None, **changes: object) -> Run:
    step = an_archive()
    with database.begin() as connection:
        if archive == STORED:
            archive = archives.put(connection, step.to_bytes(), step)[0].sha256
        return runs.add(connection, a_run(workload=workload, archive=archive, **changes))


def claimed(database: Database, device: str, at: float = 0.0) -> Run | None:
    with database.begin() as connection:
        return runs.claim(connection, "w", device=device, now=after(at))


class TestQueue:
    @pytest.mark.parametrize(("workload", "archive"), [("archive", STORED), ("zoo:mlp?batch=2", None)])
    @pytest.mark.parametrize(
        ("asked", "here"),
        [("", "cpu"), ("", "cuda:1"), ("cpu", "cpu"), ("cuda", "cuda:0"), ("cuda:0", "cuda:1"), ("cuda", "cuda")],
    )
    def test_data_for_this_kind_of_device_is_taken(
        self, database: Database, workload: str, archive: str | None, asked: str, here: str
    ) -> None:
        run = added(database, workload, archive=archive, device=asked)
        taken = claimed(database, here)
        assert taken is not None
        assert (taken.id, taken.device, taken.archive) == (run.id, here, run.archive)
        with database.read() as connection:
            assert runs.get(connection, run.id) == taken

    @pytest.mark.parametrize(
        ("asked", "here"), [("cpu", "cuda:0"), ("cuda", "cpu"), ("cuda:0", "cpu"), ("cud", "cuda:0"), ("cuda", "c")]
    )
    def test_a_run_for_another_kind_of_device_is_left(self, database: Database, asked: str, here: str) -> None:
        run = added(database, "archive", archive=STORED, device=asked)
        assert claimed(database, here) is None
        with database.read() as connection:
            assert runs.get(connection, run.id) == run

    @pytest.mark.parametrize(
        ("workload", "archive"),
        [
            ("live", None),
            ("live", STORED),
            ("train.py:make_workload", None),
            ("train.py:make_workload", STORED),
            ("model.ksn", None),
            ("archive", None),
            ("ARCHIVE", STORED),
            ("ZOO:/train.py:make_workload", None),
            ("zoo/train.py:make_workload", None),
            ("./zoo:train.py:make_workload", None),
            ("zoo", None),
            ("", None),
        ],
    )
    def test_live_models_code_and_files_are_left(self, database: Database, workload: str, archive: str | None) -> None:
        run = added(database, workload, archive=archive, device="")
        assert claimed(database, "cpu") is None
        with database.begin() as connection:
            assert runs.get(connection, run.id) == run
            mine = runs.claim_one(connection, run.id, "the process that has it")
        assert mine is not None
        assert mine.status is RunStatus.RUNNING

    def test_a_run_that_gets_on_is_never_given_up(self, database: Database) -> None:
        """Its workers are killed again and again, but every ninth one stores a trial before."""
        added(database, "zoo:mlp")
        for attempt in range(1, 37):
            run = claimed(database, "cpu", at=61 * attempt)
            assert run is not None
            assert run.attempt == attempt
            if attempt % 9 == 0:
                with database.begin() as connection:
                    assert trials.add(connection, run, a_trial(run, attempt))
        for attempt in range(37, 46):  # the worker of attempt 36 has stored one and died: the first of ten
            assert claimed(database, "cpu", at=61 * attempt) is not None
        assert claimed(database, "cpu", at=61 * 46) is None
        with database.read() as connection:
            ended = runs.get(connection, run.id)
        assert ended is not None
        assert (ended.status, ended.attempt, ended.deaths) == (RunStatus.FAILED, 45, 10)

    def test_a_worker_that_gives_its_run_back_is_no_death(self, database: Database) -> None:
        added(database, "zoo:mlp")
        for attempt in range(1, 20):
            run = claimed(database, "cpu", at=attempt)
            assert run is not None
            assert (run.attempt, run.deaths) == (attempt, 0)
            with database.begin() as connection:
                runs.release(connection, run)

    def test_what_nobody_else_can_go_on_with_ends_with_its_process(self, database: Database) -> None:
        made = [added(database, name, device="cpu") for name in ("live", "train.py:make_workload", "zoo:mlp")]
        with database.begin() as connection:
            for run in made:
                assert runs.claim_one(connection, run.id, "doomed", now=START) is not None
        heir = claimed(database, "cpu", at=61)
        assert heir is not None
        assert (heir.id, heir.attempt) == (made[2].id, 2)
        assert claimed(database, "cpu", at=61) is None
        with database.read() as connection:
            ended = [runs.get(connection, run.id) for run in made[:2]]
        assert [run and run.status for run in ended] == [RunStatus.FAILED, RunStatus.FAILED]

    def test_an_older_run_that_is_not_for_this_worker_does_not_hide_a_younger_one(self, database: Database) -> None:
        added(database, "live", created_at=after(-9))
        added(database, "zoo:mlp", device="cuda", created_at=after(-8))
        run = added(database, "zoo:mlp", device="cpu")
        taken = claimed(database, "cpu")
        assert taken is not None
        assert taken.id == run.id

    def test_a_run_that_began_on_one_model_of_gpu_goes_on_on_its_like(self, database: Database) -> None:
        added(database, "archive", archive=STORED, device="cuda")
        with database.begin() as connection:
            begun = runs.claim(connection, "w", device="cuda:0", gpu="NVIDIA H200", now=after(0))
            assert begun is not None
            here = an_environment().model_copy(update={"device": "cuda", "gpu": "NVIDIA H200"})
            runs.note_inspection(connection, begun, fingerprint="f", environment=here, inapplicable={})
        for gpu, is_taken in (("NVIDIA A100", False), ("NVIDIA H200", True)):
            with database.begin() as connection:
                taken = runs.claim(connection, "v", device="cuda:1", gpu=gpu, now=after(1000))
            assert (taken is not None) is is_taken

    def test_a_run_that_began_on_one_kind_of_device_goes_on_there(self, database: Database) -> None:
        """What was measured on a GPU says nothing of a CPU."""
        run = added(database, "zoo:mlp", device="")
        assert claimed(database, "cuda:0") is not None
        assert claimed(database, "cpu", at=61) is None
        heir = claimed(database, "cuda:3", at=61)
        assert heir is not None
        assert (heir.id, heir.device) == (run.id, "cuda:3")

    # Counting and reading on

    def test_runs_are_counted_by_how_they_stand(self, database: Database) -> None:
        with database.begin() as connection:
            assert runs.count(connection) == dict.fromkeys(RunStatus, 0)
            for status in (RunStatus.QUEUED, RunStatus.FAILED, RunStatus.QUEUED):
                runs.add(connection, a_run(status=status))
            counted = runs.count(connection)
        assert counted == {**dict.fromkeys(RunStatus, 0), RunStatus.QUEUED: 2, RunStatus.FAILED: 1}
        assert all(isinstance(status, RunStatus) for status in counted)

    def test_trials_are_read_on_from_where_one_stopped(self, database: Database) -> None:
        added(database, "zoo:mlp")
        run = claimed(database, "cpu")
        assert run is not None
        with database.begin() as connection:
            for number in (2, 0, 5, 1):
                trials.add(connection, run, a_trial(run, number))

            def numbers(**where: int) -> list[int]:
                return [trial.number for trial in trials.list_of(connection, run.id, **where)]

            assert numbers() == numbers(after=-1) == [0, 1, 2, 5]
            assert numbers(after=1) == [2, 5]
            assert numbers(limit=2) == [0, 1]
            assert numbers(after=0, limit=2) == [1, 2]
            assert numbers(after=5) == []
