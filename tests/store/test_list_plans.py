"""How a list of runs is read: off an index in every order by every filter, so that it stays fast as the runs grow."""

from collections.abc import Iterator
from itertools import combinations, cycle, product

import pytest
from sqlalchemy import Connection, text

from tests.store.samples import START
from tuner.records import RunStatus, Verdict
from tuner.store.database import Database
from tuner.store.queries import runs
from tuner.store.queries.runs import Sort

FILTERS = {
    "status": RunStatus.RUNNING,
    "fingerprint": "f",
    "gpu": "g",
    "workload": "w",
    "verdict": Verdict.SAME,
    "tag": "t",
    "is_lost": True,
    "min_gain": 1.5,
    "min_gain_low": 1.5,
    "max_memory": 0.5,
    "min_trials": 3,
    "created_after": START,
}
NULLABLE = (Sort.GAIN, Sort.INTERVAL, Sort.MEMORY, Sort.VERDICT, Sort.GPU)
#: Columns that may be null are read in two parts.
PARTS = 2 * (len(Sort) + sum(sort in NULLABLE for sort in Sort))


def statements(connection: Connection) -> Iterator[str]:
    """Of a page of a team's list in every order by no filter, by each and by all, and in one order by every two."""
    asked: list[str] = []
    execute = connection.execute

    def noting(statement: object, *rest: object) -> object:
        asked.append(str(statement.compile(dialect=connection.dialect, compile_kwargs={"literal_binds": True})))
        return execute(statement, *rest)

    connection.execute = noting
    orders = list(product(Sort, (True, False)))
    sets = [names for number in (0, 1, len(FILTERS)) for names in combinations(FILTERS, number)]
    for names, (sort, falls) in [*product(sets, orders), *zip(combinations(FILTERS, 2), cycle(orders), strict=False)]:
        filters = {name: FILTERS[name] for name in names}
        runs.page(connection, team="red", sort=sort, is_descending=falls, **filters)
    connection.execute = execute
    assert len(asked) > len(sets) * PARTS
    yield from asked


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
def test_nothing_is_sorted_or_read_from_end_to_end(database: Database) -> None:
    with database.read() as connection:
        for statement in statements(connection):
            steps = [row.detail for row in connection.execute(text(f"EXPLAIN QUERY PLAN {statement}"))]
            assert len(steps) == 1 and "SEARCH kitsune_runs USING INDEX ix_kitsune_runs_team_" in steps[0], steps


@pytest.mark.parametrize("url", ["postgresql"], indirect=True)
def test_an_index_serves_every_list(database: Database) -> None:
    """PostgreSQL reads from end to end what is as small as this, unless it is told not to where it can."""
    with database.read() as connection:
        asked = list(statements(connection))
        connection.execute(text("SET LOCAL enable_seqscan = off"))
        for statement in asked:
            plan = [row[0] for row in connection.execute(text("EXPLAIN (COSTS OFF) " + statement.replace("%%", "%")))]
            assert any("ix_kitsune_runs_" in line for line in plan), plan
            assert not any("Seq Scan" in line for line in plan), plan
