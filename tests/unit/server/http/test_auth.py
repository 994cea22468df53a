"""All routes of the application with every state of a token."""

import re
from itertools import product
from types import SimpleNamespace

import pytest
from fastapi.routing import iter_route_contexts
from fastapi.testclient import TestClient

from server.app import EVERYWHERE, GUARDED, create_app
from server.http import token_cache, ttl_cache
from server.http.auth import GuardedRouter
from server.pages.frame import PageRoute
from server.settings import ServerSettings
from tests.store.samples import after
from tests.unit.server.conftest import HERE, assert_problem, bearer, expired, revoked, secret
from tuner.store.database import Database
from tuner.store.queries import tokens
from tuner.store.queries.tokens import Scope, new_secret

#: Routes without a token, on loopback.
OPEN = {("GET", path) for path in ("/healthz", "/readyz", "/openapi.json", "/static/{digest}/{name}")}
#: Those of them that are not in the OpenAPI document.
UNTOLD = {("GET", "/openapi.json"), ("GET", "/static/{digest}/{name}")}
#: The scope of each route; a new route must be added here.
#: Their answers show the run, so `submit` alone is not enough.
ALSO_READ = {("PATCH", "/api/v1/runs/{run_id}"), ("POST", "/api/v1/runs/{run_id}/share")}
NEEDS = {
    ("PUT", "/api/v1/archives/{sha256}"): Scope.SUBMIT,
    ("POST", "/api/v1/runs"): Scope.SUBMIT,
    ("GET", "/api/v1/runs"): Scope.READ,
    ("GET", "/api/v1/runs/{run_id}"): Scope.READ,
    ("GET", "/api/v1/runs/{run_id}/trials"): Scope.READ,
    ("GET", "/api/v1/runs/{run_id}/events"): Scope.READ,
    ("POST", "/api/v1/runs/{run_id}/cancel"): Scope.SUBMIT,
    ("POST", "/api/v1/runs/{run_id}/retry"): Scope.SUBMIT,
    ("PATCH", "/api/v1/runs/{run_id}"): Scope.SUBMIT,
    ("DELETE", "/api/v1/runs/{run_id}"): Scope.SUBMIT,
    ("GET", "/api/v1/runs/{run_id}/export"): Scope.READ,
    ("GET", "/api/v1/runs/{run_id}/trace"): Scope.READ,
    ("POST", "/api/v1/runs/{run_id}/share"): Scope.SUBMIT,
    ("DELETE", "/api/v1/runs/{run_id}/share"): Scope.SUBMIT,
    ("GET", "/api/v1/compare"): Scope.READ,
    ("GET", "/api/v1/plans"): Scope.READ,
    ("GET", "/api/v1/plans/{plan_id}"): Scope.READ,
    ("GET", "/metrics"): Scope.READ,
}
GOOD = "ksn_" + "A" * 43
MALFORMED = (
    "",
    "Bearer",
    "Bearer ",
    "bearer\t",
    GOOD,
    f"Basic {GOOD}",
    f"Token {GOOD}",
    f"Bearer {GOOD} {GOOD}",
    f"Bearer Bearer {GOOD}",
    "Bearer " + "A" * 100_000,
    "Bearer ' OR 1=1 --",
    "Bearer \xff",
    "Bearer null",
)


def routes_of(app) -> set[tuple[str, str]]:
    """All but the pages, for which tests/unit/server/pages/test_access.py does the same."""
    found = [route for route in iter_route_contexts(app.routes) if not isinstance(route.original_route, PageRoute)]
    return {(method, route.path_format) for route in found for method in route.methods or {"?"}}


def concrete(path: str) -> str:
    return re.sub(r"\{(sha256|plan_id)\}", "0" * 64, path).replace("{run_id}", "r1")


def ask(client: TestClient, method: str, path: str, **changes):
    return client.request(method, concrete(path), **changes)


def test_every_route_is_either_open_or_says_what_it_needs(app):
    assert routes_of(app) == OPEN | set(NEEDS)


def test_every_guarded_router_has_a_scope():
    assert all(type(router) is GuardedRouter and isinstance(router.scope, Scope) for router in GUARDED)


@pytest.mark.parametrize(("method", "path"), sorted(NEEDS))
def test_without_a_live_token_every_route_is_shut(stranger, database: Database, method, path):
    given = ["ksn_" + "B" * 43, expired(database), revoked(database), secret(database).swapcase()]
    headers = [{}, *({"Authorization": value.encode("latin-1")} for value in MALFORMED), *map(bearer, given)]
    for header in headers:
        response = ask(stranger, method, path, headers=header, content=b"{" if method in ("POST", "PATCH") else None)
        problem = assert_problem(response, 401, "token" if header else "Authorization: Bearer")
        assert problem["type"] == "/problems/unauthorized"
        assert response.headers["www-authenticate"].startswith('Bearer realm="kitsune"')


@pytest.mark.parametrize(("method", "path"), sorted(NEEDS))
@pytest.mark.parametrize("scope", Scope)
def test_a_scope_opens_its_routes_and_no_others(stranger, database: Database, method, path, scope):
    response = ask(stranger, method, path, headers=bearer(secret(database, scope)))
    if scope is NEEDS[method, path] and (method, path) in ALSO_READ:
        assert_problem(response, 403, "read")
    elif scope in (NEEDS[method, path], Scope.ADMIN):
        assert response.status_code not in (401, 403)
    else:
        assert_problem(response, 403, NEEDS[method, path].value)
        assert f'scope="{NEEDS[method, path].value}"' in response.headers["www-authenticate"]


