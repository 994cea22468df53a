"""What won in earlier runs, on SQLite and on PostgreSQL alike."""

from typing import Any

import pytest
from sqlalchemy import Connection, update

from kitsune.knobs import Choice
from kitsune.plan import Plan
from tests.store.samples import OTHER_LOSS, START, a_plan, a_run, after, an_archive, an_environment
from tuner.store import tables
from tuner.store.database import Database
from tuner.store.queries import archives, known, plans, runs

H200 = "NVIDIA H200"
CONVOLVES = {"attention=flash": "no attention", "attention=cudnn": "no attention"}
ATTENDS = {"layout=channels_last": "no convolution"}


def winners(connection: Connection, **asked: Any) -> list[dict[str, Choice]]:
    given = {"fingerprint": "f", "model_fingerprint": "m", "gpu": H200, "limit": 10}
    return known.winners(connection, **{**given, **asked})


def with_knobs(knobs: dict[str, Choice], fingerprint: str = "f", **changes: Any) -> Plan:
    return a_plan(knobs=knobs, fingerprint=fingerprint, **changes)


def keep(connection: Connection, plan: Plan, inapplicable: dict[str, str] | None = None, team: str = "default") -> None:
    """As a worker does that has finished a run; each plan is newer than the one before."""
    run = runs.add(connection, a_run(team=team))
    claimed = runs.claim_one(connection, run.id, "w", now=START)
    assert claimed is not None
    environment = an_environment()
    claimed = runs.note_inspection(
        connection, claimed, fingerprint=plan.fingerprint, environment=environment, inapplicable=inapplicable or {}
    )
    assert plan.evidence is not None
    plan = plan.model_copy(update={"evidence": plan.evidence.model_copy(update={"run_id": run.id})})
    number = len(plans.find_documents(connection, plan.fingerprint))
    runs.finish(connection, claimed, plan=plan, now=after(number))


STREAMS: dict[str, Choice] = {"capture": "step", "streams": 4}
HALF: dict[str, Choice] = {"precision": "bf16"}
GRAPH: dict[str, Choice] = {"capture": "step"}
COMPILED: dict[str, Choice] = {"compile": "default"}


class TestKnown:
    def test_an_empty_store_knows_nothing(self, database: Database) -> None:
        with database.read() as connection:
            assert winners(connection) == []

    def test_the_nearest_comes_first(self, database: Database) -> None:
        with database.begin() as connection:
            keep(connection, with_knobs(COMPILED, "another"), CONVOLVES)
            keep(connection, with_knobs(STREAMS, "its sister", model_fingerprint="m"), ATTENDS)
            keep(connection, with_knobs(HALF, batch="2x8"))
            keep(connection, with_knobs(GRAPH, batch="16x8"))
        with database.read() as connection:
            found = winners(connection, batch="16x8", inapplicable=CONVOLVES)
            assert found == [GRAPH, HALF, STREAMS, COMPILED]
            assert winners(connection, batch="2x8", inapplicable=CONVOLVES, limit=2) == [HALF, GRAPH]
            assert winners(connection, fingerprint="", model_fingerprint="") != []

    def test_of_plans_of_the_same_step_the_larger_gain_comes_first(self, database: Database) -> None:
        with database.begin() as connection:
            for speedup, knobs in ((1.2, HALF), (3.0, GRAPH), (2.0, COMPILED)):
                plans.put(connection, a_plan(speedup, knobs=knobs), now=START)
            assert winners(connection) == [GRAPH, COMPILED, HALF]

    def test_another_loss_of_the_same_model_is_nearer_than_another_model(self, database: Database) -> None:
        first, other = an_archive(), an_archive(*OTHER_LOSS)
        model = {"fingerprint": first.fingerprint, "model_fingerprint": first.model_fingerprint}
        with database.begin() as connection:
            keep(connection, with_knobs(COMPILED, "another"), CONVOLVES)
            keep(connection, with_knobs(HALF, other.fingerprint), ATTENDS)
            assert winners(connection, **model, inapplicable=CONVOLVES) == [COMPILED, HALF]
            archives.put(connection, other.to_bytes(), other)
            assert winners(connection, **model, inapplicable=CONVOLVES, team="default") == [HALF, COMPILED]
            keep(connection, with_knobs(GRAPH, "live", model_fingerprint=first.model_fingerprint), ATTENDS)
            assert winners(connection, **model, inapplicable=CONVOLVES) == [HALF, GRAPH, COMPILED]

    def test_of_other_models_those_to_which_the_same_choices_apply_come_first(self, database: Database) -> None:
        with database.begin() as connection:
            keep(connection, with_knobs(HALF, "resnet"), CONVOLVES)
            keep(connection, with_knobs(STREAMS, "googlenet"), CONVOLVES)
            keep(connection, with_knobs(STREAMS, "vgg"), CONVOLVES)
            for number in range(3):
                keep(connection, with_knobs(COMPILED, f"gpt {number}"), ATTENDS)
            plans.put(connection, with_knobs(GRAPH, "from a file"), now=START)
        with database.read() as connection:
            assert winners(connection, inapplicable=CONVOLVES) == [STREAMS, HALF, COMPILED, GRAPH]
            assert winners(connection, inapplicable=ATTENDS) == [COMPILED, STREAMS, HALF, GRAPH]

    @pytest.mark.parametrize("where", [{"gpu": "NVIDIA A100"}, {"team": "blue"}])
    def test_other_machines_and_other_teams_teach_nothing(self, database: Database, where: dict[str, str]) -> None:
        with database.begin() as connection:
            keep(connection, with_knobs(HALF), team="red")
        with database.read() as connection:
            assert winners(connection, team="red") == winners(connection) == [HALF]
            assert winners(connection, **where) == []

    def test_a_run_of_another_team_tells_nothing_of_a_plan_of_this_one(self, database: Database) -> None:
        with database.begin() as connection:
            keep(connection, with_knobs(HALF, "theirs"), CONVOLVES, team="red")
            keep(connection, with_knobs(GRAPH, "ours"), ATTENDS, team="blue")
            assert winners(connection, team="blue", inapplicable=CONVOLVES) == [GRAPH]

    def test_plans_that_keep_the_step_or_were_damaged_are_left_out(self, database: Database) -> None:
        damaged = with_knobs(GRAPH)
        with database.begin() as connection:
            for plan in (with_knobs({}), with_knobs(HALF), damaged):
                plans.put(connection, plan, now=START)
            rotten = update(tables.plans).where(tables.plans.c.plan_id == damaged.plan_id)
            connection.execute(rotten.values(speedup_over_eager=99.0))
            assert winners(connection)[0] == GRAPH
            document = damaged.model_copy(update={"batch": "1"})
            connection.execute(rotten.values(document=document))
            assert winners(connection) == [HALF]
