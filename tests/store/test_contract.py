"""What the store promises, on SQLite and on PostgreSQL alike."""

import base64
from collections.abc import Callable
from datetime import timedelta
from uuid import uuid4

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import Connection, select

from kitsune.errors import CursorError, LeaseLostError, PlanError, StoreError
from kitsune.plan import Plan
from tests.store import samples
from tests.store.samples import START, a_plan, a_run, a_trial, after, an_environment
from tuner.records import Run, RunStatus, Trial, Verdict
from tuner.store import tables
from tuner.store.database import Database
from tuner.store.queries import plans, runs, trials

#: Examples share one database; each brings ids of its own.
on_one_database = settings(
    max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)

WRITES: dict[str, Callable[[Connection, Run], object]] = {
    "heartbeat": lambda c, run: runs.heartbeat(c, run, now=after(500)),
    "note_inspection": lambda c, run: runs.note_inspection(
        c, run, fingerprint="z", environment=an_environment(), inapplicable={}
    ),
    "release": runs.release,
    "keep": lambda c, run: runs.keep(c, run, a_plan(9.0), Verdict.FASTER),
    "finish": lambda c, run: runs.finish(c, run, verdict=Verdict.SAME, now=after(500)),
    "finish with a plan": lambda c, run: runs.finish(c, run, plan=a_plan(9.0), verdict=Verdict.FASTER, now=after(500)),
    "fail": lambda c, run: runs.fail(c, run, "reason", now=after(500)),
    "trials.add": lambda c, run: trials.add(c, run, a_trial(run, number=7)),
    "plans.put": lambda c, run: plans.put(c, a_plan(9.0), run, now=after(500)),
}


def everything(database: Database) -> dict[str, list[tuple[object, ...]]]:
    """Every row of every table."""
    with database.read() as connection:
        return {
            name: [tuple(row) for row in connection.execute(select(table).order_by(*table.primary_key.columns))]
            for name, table in tables.metadata.tables.items()
        }


def claimed(database: Database, **changes: object) -> Run:
    """A stored run, claimed at START by worker "w" for 60 s."""
    run = a_run(**changes)
    with database.begin() as connection:
        runs.add(connection, run)
        mine = runs.claim_one(connection, run.id, "w", lease_s=60, now=START)
    assert mine is not None
    return mine


