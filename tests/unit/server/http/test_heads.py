"""HEAD is answered as GET without a body, on every route with GET: API, pages and streams."""

import re

import pytest
from fastapi.routing import iter_route_contexts

from tests.store.samples import a_run
from tests.unit.server.conftest import bearer
from tests.unit.server.pages.conftest import HTML, signed_in
from tuner.store.queries import runs, tokens
from tuner.store.queries.tokens import Scope


@pytest.fixture
def run(database):
    with database.begin() as connection:
        return runs.add(connection, a_run())


def of_run(path: str, run) -> str:
    return re.sub(r"\{.*?\}", "0" * 64, path.replace("{run_id}", run.id))


def test_every_route_with_a_get_answers_head_alike(app, stranger, database, run):
    paths = {route.path_format for route in iter_route_contexts(app.routes) if "GET" in (route.methods or ())}
    paths -= {path for path in paths if path.endswith(("/events", "/metrics"))}  # without end; counts these requests
    with database.begin() as connection:
        token, given = tokens.create(connection, "ada", tuple(Scope))
    stranger.cookies.set("kitsune_session", signed_in(database, token)[1])
    assert len(paths) > 25
    for path in sorted(paths):
        headers = bearer(given) if path.startswith("/api") else HTML
        asked = {"headers": headers, "follow_redirects": False}
        got, head = stranger.get(of_run(path, run), **asked), stranger.head(of_run(path, run), **asked)
        assert (head.status_code, head.content) == (got.status_code, b""), path
        assert head.headers.keys() == got.headers.keys(), path
        assert head.headers.get("content-length") == got.headers.get("content-length"), path


def test_head_of_a_stream_ends(client, run):
    answer = client.head(f"/api/v1/runs/{run.id}/events")
    assert (answer.status_code, answer.content) == (200, b"")
    assert answer.headers["content-type"].startswith("text/event-stream")


def test_it_is_guarded_as_get_is_and_where_there_is_no_get_there_is_no_head(client, stranger, run):
    assert stranger.head(f"/api/v1/runs/{run.id}").status_code == 401
    answer = client.head(f"/api/v1/runs/{run.id}/cancel")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    assert client.put(f"/api/v1/runs/{run.id}").headers["allow"] == "DELETE, GET, HEAD, PATCH"


def test_it_is_counted_as_what_it_is_by_its_route(client, run):
    client.head(f"/api/v1/runs/{run.id}")
    counted = client.get("/metrics").text
    assert 'kitsune_http_requests_total{method="HEAD",route="/api/v1/runs/{run_id}",status="200"} 1.0' in counted
