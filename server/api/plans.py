"""A plan's id, or a workload and a machine, in; the stored text of a plan out, with an ETag."""

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

_UNCHANGED: Final[dict[int | str, dict[str, Any]]] = {304: {"description": "It is as If-None-Match says"}}

router = GuardedRouter(Scope.READ, prefix="/api/v1/plans", tag="plans", is_lookup=True)


async def find_plan(request: Request) -> Response:
    """The best plan for a workload on a machine: measured on exactly this one, on its like, or none, with the reason.

    What is not said of the machine is taken to agree. A plan that is a second old is found.
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
    """A plan. It never changes."""
    with here.database.read() as connection:
        document = plans.get_document(connection, plan_id, team=caller(request).team)
    if document is None:
        raise NotFoundError(f"there is no plan {plan_id!r}; GET {API}/plans finds one for a workload and a machine")
    return _tagged(request, spliced(plan_id, document).encode(), plan_id)


def is_known(tag: str, if_none_match: str) -> bool:
    """Whether the client has it, by the weak comparison of RFC 9110 §13.1.2."""
    given = [one.strip().removeprefix("W/") for one in if_none_match.split(",")]
    return tag in given or "*" in given


def _tagged(request: Request, body: bytes, name: str) -> Response:
    headers = {"etag": f'"{name}"', "cache-control": "private, no-cache"}
    if is_known(headers["etag"], request.headers.get("if-none-match", "")):
        return Response(status_code=304, headers=headers)
    return Response(body, headers=headers, media_type="application/json")