class TestStore:
    # What goes in comes out

    @on_one_database
    @given(run=samples.runs)
    def test_a_run_comes_back_with_every_field(self, database: Database, run: Run) -> None:
        run = run.evolve(id=str(uuid4()))
        with database.begin() as connection:
            runs.add(connection, run)
        with database.read() as connection:
            assert runs.get(connection, run.id) == run

    @on_one_database
    @given(trial=samples.trials)
    def test_a_trial_comes_back_with_every_field(self, database: Database, trial: Trial) -> None:
        run = claimed(database, id=str(uuid4()))
        trial = trial.model_copy(update={"run_id": run.id})
        with database.begin() as connection:
            assert trials.add(connection, run, trial)
        with database.read() as connection:
            assert trials.list_of(connection, run.id) == [trial]

    @on_one_database
    @given(plan=samples.plans)
    def test_a_plan_comes_back_by_its_id(self, database: Database, plan: Plan) -> None:
        with database.begin() as connection:
            plans.put(connection, plan)
        with database.read() as connection:
            stored = plans.get(connection, plan.plan_id)
        assert stored == plan

    def test_what_is_not_there_is_none(self, database: Database) -> None:
        with database.begin() as connection:
            assert runs.get(connection, "no") is None
            assert plans.get(connection, "no") is None
            assert trials.list_of(connection, "no") == []
            assert runs.cancel(connection, "no") is None
            assert runs.claim(connection, "w", device="cpu") is None
            assert runs.claim_one(connection, "no", "w") is None
            assert plans.find(connection, "no", an_environment()) == []

    @pytest.mark.parametrize("changes", [{"workload": "a\x00b"}, {"seed": 2**63}], ids=["NUL", "65 bits"])
    def test_what_no_column_can_hold_is_refused(self, database: Database, changes: dict[str, object]) -> None:
        with pytest.raises(StoreError, match="cannot be stored"), database.begin() as connection:
            runs.add(connection, a_run(**changes))

    def test_an_id_is_given_once_and_a_transaction_is_kept_whole_or_not_at_all(self, database: Database) -> None:
        run = a_run()

        def add_twice() -> None:
            with database.begin() as connection:
                runs.add(connection, run)
                runs.add(connection, run)

        with pytest.raises(StoreError, match="contradicts"):
            add_twice()
        with database.read() as connection:
            assert runs.get(connection, run.id) is None

    def test_a_reading_transaction_refuses_to_write(self, database: Database) -> None:
        with pytest.raises(StoreError, match="read-only"), database.read() as connection:
            runs.add(connection, a_run())
        claimed(database)  # the same connection of the pool may write again

    # The queue

    def test_the_oldest_run_is_claimed_first(self, database: Database) -> None:
        with database.begin() as connection:
            for name, at in (("c", 2), ("b", 1), ("a", 1)):
                runs.add(connection, a_run(id=name, created_at=after(at)))
        order = []
        for _ in range(4):
            with database.begin() as connection:
                order.append(runs.claim(connection, "w", device="cpu", now=after(3)))
        assert [run.id if run else None for run in order] == ["a", "b", "c", None]

    def test_a_claim_is_written_down(self, database: Database) -> None:
        run = claimed(database)
        assert (run.status, run.worker, run.attempt) == (RunStatus.RUNNING, "w", 1)
        assert run.started_at == run.heartbeat_at == START
        assert run.lease_until == after(60)
        with database.read() as connection:
            assert runs.get(connection, run.id) == run

    def test_a_run_is_taken_over_only_after_its_lease(self, database: Database) -> None:
        run = claimed(database)
        with database.begin() as connection:
            assert runs.claim(connection, "v", device="cpu", now=after(60)) is None
            assert runs.claim_one(connection, run.id, "v", now=after(60)) is None
            taken = runs.claim(connection, "v", device="cpu", lease_s=10, now=after(60.000001))
        assert taken is not None
        assert (taken.id, taken.attempt, taken.worker) == (run.id, 2, "v")
        assert (taken.started_at, taken.lease_until) == (START, after(70.000001))

    def test_a_heartbeat_extends_the_lease(self, database: Database) -> None:
        run = claimed(database)
        with database.begin() as connection:
            beaten = runs.heartbeat(connection, run, lease_s=60, now=after(50))
            assert (beaten.heartbeat_at, beaten.lease_until) == (after(50), after(110))
            assert runs.claim(connection, "v", device="cpu", now=after(100)) is None

    def test_a_late_heartbeat_still_counts_when_nobody_took_over(self, database: Database) -> None:
        run = claimed(database)
        with database.begin() as connection:
            assert runs.heartbeat(connection, run, now=after(1000)).status is RunStatus.RUNNING

    def test_a_released_run_is_anybodys(self, database: Database) -> None:
        run = claimed(database)
        with database.begin() as connection:
            released = runs.release(connection, run)
            assert (released.status, released.worker, released.lease_until) == (RunStatus.QUEUED, None, None)
            taken = runs.claim(connection, "v", device="cpu", now=after(1))
        assert taken is not None
        assert (taken.attempt, taken.worker) == (2, "v")

    def test_a_run_that_kills_its_workers_is_ended(self, database: Database) -> None:
        run = claimed(database)
        at = START
        for attempt in (2, 3):
            at += timedelta(seconds=61)
            with database.begin() as connection:
                taken = runs.claim(connection, "w", device="cpu", lease_s=60, max_deaths=3, now=at)
            assert taken is not None
            assert taken.attempt == attempt
        with database.begin() as connection:
            assert runs.claim(connection, "w", device="cpu", max_deaths=3, now=at + timedelta(seconds=61)) is None
            ended = runs.get(connection, run.id)
        assert ended is not None
        assert ended.status is RunStatus.FAILED
        assert "vanished" in str(ended.error)

    @pytest.mark.parametrize("workload", ["zoo:mlp", "live"])
    def test_one_that_was_abandoned_with_its_plan_has_finished(self, database: Database, workload: str) -> None:
        run, plan = claimed(database, workload=workload), a_plan()
        with database.begin() as connection:
            kept = runs.keep(connection, run, plan, Verdict.FASTER)
            assert runs.fail_abandoned(connection, max_deaths=1, now=after(61)) == 1
            ended = runs.get(connection, run.id)
        assert (kept.status, kept.plan_id, kept.verdict) == (RunStatus.RUNNING, plan.plan_id, Verdict.FASTER)
        assert ended is not None
        assert (ended.status, ended.error, ended.finished_at) == (RunStatus.FINISHED, None, after(61))
        assert (ended.plan_id, ended.speedup) == (plan.plan_id, plan.evidence and plan.evidence.speedup)

    def test_a_live_model_is_gone_with_its_process(self, database: Database) -> None:
        run = claimed(database, workload="live")
        with database.begin() as connection:
            assert runs.fail_abandoned(connection, now=after(60)) == 0
            assert runs.claim(connection, "v", device="cpu", now=after(61)) is None
            ended = runs.get(connection, run.id)
        assert ended is not None
        assert (ended.status, ended.finished_at) == (RunStatus.FAILED, after(61))

    def test_inspection_is_written_down(self, database: Database) -> None:
        run = claimed(database)
        with database.begin() as connection:
            noted = runs.note_inspection(
                connection, run, fingerprint="f", environment=an_environment(), inapplicable={"a=b": "no"}
            )
            assert runs.page(connection, gpu="NVIDIA H200").runs == (noted,)
        assert (noted.fingerprint, noted.environment, noted.inapplicable) == ("f", an_environment(), {"a=b": "no"})

    def test_finish_keeps_the_plan_and_the_verdict(self, database: Database) -> None:
        run, plan = claimed(database), a_plan()
        with database.begin() as connection:
            done = runs.finish(connection, run, plan=plan, verdict=Verdict.FASTER, now=after(9))
            assert plans.get(connection, plan.plan_id) == plan
        assert (done.status, done.plan_id, done.verdict) == (RunStatus.FINISHED, plan.plan_id, Verdict.FASTER)
        assert (done.finished_at, done.lease_until) == (after(9), None)

    def test_fail_keeps_the_reason(self, database: Database) -> None:
        run = claimed(database)
        with database.begin() as connection:
            done = runs.fail(connection, run, "bad\x00byte", now=after(9))
        assert (done.status, done.error, done.finished_at) == (RunStatus.FAILED, "bad\ufffdbyte", after(9))

    def test_a_queued_run_is_cancelled_before_it_starts(self, database: Database) -> None:
        run = a_run()
        with database.begin() as connection:
            runs.add(connection, run)
            cancelled = runs.cancel(connection, run.id, now=after(1))
            assert runs.claim(connection, "w", device="cpu", now=after(2)) is None
        assert cancelled is not None
        assert (cancelled.status, cancelled.finished_at) == (RunStatus.CANCELLED, after(1))

    def test_a_worker_hears_of_a_cancel_at_its_heartbeat(self, database: Database) -> None:
        run = claimed(database)
        with database.begin() as connection:
            cancelled = runs.cancel(connection, run.id, now=after(1))
            assert runs.heartbeat(connection, run, now=after(2)) == cancelled
            assert runs.claim(connection, "v", device="cpu", now=after(1000)) is None

    @pytest.mark.parametrize("is_released", [False, True])
    def test_one_that_is_cancelled_with_its_plan_has_finished(self, database: Database, is_released: bool) -> None:
        """As a finish leaves it, whether or not somebody was at work on it."""
        run, twin, plan = claimed(database), claimed(database), a_plan()
        with database.begin() as connection:
            runs.keep(connection, run, plan, Verdict.FASTER)
            if is_released:
                runs.release(connection, run)
            ended = runs.cancel(connection, run.id, now=after(9))
            with pytest.raises(LeaseLostError, match="it is finished now"):
                runs.heartbeat(connection, run, now=after(10))
            other = runs.finish(connection, twin, plan=plan, verdict=Verdict.FASTER, now=after(9))
        assert ended is not None
        assert (ended.status, ended.finished_at, ended.lease_until) == (RunStatus.FINISHED, after(9), None)
        told = {"plan_id", "verdict", "speedup", "memory_ratio", "error"}
        assert ended.model_dump(include=told) == other.model_dump(include=told)

    def test_what_has_ended_cannot_be_cancelled(self, database: Database) -> None:
        run = claimed(database)
        with database.begin() as connection:
            done = runs.finish(connection, run, now=after(1))
            assert runs.cancel(connection, run.id, now=after(2)) == done

    # The fence

    @pytest.mark.parametrize("write", WRITES)
    def test_a_zombie_writes_nothing_after_a_take_over(self, database: Database, write: str) -> None:
        zombie = claimed(database)
        with database.begin() as connection:
            assert runs.claim(connection, "v", device="cpu", lease_s=1000, now=after(61)) is not None
        before = everything(database)
        # The transaction is committed: even what the write did before it raised must leave no trace.
        with database.begin() as connection, pytest.raises(LeaseLostError, match=r"attempt 2 .*worker v"):
            WRITES[write](connection, zombie)
        assert everything(database) == before

    @pytest.mark.parametrize("ending", ["cancel", "finish", "fail", "release"])
    @pytest.mark.parametrize("write", WRITES)
    def test_nothing_is_written_to_a_run_that_is_no_longer_running(
        self, database: Database, write: str, ending: str
    ) -> None:
        run = claimed(database)
        ways = {"cancel": lambda c, r: runs.cancel(c, r.id), **WRITES}
        with database.begin() as connection:
            ways[ending](connection, run)
        before = everything(database)
        with database.begin() as connection:
            if (write, ending) == ("heartbeat", "cancel"):
                assert runs.heartbeat(connection, run).status is RunStatus.CANCELLED
            else:
                with pytest.raises(LeaseLostError, match=r"it is (cancelled|finished|failed|queued) now"):
                    WRITES[write](connection, run)
        assert everything(database) == before

    @pytest.mark.parametrize("write", WRITES)
    def test_an_unknown_run_is_refused(self, database: Database, write: str) -> None:
        with pytest.raises(LeaseLostError, match="no such run"), database.begin() as connection:
            WRITES[write](connection, a_run(attempt=1, status=RunStatus.RUNNING))

    # Trials and plans are written once

    def test_a_trial_counts_once(self, database: Database) -> None:
        run = claimed(database)
        first, again = a_trial(run, 3), a_trial(run, 3, finished_at=after(99))
        with database.begin() as connection:
            assert trials.add(connection, run, first)
            assert not trials.add(connection, run, again)
            assert trials.add(connection, run, a_trial(run, 0))
            assert trials.list_of(connection, run.id) == [a_trial(run, 0), first]

    def test_a_second_worker_sees_the_trials_of_the_first(self, database: Database) -> None:
        run = claimed(database)
        with database.begin() as connection:
            trials.add(connection, run, a_trial(run))
            taken = runs.claim(connection, "v", device="cpu", now=after(61))
            assert taken is not None
            assert trials.list_of(connection, taken.id) == [a_trial(run)]
            assert not trials.add(connection, taken, a_trial(run, finished_at=after(99)))

    def test_a_trial_of_another_run_is_refused(self, database: Database) -> None:
        run, other = claimed(database), claimed(database)
        with pytest.raises(StoreError, match="belongs to"), database.begin() as connection:
            trials.add(connection, run, a_trial(other))

    def test_a_plan_is_written_once(self, database: Database) -> None:
        run, plan = claimed(database), a_plan()
        with database.begin() as connection:
            assert plans.put(connection, plan, now=after(1))
            before = connection.execute(select(tables.plans)).all()
            assert not plans.put(connection, plan, now=after(2))
            assert not plans.put(connection, plan, run, now=after(3))
            assert connection.execute(select(tables.plans)).all() == before

    # Finding

    def test_plans_are_found_best_first(self, database: Database) -> None:
        here = an_environment()
        exact_slow, exact_fast = a_plan(1.1), a_plan(1.2)
        other_driver = a_plan(3.0, an_environment(driver="999"))
        other_torch = a_plan(9.0, an_environment(torch="2.11.0"))
        no_evidence = a_plan(environment=here, evidence=None)
        strangers = [
            a_plan(5.0, an_environment(gpu="A100")),
            a_plan(5.0, an_environment(device="cpu")),
            a_plan(5.0, fingerprint="g"),
        ]
        with database.begin() as connection:
            for plan in (*strangers, other_torch, no_evidence, other_driver, exact_slow, exact_fast):
                plans.put(connection, plan, now=START)
            best = plans.find(connection, "f", here)
            assert best == [exact_fast, exact_slow, no_evidence, other_driver, other_torch]
            assert plans.find(connection, "f", here, limit=2) == best[:2]

    def test_an_altered_plan_is_refused(self, database: Database, caplog: pytest.LogCaptureFixture) -> None:
        plan = a_plan()
        altered = plan.canonical_json().replace("bf16", "fp16")
        with database.begin() as connection:
            plans.put(connection, plan)
            connection.exec_driver_sql(f"UPDATE kitsune_plans SET document = '{altered}'")
            with pytest.raises(PlanError, match="altered"):
                plans.get(connection, plan.plan_id)
            assert plans.find(connection, "f", an_environment()) == []
        assert plan.plan_id in caplog.text

    @pytest.mark.parametrize("column", ["status", "inapplicable"])
    def test_an_altered_row_is_refused(self, database: Database, column: str) -> None:
        run = claimed(database)
        with database.begin() as connection:
            connection.exec_driver_sql(f"UPDATE kitsune_runs SET {column} = 'nonsense'")
            with pytest.raises(StoreError, match="altered by hand"):
                runs.get(connection, run.id)

    @on_one_database
    @given(ages=st.lists(st.integers(0, 3), max_size=12), limit=st.integers(1, 5))
    def test_pages_hold_every_run_once_newest_first(self, database: Database, ages: list[int], limit: int) -> None:
        batch = str(uuid4())
        made = [a_run(workload=batch, created_at=after(age)) for age in ages]
        late = a_run(workload=batch, created_at=after(100))
        with database.begin() as connection:
            for run in made:
                runs.add(connection, run)
        seen: list[Run] = []
        with database.begin() as connection:
            page = runs.page(connection, workload=batch, limit=limit)
            runs.add(connection, late)  # arrives between two pages and shifts nothing
            seen += page.runs
            while page.after:
                page = runs.page(connection, workload=batch, limit=limit, after=page.after)
                seen += page.runs
        assert len(seen) == len(made)
        assert {run.id for run in seen} == {run.id for run in made}
        assert [run.created_at for run in seen] == sorted((run.created_at for run in made), reverse=True)

    def test_runs_are_filtered(self, database: Database) -> None:
        kinds = [
            a_run(status=RunStatus.FAILED, fingerprint="f", environment=an_environment()),
            a_run(status=RunStatus.FINISHED, fingerprint="f", verdict=Verdict.SAME),
            a_run(status=RunStatus.FINISHED, fingerprint="g", verdict=Verdict.FASTER, workload="zoo:lenet5"),
        ]
        first, second, third = kinds
        with database.begin() as connection:
            for run in kinds:
                runs.add(connection, run)

            def found(**filters: object) -> set[str]:
                return {run.id for run in runs.page(connection, **filters).runs}

            assert found() == {first.id, second.id, third.id}
            assert found(status=RunStatus.FINISHED) == {second.id, third.id}
            assert found(status=RunStatus.FINISHED, fingerprint="f") == {second.id}
            assert found(gpu="NVIDIA H200") == {first.id}
            assert found(verdict=Verdict.FASTER) == found(workload="zoo:lenet5") == {third.id}
            assert found(status=RunStatus.QUEUED) == set()

    @pytest.mark.parametrize("text", ["0001-01-01T00:00:00+14:00 x", "9999-12-31T23:59:59-14:00 x"])
    def test_a_cursor_that_names_no_time_in_utc_is_refused(self, database: Database, text: str) -> None:
        cursor = base64.urlsafe_b64encode(text.encode()).decode()
        with pytest.raises(CursorError, match="not a cursor"), database.read() as connection:
            runs.page(connection, after=cursor)

    @pytest.mark.parametrize("cursor", ["", "x", "AAAA", "é", "bm93IHg=", "MjAyNi0xMS0yMCB4"])
    def test_a_foreign_cursor_is_refused(self, database: Database, cursor: str) -> None:
        with pytest.raises(StoreError, match="not a cursor"), database.read() as connection:
            runs.page(connection, after=cursor)
