"""The query of a look-up in, the plan that fits as the bytes of an answer out, with its ETag.

Every training script asks here, so nothing is parsed: the stored text of a plan is spliced into the answer as it is.
Whoever gets a plan checks it against its id.
"""

import hashlib
from collections.abc import Mapping
from functools import partial
from typing import Final, NamedTuple

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from sqlalchemy import Connection
from starlette.datastructures import QueryParams

from kitsune.base.base_record import canonical_json
from kitsune.plan import Match
from server.http.ttl_cache import Remembered
from server.payloads.problems import API
from server.payloads.schemas import Question
from tuner.store.database import Database
from tuner.store.queries import plans
from tuner.store.queries.plans import Extent, StoredPlan

#: A new plan may be seen so much late: the price of most of a millisecond for each look-up.
UNSEEN_S: Final = 1.0
#: Nothing changes a plan, so this only bounds for how long one is given that somebody changed by hand.
_REMEMBERED_S: Final = 60.0
#: Some 20 MB of plans.
_MOST: Final = 8192
_NONE: Final = "none"


class Answer(NamedTuple):
    """The JSON of a `Lookup`, and what names it."""

    body: bytes
    tag: str


class Lookups:
    """Answers by the team that asks and its query, for as long as there are the same plans.

    How many there are is looked at once a second.

    The number is taken before the answer that is kept under it is found, so an answer may be newer than its number and
    never older.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._extent: Remembered[None, Extent] = Remembered(UNSEEN_S, most=1)
        self._known: Remembered[tuple[Extent | None, str, bytes], Answer] = Remembered(_REMEMBERED_S, _MOST)

    async def answer(self, query: bytes, team: str) -> Answer:
        """For the query of a request, as it came, from the plans of its team. Raises RequestValidationError."""
        extent = await self._extent.of(None, self._count)
        key = (extent, team, hashlib.sha256(query).digest())
        found = await self._known.of(key, partial(self._find, query, team))
        assert found is not None
        return found

    def _count(self) -> Extent:
        with self._database.read() as connection:
            return plans.extent(connection)

    def _find(self, query: bytes, team: str) -> Answer:
        asked = question_of(query)
        with self._database.read() as connection:
            found = plans.find_documents(
                connection,
                asked.fingerprint,
                team=team,
                batch=asked.batch,
                device=asked.device,
                gpu=asked.gpu,
                software=asked.software(),
                limit=1,
            )
            body = _fitting(found[0], asked.said()) if found else _lacking(connection, asked, team)
        return Answer(body, hashlib.sha256(body).hexdigest())


def question_of(query: bytes) -> Question:
    """The query as one record: FastAPI would take longer over ten parameters than the database over the plan.

    Raises RequestValidationError.
    """
    try:
        return Question.model_validate(dict(QueryParams(query)))
    except ValidationError as error:
        raise RequestValidationError(error.errors(include_url=False, include_input=False)) from error


def fit(was: Mapping[str, object], now: Mapping[str, str | int]) -> tuple[Match, str]:
    """`Environment.match` for a machine of which only `now` is known. A plan may not know its batch."""
    for name, value in now.items():
        if was[name] != value and (name, was[name]) != ("batch", ""):
            return Match.COMPATIBLE, f"tuned with {name} {was[name]}, this is {value}"
    return Match.EXACT, "same machine type and software"


def spliced(plan_id: str, document: str) -> str:
    """The JSON for `Plan.from_json` from the stored text of its content, which is an object with at least a version."""
    return f'{{"plan_id":"{plan_id}",{document[1:]}'


def _fitting(found: StoredPlan, said: Mapping[str, str | int]) -> bytes:
    match, reason = fit(found._asdict(), said)
    plan = spliced(found.plan_id, found.document)
    return f'{{"match":"{match.value}","plan":{plan},"reason":{canonical_json(reason)}}}'.encode()


def _lacking(connection: Connection, asked: Question, team: str) -> bytes:
    known_plans = plans.find_documents(connection, asked.fingerprint, team=team)
    others = sorted({f"{plan.gpu} ({plan.device})" for plan in known_plans})
    known = f"tuned on {', '.join(others)}" if others else "it was never tuned here"
    reason = f"no plan of this workload for {asked.gpu}: {known}; POST {API}/runs asks for one"
    return canonical_json({"match": _NONE, "plan": None, "reason": reason}).encode()
