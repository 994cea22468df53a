"""DirectRoute: guarded like all routes, and refused for functions with parameters."""

import pytest
from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import Response
from fastapi.testclient import TestClient

from server.http.auth import GuardedRouter
from server.http.direct_route import DirectRoute
from tests.unit.server.conftest import assert_problem
from tuner.store.queries.tokens import Scope

PLANS = "/api/v1/plans"


async def answer(request: Request) -> Response:
    return Response(request.url.path)


async def asks_for_more(request: Request, limit: int) -> Response:
    return Response(f"{request.url.path} {limit}")


def test_a_look_up_is_such_a_route(app: FastAPI, client: TestClient, stranger: TestClient) -> None:
    assert_problem(stranger.get(PLANS), 401)
    assert_problem(client.get(PLANS), 422, "fingerprint")
    assert "requestBody" not in (told := app.openapi()["paths"][PLANS]["get"])
    assert told["security"] == [{"HTTPBearer": []}]
    assert {"fingerprint", "gpu", "torch"} <= {parameter["name"] for parameter in told["parameters"]}


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_other_methods_are_told_of_its_own(client: TestClient, method: str) -> None:
    refused = client.request(method, PLANS)
    assert_problem(refused, 405)
    assert refused.headers["allow"] == "GET, HEAD"


def test_a_function_that_asks_fastapi_for_something_is_refused() -> None:
    router = GuardedRouter(Scope.READ, tag="test")
    with pytest.raises(AssertionError, match=r"asks FastAPI for \['request', 'limit'\]"):
        router.add_api_route("/x", asks_for_more, route_class_override=DirectRoute)


def test_a_route_without_a_guard_is_refused() -> None:
    with pytest.raises(AssertionError, match="guarded otherwise"):
        APIRouter().add_api_route("/x", answer, route_class_override=DirectRoute)


def test_a_new_link_is_described_as_the_201_that_it_is(stranger: TestClient) -> None:
    answers = stranger.get("/openapi.json").json()["paths"]["/api/v1/runs/{run_id}/share"]["post"]["responses"]
    assert "201" in answers
    assert "200" not in answers
