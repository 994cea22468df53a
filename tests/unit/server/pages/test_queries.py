"""The number of database queries of an answer does not depend on the number of runs and trials."""

from collections.abc import Iterator

import pytest
from fastapi import FastAPI
from sqlalchemy import event

from tests.unit.server.conftest import bearer, secret
from tests.unit.server.pages import stories
from tests.unit.server.pages.visits import Visit, keep, visit
from tuner.records import Run
from tuner.store.database import Database

#: `{one}`, `{all}`: ids of runs.
PLACES = (
    "/runs",
    "/runs?sort=gain&order=asc&gpu=NVIDIA+H200&status=finished",
    "/fragments/runs",
    "/runs/{one}",
    "/runs/{one}/live",
    f"/models/{stories.FINGERPRINT}",
    "/compare?ids={all}",
    "/api/v1/runs",
    "/api/v1/runs/{one}",
    "/api/v1/runs/{one}/trials",
    "/api/v1/compare?ids={all}",
)


class Asked:
    """Records the queries, without BEGIN and without the look-up of the token, which is cached."""

    def __init__(self, database: Database) -> None:
        self.statements: list[str] = []
        event.listen(database.engine, "before_cursor_execute", self._note)

    def _note(self, _connection: object, _cursor: object, statement: str, *_: object) -> None:
        if not statement.startswith(("BEGIN", "PRAGMA")) and "FROM kitsune_tokens" not in statement:
            self.statements.append(statement)


@pytest.fixture
def ada(app: FastAPI, database: Database) -> Iterator[Visit]:
    with visit(app, database) as made:
        made.client.headers.update(bearer(secret(database)))
        yield made


def some(database: Database, number: int, trials: int) -> list[Run]:
    """Finished runs, each with its own plan and this number of trials."""
    run, tried, plan = stories.with_a_gain()
    assert plan is not None and plan.evidence is not None
    made = []
    for index in range(number):
        name = f"{number}-{index}"
        mine = plan.model_copy(update={"evidence": plan.evidence.model_copy(update={"run_id": name})})
        copies = [trial.model_copy(update={"run_id": name}) for trial in tried[:trials]]
        made.append(keep(database, (run.evolve(id=name, plan_id=mine.plan_id), copies, mine)))
    return made


def test_many_runs_and_trials_are_asked_for_as_often_as_few(database: Database, ada: Visit) -> None:
    asked = Asked(database)

    def counted(made: list[Run]) -> dict[str, int]:
        counts = {}
        for place in PLACES:
            asked.statements.clear()
            path = place.format(one=made[0].id, all=",".join(run.id for run in made))
            answer = ada.client.get(path)
            assert answer.status_code in (200, 204), (path, answer.text)
            counts[place] = len(asked.statements)
        return counts

    few = counted(some(database, 2, trials=3))
    assert counted(some(database, 12, trials=14)) == few
    assert all(0 < count <= 7 for count in few.values()), few
