"""A plan's id, or a workload and a machine, in; the stored text of a plan out, with an ETag.

Every training script asks here, so nothing is parsed: the stored text is spliced into the answer as it is. Whoever gets
a plan checks it against its id.
"""

import hashlib
from collections.abc import Mapping
from typing import Annotated, Any, Final

from fastapi import Depends, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from pydantic import ValidationError
from sqlalchemy import Connection

from kitsune.errors import NotFoundError
from kitsune.plan import Match
from kitsune.record import canonical_json
from server.auth import GuardedRouter
from server.context import Here
from server.problems import API
from server.schemas import Lookup, PlanId, PlanView, Question, documented, query_of
from tuner.store import plans
from tuner.store.plans import StoredPlan
from tuner.store.tokens import Scope

_NONE: Final = "none"
_UNCHANGED: Final[dict[int | str, dict[str, Any]]] = {304: {"description": "It is as If-None-Match says"}}

router = GuardedRouter(Scope.READ, prefix="/api/v1/plans", tag="plans")


async def question_of(request: Request) -> Question:
    """The query as one record: FastAPI would take longer over ten parameters than the database over the plan.

    Raises RequestValidationError.
    """
    try:
        return Question.model_validate(dict(request.query_params))
    except ValidationError as error:
        raise RequestValidationError(error.errors(include_url=False, include_input=False)) from error


@router.get("", responses={200: {"model": Lookup}, **_UNCHANGED}, openapi_extra={"parameters": query_of(Question)})
def find_plan(request: Request, here: Here, asked: Annotated[Question, Depends(question_of)]) -> Response:
    """The best plan for a workload on a machine: measured on exactly this one, on its like, or none, with the reason.

    What is not said of the machine is taken to agree.
    """
    software = asked.software()
    with here.database.read() as connection:
        found = plans.find_documents(
            connection, asked.fingerprint, device=asked.device, gpu=asked.gpu, software=software, limit=1
        )
        body = _fitting(found[0], software) if found else _lacking(connection, asked)
    return _tagged(request, body, hashlib.sha256(body).hexdigest())


@router.get("/{plan_id}", responses={200: {"model": PlanView}, **_UNCHANGED, **documented(404)})
def show_plan(request: Request, here: Here, plan_id: PlanId) -> Response:
    """A plan. It never changes."""
    with here.database.read() as connection:
        document = plans.get_document(connection, plan_id)
    if document is None:
        raise NotFoundError(f"there is no plan {plan_id!r}; GET {API}/plans finds one for a workload and a machine")
    return _tagged(request, spliced(plan_id, document).encode(), plan_id)


def fit(was: Mapping[str, object], now: Mapping[str, str | int]) -> tuple[Match, str]:
    """`Environment.match` for a machine of which only `now` is known."""
    for name, value in now.items():
        if was[name] != value:
            return Match.COMPATIBLE, f"tuned with {name} {was[name]}, this is {value}"
    return Match.EXACT, "same machine type and software"


def spliced(plan_id: str, document: str) -> str:
    """The JSON of `Plan.to_json` from the stored text of its content, which is an object with at least a version."""
    return f'{{"plan_id":"{plan_id}",{document[1:]}'


def is_known(tag: str, if_none_match: str) -> bool:
    """Whether the client has it, by the weak comparison of RFC 9110 §13.1.2."""
    given = [one.strip().removeprefix("W/") for one in if_none_match.split(",")]
    return tag in given or "*" in given


def _fitting(found: StoredPlan, software: Mapping[str, str | int]) -> bytes:
    match, reason = fit(found._asdict(), software)
    plan = spliced(found.plan_id, found.document)
    return f'{{"match":"{match.value}","plan":{plan},"reason":{canonical_json(reason)}}}'.encode()


def _lacking(connection: Connection, asked: Question) -> bytes:
    others = sorted({f"{plan.gpu} ({plan.device})" for plan in plans.find_documents(connection, asked.fingerprint)})
    known = f"tuned on {', '.join(others)}" if others else "it was never tuned here"
    reason = f"no plan of this workload for {asked.gpu}: {known}; POST {API}/runs asks for one"
    return canonical_json({"match": _NONE, "plan": None, "reason": reason}).encode()


def _tagged(request: Request, body: bytes, name: str) -> Response:
    headers = {"etag": f'"{name}"', "cache-control": "private, no-cache"}
    if is_known(headers["etag"], request.headers.get("if-none-match", "")):
        return Response(status_code=304, headers=headers)
    return Response(body, headers=headers, media_type="application/json")
