"""Plans found by workload and machine without being read, on SQLite and on PostgreSQL alike."""

from pathlib import Path
from typing import Any

from sqlalchemy import Connection, event

from kitsune.plan import Plan
from tests.store.samples import OTHER_LOSS, OTHER_MODEL, START, a_plan, after, an_archive, an_environment
from tuner.store.database import Database
from tuner.store.engine import open_database
from tuner.store.queries import archives, plans

HERE = {"torch": "2.13.0", "triton": "3.7.1", "cuda": "13.0", "driver": "580"}


def ids(connection: Connection, fingerprint: str = "f", **where: object) -> list[str]:
    return [found.plan_id for found in plans.find_documents(connection, fingerprint, **where)]


def put(connection: Connection, *made: Plan) -> None:
    for plan in made:
        plans.put(connection, plan, now=START)


class TestLookup:
    def test_a_document_is_the_text_that_the_id_is_the_digest_of(self, database: Database) -> None:
        plan = a_plan()
        with database.begin() as connection:
            put(connection, plan)
        with database.read() as connection:
            [found] = plans.find_documents(connection, "f", device="cuda", gpu="NVIDIA H200")
            assert found.document == plans.get_document(connection, plan.plan_id) == plan.canonical_json()
            assert plans.get_document(connection, "no") is None
        assert (found.plan_id, found.fingerprint) == (plan.plan_id, "f")
        known = an_environment().model_dump(exclude={"python", "kitsune"})
        assert {name: getattr(found, name) for name in known} == known

    def test_documents_come_as_plans_do(self, database: Database) -> None:
        here = an_environment()
        near = [a_plan(2.0, an_environment(driver="999")), a_plan(3.0, an_environment(cuda="12.6"))]
        far = [a_plan(9.0, an_environment(torch="2.11.0")), a_plan(8.0, an_environment(triton="3.6.0"))]
        with database.begin() as connection:
            put(connection, *far, *near, a_plan(1.1), a_plan(1.2), a_plan(7.0, an_environment(gpu="A100")))
            software = {**HERE, "compute_capability": "9.0", "memory_bytes": here.memory_bytes}
            found = ids(connection, device="cuda", gpu=here.gpu, software=software)
            assert found == [plan.plan_id for plan in plans.find(connection, "f", here)]
            assert len(found) == 6
            assert ids(connection, gpu=here.gpu, software=software, limit=2) == found[:2]

    def test_what_is_not_known_of_the_machine_does_not_count(self, database: Database) -> None:
        slow, fast = a_plan(1.1), a_plan(1.5, an_environment(torch="2.11.0"))
        elsewhere = a_plan(2.0, an_environment(gpu="A100"))
        on_cpu = a_plan(3.0, an_environment(device="cpu"))
        with database.begin() as connection:
            put(connection, slow, fast, elsewhere, on_cpu)
            h200 = {"device": "cuda", "gpu": "NVIDIA H200"}
            assert ids(connection, **h200) == [fast.plan_id, slow.plan_id]
            assert ids(connection, **h200, software={"torch": "2.13.0"}) == [slow.plan_id, fast.plan_id]
            assert ids(connection, **h200, software={"driver": "580"}) == [fast.plan_id, slow.plan_id]
            assert ids(connection, device="cuda") == [elsewhere.plan_id, fast.plan_id, slow.plan_id]
            assert ids(connection, gpu="NVIDIA H200") == [on_cpu.plan_id, fast.plan_id, slow.plan_id]
            assert len(ids(connection)) == 4

    def test_a_plan_of_this_batch_comes_before_a_larger_gain_with_another(self, database: Database) -> None:
        ours, larger, unknown = a_plan(1.0, batch="4x64"), a_plan(3.0, batch="2048x64"), a_plan(2.0)
        with database.begin() as connection:
            put(connection, larger, ours, unknown)
            assert ids(connection, batch="4x64") == [unknown.plan_id, ours.plan_id, larger.plan_id]
            assert ids(connection, batch="2048x64") == [larger.plan_id, unknown.plan_id, ours.plan_id]
            assert ids(connection) == [larger.plan_id, unknown.plan_id, ours.plan_id]
            assert plans.find(connection, "f", an_environment(), batch="4x64")[1:] == [ours, larger]

    def test_among_equals_the_newest_comes_first(self, database: Database) -> None:
        old, new = a_plan(1.5, knobs={"precision": "fp16"}), a_plan(1.5)
        with database.begin() as connection:
            plans.put(connection, new, now=after(1))
            plans.put(connection, old, now=START)
            assert ids(connection) == [new.plan_id, old.plan_id]

    def test_a_plan_made_by_hand_holds_for_no_machine(self, database: Database) -> None:
        plan = Plan.by_hand(precision="bf16")
        with database.begin() as connection:
            put(connection, plan)
            assert ids(connection, plan.fingerprint or "") == []
            assert plans.get_document(connection, plan.plan_id) == plan.canonical_json()

    # By the model alone

    def test_a_plan_is_found_by_the_model_of_its_archive(self, database: Database) -> None:
        mean, summed, other = an_archive(), an_archive(*OTHER_LOSS), an_archive(*OTHER_MODEL)
        steps = (mean, summed, other)
        by_mean, by_sum, by_other = (a_plan(fingerprint=step.fingerprint) for step in steps)
        with database.begin() as connection:
            put(connection, by_mean, by_sum, by_other)
            assert ids(connection, mean.model_fingerprint) == [], "nothing tells yet whose plan it is"
            for step in steps:
                archives.put(connection, step.to_bytes(), step)
            assert set(ids(connection, mean.model_fingerprint)) == {by_mean.plan_id, by_sum.plan_id}
            assert ids(connection, mean.fingerprint) == [by_mean.plan_id]
            assert ids(connection, other.model_fingerprint) == [by_other.plan_id]
            assert plans.find(connection, other.model_fingerprint, an_environment()) == [by_other]
            assert ids(connection, mean.model_fingerprint, gpu="A100") == []

    def test_a_plan_is_found_once_however_many_archives_name_it(self, database: Database) -> None:
        """Batch sizes give archives of the same fingerprint."""
        plan = a_plan(fingerprint=an_archive().fingerprint)
        with database.begin() as connection:
            put(connection, plan)
            for size in (8, 9, 10):
                archive = an_archive("sizes", "s0", size)
                archives.put(connection, archive.to_bytes(), archive)
            assert ids(connection, archive.model_fingerprint) == [plan.plan_id]

    def test_the_extent_tells_of_whatever_may_change_a_find(self, database: Database) -> None:
        archive, first, other = an_archive(), a_plan(1.1), a_plan(1.2)
        with database.begin() as connection:
            seen = [plans.extent(connection)]
            put(connection, first)
            seen.append(plans.extent(connection))
            put(connection, first)
            assert plans.extent(connection) == seen[-1]
            archives.put(connection, archive.to_bytes(), archive)
            seen.append(plans.extent(connection))
            archives.put(connection, archive.to_bytes(), archive)
            assert plans.extent(connection) == seen[-1]
            plans.delete_of(connection, [first.plan_id])
            plans.put(connection, other, now=after(1))  # as many as before
            seen.append(plans.extent(connection))
        assert seen == [(0, 0, None), (1, 0, START), (1, 1, START), (1, 1, after(1))]


def test_a_search_reads_indexes_and_no_table_from_end_to_end(tmp_path: Path) -> None:
    """On SQLite, which chooses so however few rows there are."""
    sent: list[tuple[str, Any]] = []
    with open_database(f"sqlite:///{tmp_path}/k.db") as database, database.read() as connection:
        event.listen(connection, "before_cursor_execute", lambda *given: sent.append(given[2:4]))
        ids(connection, gpu="NVIDIA H200", software=HERE)
        [(statement, given)] = sent
        steps = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", given).all()
    details = [step.detail for step in steps]
    assert any("ix_kitsune_plans_fingerprint_gpu" in detail for detail in details)
    assert any("ix_kitsune_models_model_fingerprint" in detail for detail in details)
    assert not [detail for detail in details if detail.startswith("SCAN kitsune")]
