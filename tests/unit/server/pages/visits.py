"""Stores stories in a database, and makes signed-in browsers to view them."""

import re
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from fastapi import FastAPI
from fastapi.testclient import TestClient
from sqlalchemy import insert

from kitsune.class_tables import ClassTables
from kitsune.timeline import Timeline
from tests.unit.server.conftest import HERE
from tests.unit.server.pages.stories import Story
from tuner.records import Run, Trial
from tuner.store import tables
from tuner.store.database import Database
from tuner.store.queries import plans, runs, sessions, tokens
from tuner.store.queries.tokens import Scope
from tuner.store.rows import to_row


@dataclass(frozen=True)
class Visit:
    """A browser with a session."""

    client: TestClient
    csrf: str

    def send(self, path: str, **fields: str):
        return self.client.post(path, data={"csrf": self.csrf, **fields}, follow_redirects=False)


@contextmanager
def visit(app: FastAPI, database: Database, *scopes: Scope, team: str = "default") -> Iterator[Visit]:
    with database.begin() as connection:
        token, _ = tokens.create(connection, "ada", scopes or (Scope.READ, Scope.SUBMIT), team=team)
        session, secret = sessions.start(connection, token)
    cookies = {"kitsune_session": secret}
    with TestClient(app, base_url=HERE, cookies=cookies, raise_server_exceptions=False) as client:
        yield Visit(client, session.csrf)


def keep(database: Database, story: Story) -> Run:
    """Stores a complete story, without a worker."""
    run, trials, plan = story
    with database.begin() as connection:
        if plan is not None:
            plans.put(connection, plan)
        runs.add(connection, run)
    keep_trials(database, run, trials)
    return run


def keep_timeline(database: Database, run: Run, timeline: Timeline) -> None:
    content = zlib.compress(timeline.model_dump_json().encode())
    with database.begin() as connection:
        connection.execute(insert(tables.timelines).values(run_id=run.id, content=content))


def keep_class_tables(database: Database, run: Run, found: ClassTables) -> None:
    with database.begin() as connection:
        connection.execute(insert(tables.class_tables).values(to_row(found, run_id=run.id)))


def keep_trials(database: Database, run: Run, trials: Iterable[Trial]) -> None:
    with database.begin() as connection:
        for trial in trials:
            compared = trial.comparison
            row = to_row(
                trial,
                attempt=run.attempt,
                verdict=compared.verdict if compared else None,
                speedup=compared.speedup.median if compared else None,
                failure_kind=trial.failure.kind if trial.failure else None,
            )
            connection.execute(insert(tables.trials).values(row))


def shown(visit: Visit, path: str, status: int = 200) -> str:
    answer = visit.client.get(path, follow_redirects=False)
    assert answer.status_code == status, answer.text
    return answer.text


def link_of(visit: Visit, run_id: str) -> str:
    """Follows the redirect to the page with the new link, as a browser does."""
    assert visit.send(f"/runs/{run_id}/share").headers["location"] == f"/runs/{run_id}"
    (link,) = set(re.findall(rf"{HERE}(/shared/[\w-]+)", shown(visit, f"/runs/{run_id}")))
    return link
