"""What was written is given back or missed, never something else, on SQLite and on PostgreSQL alike."""

import logging

import pytest
from sqlalchemy import Connection, update

from kitsune.errors import PlanError
from kitsune.plan import Plan
from tests.store.samples import START, a_plan, an_archive
from tuner.store import tables
from tuner.store.database import Database
from tuner.store.queries import archives, plans

#: Each leaves a plan: only its content tells. One is the same number, spelled in another way.
CHANGES = (('"bf16"', '"fp16"'), ("1.5", "1.7"), ("NVIDIA H200", "NVIDIA H100"), ("0.0001", "1e-04"), ('"f"', '"g"'))


def damage(connection: Connection, plan: Plan, old: str, new: str) -> None:
    text = plan.canonical_json()
    assert old in text
    altered = text.replace(old, new)
    connection.exec_driver_sql(f"UPDATE kitsune_plans SET document = '{altered}' WHERE plan_id = '{plan.plan_id}'")


class TestPlans:
    @pytest.mark.parametrize(("old", "new"), CHANGES)
    def test_a_text_that_was_altered_is_not_given(
        self, database: Database, caplog: pytest.LogCaptureFixture, old: str, new: str
    ) -> None:
        plan = a_plan()
        with database.begin() as connection:
            plans.put(connection, plan, now=START)
            damage(connection, plan, old, new)
            with pytest.raises(PlanError, match="altered"):
                plans.get_document(connection, plan.plan_id)
            with pytest.raises(PlanError, match="altered"):
                plans.get(connection, plan.plan_id)
            with caplog.at_level(logging.WARNING):
                assert plans.find_documents(connection, "f") == []
        assert plan.plan_id in caplog.text

    @pytest.mark.parametrize("name", ["fingerprint", "batch", "device", "gpu", "driver", "torch", "memory_bytes"])
    def test_a_row_that_says_something_else_than_its_plan_is_left_out(self, database: Database, name: str) -> None:
        plan = a_plan()
        value = 7 if name == "memory_bytes" else "other"
        with database.begin() as connection:
            plans.put(connection, plan, now=START)
            assert len(plans.find_documents(connection, "f")) == 1
            connection.execute(update(tables.plans).values({name: value}))
            assert plans.find_documents(connection, "f") == []
            assert plans.find_documents(connection, "other") == []
            assert plans.get(connection, plan.plan_id) == plan

    def test_the_next_best_plan_takes_the_place_of_a_damaged_one(self, database: Database) -> None:
        best, next_best, worst = a_plan(1.9), a_plan(1.7), a_plan(1.5)
        with database.begin() as connection:
            for plan in (worst, best, next_best):
                plans.put(connection, plan, now=START)
            damage(connection, best, "bf16", "fp16")
            assert [found.plan_id for found in plans.find_documents(connection, "f", limit=1)] == [next_best.plan_id]
            found = plans.find_documents(connection, "f", limit=2)
        assert [one.plan_id for one in found] == [next_best.plan_id, worst.plan_id]


def test_an_archive_that_was_damaged_is_mended_by_sending_it_again(database: Database) -> None:
    archive = an_archive()
    content = archive.to_bytes()
    with database.begin() as connection:
        stored, _ = archives.put(connection, content, archive, now=START)
        altered = content.replace(b"SGD", b"SGX")
        connection.execute(update(tables.archives).values(content=altered, fingerprint="0" * 64))
        assert archives.content(connection, stored.sha256) == altered
    with database.begin() as connection:
        again, is_new = archives.put(connection, content, archive)
        assert archives.content(connection, stored.sha256) == content
    assert (again, is_new) == (stored, False)