def test_two_tokens_are_none(stranger, database):
    good = f"Bearer {secret(database)}"
    headers = [("Authorization", good), ("Authorization", good)]
    assert_problem(stranger.get("/api/v1/runs", headers=headers), 401)


def test_a_token_in_the_address_is_none(stranger, database):
    good = secret(database)
    for name in ("token", "access_token", "Authorization"):
        assert_problem(stranger.get("/api/v1/runs", params={name: good}), 401)
    assert_problem(stranger.get("/api/v1/runs", headers={"Cookie": f"token={good}"}), 401)


def test_a_token_ends_a_second_after_it_is_revoked_at_the_latest(client, database, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(ttl_cache, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    assert client.get("/api/v1/runs").status_code == 200
    with database.begin() as connection:
        for token in tokens.listed(connection):
            tokens.revoke(connection, token.id)
    clock[0] += token_cache.TTL_S
    assert_problem(client.get("/api/v1/runs"), 401)


def test_a_token_ends_the_moment_it_expires(stranger, database, monkeypatch):
    given = bearer(secret(database, expires_at=after(60), now=after(0)))
    monkeypatch.setattr(tokens, "utcnow", lambda: after(59))
    monkeypatch.setattr(token_cache, "utcnow", lambda: after(59))
    assert stranger.get("/api/v1/runs", headers=given).status_code == 200
    monkeypatch.setattr(token_cache, "utcnow", lambda: after(60))
    assert_problem(stranger.get("/api/v1/runs", headers=given), 401)


def test_any_number_of_tokens_takes_a_bounded_memory(app, stranger, database, monkeypatch):
    known = app.state.context.token_cache._known
    monkeypatch.setattr(known, "most", 3)
    for _ in range(10):
        assert stranger.get("/api/v1/runs", headers=bearer(secret(database))).status_code == 200
    assert len(known) == 3
    for _ in range(10):
        assert_problem(stranger.get("/api/v1/runs", headers=bearer(new_secret())), 401)
    assert len(known) == 3


SPELLINGS = ("//api/v1/runs", "/api//v1/runs", "/api/v1/runs/", "/API/v1/runs", "/./api/v1/runs", "/healthz/../metrics",
             "/healthz/%2e%2e/metrics", "/%61pi/v1/runs", "/api/v1/runs%2f", "/healthz;/metrics", "/healthz%00/metrics",
             "/api/v1/plans/../runs", "/openapi.json/../metrics")  # fmt: skip


@pytest.mark.parametrize(("path", "method"), [*product(SPELLINGS, ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS"))])
def test_no_spelling_of_a_path_opens_a_route(stranger, path, method):
    assert stranger.request(method, f"{HERE}{path}").status_code in (401, 404, 405)


@pytest.mark.parametrize(("method", "path"), sorted(NEEDS))
def test_a_parameter_that_a_route_does_not_know_is_refused(client, stranger, database, method, path):
    answers = [ask(client, method, f"{path}?{query}") for query in ("bogus=1", "bogus", "limit=1&Limit=1&=", "%00=1")]
    answers = [ask(stranger, method, f"{path}?bogus=1", headers=bearer(secret(database, Scope.ADMIN))), *answers]
    for answer in answers:
        assert_problem(answer, 422)
    assert "bogus" in answers[0].json()["errors"][-1]["field"]
    assert_problem(ask(stranger, method, f"{path}?bogus=1"), 401)


@pytest.mark.parametrize("header", ["X-Original-URL", "X-Rewrite-URL", "X-Forwarded-Prefix", "X-HTTP-Method-Override"])
def test_no_header_opens_a_route(stranger, header):
    assert_problem(stranger.get("/api/v1/runs", headers={header: "/healthz"}), 401)
    assert_problem(stranger.get("/metrics", headers={header: "/healthz"}), 401)


def test_beyond_this_machine_the_description_needs_a_token(database):
    settings = ServerSettings(host="0.0.0.0", allow_remote=True)
    app = create_app(database, settings)
    assert routes_of(app) == OPEN | set(NEEDS)
    with TestClient(app, base_url=HERE) as stranger:
        assert_problem(stranger.get("/openapi.json"), 401)
        assert stranger.get("/openapi.json", headers=bearer(secret(database, Scope.READ))).status_code == 200
        assert stranger.get("/readyz").status_code == 200


def test_the_description_says_that_every_guarded_route_needs_a_token(client):
    document = client.get("/openapi.json").json()
    described = {
        (method.upper(), path): operation
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
    }
    assert set(described) == (OPEN | set(NEEDS)) - UNTOLD
    for place, operation in described.items():
        assert bool(operation.get("security")) == (place in NEEDS)
        assert place not in NEEDS or {"401", "422", "503"} <= set(operation["responses"])
        assert {str(status) for status in EVERYWHERE} <= set(operation["responses"])
        writes = place[0] != "GET"
        assert ("507" in operation["responses"]) == writes


def test_the_description_holds_all_that_it_refers_to_and_examples(client):
    text = client.get("/openapi.json").text
    schemas = client.get("/openapi.json").json()["components"]["schemas"]
    referred = set(re.findall(r'"#/components/schemas/(\w+)"', text))
    assert referred <= set(schemas)
    assert {"Problem", "Submit", "RunView", "RunsView", "TrialsView", "ArchiveView", "Lookup", "PlanView"} <= referred
    assert {"Annotation", "SideBySide", "RunExport", "Trace", "ShareView", "SharesEnded"} <= referred
    assert all(schemas[name]["examples"] for name in ("Submit", "Problem", "Annotation"))
