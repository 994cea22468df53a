"""The routes of plans: by id, and the look-up by workload and machine. Answers have an ETag."""

from typing import Any, Final

from fastapi import Request
from fastapi.responses import Response

from kitsune.errors import NotFoundError
from server.http.auth import GuardedRouter, caller
from server.http.context import Here, context_in
from server.http.direct_route import DirectRoute
from server.http.lookups import spliced
from server.payloads.problems import API
from server.payloads.schemas import Lookup, PlanId, PlanView, Question, documented, query_of
from tuner.store.queries import plans
from tuner.store.queries.tokens import Scope

_UNCHANGED: Final[dict[int | str, dict[str, Any]]] = {304: {"description": "Unchanged: its ETag is in If-None-Match"}}

router = GuardedRouter(Scope.READ, prefix="/api/v1/plans", tag="plans", is_lookup=True)


async def find_plan(request: Request) -> Response:
    """The best plan for a workload on a machine: an exact match, a compatible one, or none, with the reason.

    Properties of the machine that are left out match any plan. A new plan is found after a second at most.
    """
    found = await context_in(request).lookups.answer(request.scope["query_string"], caller(request).team)
    return _tagged(request, found.body, found.tag)


router.add_api_route(
    "",
    find_plan,
    methods=["GET"],
    responses={200: {"model": Lookup}, **_UNCHANGED},
    openapi_extra={"parameters": query_of(Question)},
    route_class_override=DirectRoute,
)


@router.get("/{plan_id}", responses={200: {"model": PlanView}, **_UNCHANGED, **documented(404)})
def show_plan(request: Request, here: Here, plan_id: PlanId) -> Response:
    """A plan by its id. Plans never change."""
    with here.database.read() as connection:
        document = plans.get_document(connection, plan_id, team=caller(request).team)
    if document is None:
        raise NotFoundError(f"there is no plan {plan_id!r}; GET {API}/plans finds one for a workload and a machine")
    return _tagged(request, spliced(plan_id, document).encode(), plan_id)


def is_known(tag: str, if_none_match: str) -> bool:
    """Whether If-None-Match holds the tag, by the weak comparison of RFC 9110 §13.1.2."""
    given = [one.strip().removeprefix("W/") for one in if_none_match.split(",")]
    return tag in given or "*" in given


def _tagged(request: Request, body: bytes, name: str) -> Response:
    headers = {"etag": f'"{name}"', "cache-control": "private, no-cache"}
    if is_known(headers["etag"], request.headers.get("if-none-match", "")):
        return Response(status_code=304, headers=headers)
    return Response(body, headers=headers, media_type="application/json")
