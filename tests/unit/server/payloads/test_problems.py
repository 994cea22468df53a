"""Every error is answered with a problem: of routing, of the database, unexpected. None discloses internals."""

import logging
import re

import pytest
from fastapi.testclient import TestClient

from kitsune import errors
from kitsune.errors import KitsuneError
from server.app import create_app
from server.payloads.problems import KINDS, kind_of
from server.settings import ServerSettings
from tests.unit.server.conftest import assert_problem
from tuner.store.queries import runs

SECRET = "sqlite:////home/somebody/kitsune.db"


@pytest.mark.parametrize("path", ["/api", "/api/v2/runs", "/api/v0/plans", "/docs", "/redoc", "/favicon.ico", "/.env"])
def test_what_is_not_there_names_what_is(client, path):
    assert_problem(client.get(path), 404, "/api/v1", "/openapi.json")


@pytest.mark.parametrize("path", ["/healthz", "/api/v1/runs", "/api/v1/plans", "/api/v1/archives/" + "0" * 64])
@pytest.mark.parametrize("method", ["DELETE", "PATCH", "OPTIONS", "BREW"])
def test_a_method_that_a_route_has_not_names_those_that_it_has(client, path, method):
    response = client.request(method, path)
    assert_problem(response, 405, "Allow")
    assert response.headers["allow"]


def test_a_path_of_two_routers_names_the_methods_of_both(client):
    assert client.request("BREW", "/api/v1/runs").headers["allow"] == "GET, HEAD, POST"
    assert client.put("/healthz").headers["allow"] == "GET, HEAD"


RAISED = [
    (errors.StoreBusyError(f"{SECRET} is locked"), 503),
    (errors.StoreFullError(f"{SECRET} is full"), 507),
    (errors.SchemaError(f"{SECRET} is old"), 503),
    (errors.StoreError(f"{SECRET} is gone"), 503),
    (errors.LeaseLostError(SECRET), 503),
    (errors.PlanError("knobs", SECRET), 500),
    (KitsuneError(SECRET), 500),
    (RuntimeError(SECRET), 500),
    (RecursionError(SECRET), 500),
]


@pytest.mark.parametrize(("error", "status"), RAISED, ids=lambda value: type(value).__name__)
def test_what_fails_inside_is_told_to_the_log_and_not_to_the_client(client, monkeypatch, caplog, error, status):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(runs, "page", fail)
    with caplog.at_level(logging.ERROR, "kitsune.server"):
        response = client.get("/api/v1/runs")
    problem = assert_problem(response, status)
    assert SECRET not in response.text
    assert re.fullmatch(r"urn:uuid:[0-9a-f-]{36}", problem["instance"])
    assert problem["instance"] in caplog.text and SECRET in caplog.text
    assert (response.headers.get("retry-after") == "1") == (status == 503)


def test_what_the_client_caused_is_told_to_the_client(client, monkeypatch):
    def fail(*_, **__):
        raise errors.ConflictError("the key 'k' stands for another request")

    monkeypatch.setattr(runs, "page", fail)
    assert_problem(client.get("/api/v1/runs"), 409, "another request")


def test_every_error_of_the_tree_has_an_answer():
    kinds = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, KitsuneError)]
    assert len(kinds) > 15
    for kind in kinds:
        answered = kind_of(kind)
        assert answered in KINDS.values()
        assert answered.status < 500 or answered.detail


def test_a_database_that_is_gone_is_not_ready(database, tmp_path):
    with TestClient(create_app(database, ServerSettings()), base_url="http://localhost") as stranger:
        assert stranger.get("/readyz").status_code == 200
        database.close()
        (tmp_path / "server.db").unlink()
        for path in tmp_path.glob("server.db-*"):
            path.unlink()
        (tmp_path / "server.db").mkdir()
        assert_problem(stranger.get("/readyz"), 503)
        assert stranger.get("/healthz").status_code == 200


@pytest.mark.parametrize("path", ["/healthz", "/readyz"])
def test_load_balancers_may_ask_for_the_head_alone(stranger, path):
    asked, whole = stranger.head(path), stranger.get(path)
    assert (asked.status_code, asked.content) == (200, b"")
    assert asked.headers == whole.headers
    assert_problem(stranger.post(path), 405)


# Metrics --------------------------------------------------------------------------------------------------------------


def test_metrics_count_requests_by_the_template_of_their_route(client, stranger):
    for name in ("a", "b", "c"):
        client.get(f"/api/v1/runs/{name}")
    stranger.get("/api/v1/runs")
    client.request("BREW", "/healthz")
    client.get("/", headers={"Host": "evil.example"})
    text = client.get("/metrics").text
    assert 'kitsune_http_requests_total{method="GET",route="/api/v1/runs/{run_id}",status="404"} 3.0' in text
    assert 'kitsune_http_requests_total{method="GET",route="/api/v1/runs",status="401"} 1.0' in text
    assert 'method="other",route="/healthz",status="405"} 1.0' in text
    assert 'kitsune_http_requests_total{method="GET",route="none",status="421"} 1.0' in text
    assert 'kitsune_http_request_seconds_bucket{le="+Inf",method="GET",route="/api/v1/runs/{run_id}"} 3.0' in text
    assert "BREW" not in text


def test_metrics_count_runs(client, archive):
    client.post("/api/v1/runs", json={"archive": archive.sha256})
    response = client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert 'kitsune_runs{status="queued"} 1.0' in response.text
    assert 'kitsune_runs{status="failed"} 0.0' in response.text
