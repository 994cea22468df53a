"""What earlier runs have proven of a step, on SQLite and on PostgreSQL alike."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import pytest
from sqlalchemy import Connection

from kitsune.knobs import Choice
from tests.store.samples import START, a_plan, a_run, after, an_environment
from tests.unit.tuner.simulation import trial
from tuner.measuring.protocol import Inspection
from tuner.records import Run, Source, Trial
from tuner.store.database import Database
from tuner.store.queries import runs, trials
from tuner.tuning.recall import knowledge_of, proven_before

COMPILED: dict[str, Choice] = {"precision": "bf16", "compile": "reduce-overhead"}
GRAPH: dict[str, Choice] = {"precision": "bf16", "compile": "default", "capture": "step"}
SEARCHED = (
    trial(0, {}, Source.BASELINE),
    trial(1, COMPILED, Source.STOCK, 1.5),
    trial(2, GRAPH, speedup=2.0),
    trial(3, GRAPH, Source.CONFIRM, 2.0),
)


def found(**changes: Any) -> Inspection:
    """A first look at the step."""
    sizes = {"step_ms": 1.0, "peak_bytes": 1, "parameters": 1}
    given = {"environment": an_environment(), "fingerprint": "f", "inapplicable": {}, "random": False, **sizes}
    return Inspection(**{**given, **changes})


def finished(
    connection: Connection,
    tried: Sequence[Trial] = SEARCHED,
    at: int = 1,
    evidence: Mapping[str, Any] = MappingProxyType({}),
    **changes: Any,
) -> Run:
    """A run that has ended with the graph as its plan."""
    run = runs.add(connection, a_run(**{"budget_s": 300.0, **changes}))
    claimed = runs.claim_one(connection, run.id, "w", now=START)
    assert claimed is not None
    for each in tried:
        trials.add(connection, claimed, each.model_copy(update={"run_id": run.id}))
    plan = a_plan(knobs=GRAPH)
    assert plan.evidence is not None
    plan = plan.model_copy(update={"evidence": plan.evidence.model_copy(update={"run_id": run.id, **evidence})})
    runs.finish(connection, claimed, plan=plan, now=after(at))
    return run


class TestRecall:
    def test_the_trials_behind_a_proven_plan_are_found(self, database: Database) -> None:
        with database.begin() as connection:
            earlier = finished(connection)
        with database.read() as connection:
            proven = knowledge_of(connection, a_run(budget_s=300.0), found(), 300.0).proven
        assert proven is not None
        assert (proven.run_id, proven.first.number) == (earlier.id, 2)
        assert proven.stock is not None
        assert proven.stock.knobs == COMPILED

    def test_a_run_that_only_measured_again_is_passed_over(self, database: Database) -> None:
        with database.begin() as connection:
            first = finished(connection)
            finished(connection, SEARCHED[-1:], at=9)
        with database.read() as connection:
            proven = proven_before(connection, a_run(budget_s=300.0), found(), 300.0)
        assert proven is not None
        assert proven.run_id == first.id

    @pytest.mark.parametrize("said", ["ambiguous", "too_noisy"])
    def test_what_was_left_open_is_searched_for_again(self, database: Database, said: str) -> None:
        with database.begin() as connection:
            finished(connection, evidence={"verdict": said})
        with database.read() as connection:
            assert proven_before(connection, a_run(budget_s=300.0), found(), 300.0) is None

    @pytest.mark.parametrize(
        ("run", "looked"),
        [
            ({"budget_s": 900.0}, {}),
            ({"budget_s": None, "budget_trials": 9}, {}),
            ({"memory_limit_bytes": 2**30}, {}),
            ({}, {"fingerprint": "another"}),
            ({}, {"batch": "9x9"}),
            ({}, {"environment": an_environment(torch="1.0")}),
        ],
    )
    def test_of_another_step_or_machine_or_a_shorter_run_nothing_is_proven(
        self, database: Database, run: dict[str, Any], looked: dict[str, Any]
    ) -> None:
        with database.begin() as connection:
            finished(connection)
        asked = a_run(**{"budget_s": 300.0, **run})
        with database.read() as connection:
            assert proven_before(connection, asked, found(**looked), asked.budget_s) is None

    def test_a_search_that_the_user_ended_is_made_again(self, database: Database) -> None:
        with database.begin() as connection:
            finished(connection, evidence={"interrupted": True})
        with database.read() as connection:
            assert proven_before(connection, a_run(budget_s=300.0), found(), 300.0) is None

    @pytest.mark.parametrize(
        ("had_s", "asked", "budget_s", "is_proven"),
        [
            (180.0, {}, 210.0, True),  # both suggested, by two looks at the step
            (180.0, {}, 600.0, False),
            (180.0, {"budget_s": 180.0}, 180.0, True),
            (180.0, {"budget_s": 3600.0}, 3600.0, False),
            (180.0, {"budget_trials": 25}, None, False),
            (None, {"budget_s": 60.0}, 60.0, False),  # of a store from before it was kept
        ],
    )
    def test_a_budget_that_was_suggested_counts_as_one_that_was_asked_for(
        self, database: Database, had_s: float | None, asked: dict[str, Any], budget_s: float | None, is_proven: bool
    ) -> None:
        with database.begin() as connection:
            finished(connection, evidence={"budget_s": had_s}, budget_s=None)
        run = a_run(**{"budget_s": None, "budget_trials": None, **asked})
        with database.read() as connection:
            assert (proven_before(connection, run, found(), budget_s) is not None) == is_proven
