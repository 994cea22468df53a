"""Finds and caches the answers of plan look-ups, as bytes with an ETag.

Every training script sends look-ups, so plans are not parsed here: the stored text of a plan is inserted into the
answer as it is. Clients check a plan against its id.
"""

import hashlib
from collections.abc import Mapping
from functools import partial
from typing import Final, NamedTuple

from pydantic import ValidationError
from sqlalchemy import Connection
from starlette.datastructures import QueryParams

from kitsune.base.base_record import canonical_json
from kitsune.plan import Match
from server.http.ttl_cache import TtlCache
from server.payloads.problems import API
from server.payloads.request_checks import refused
from server.payloads.schemas import Question
from tuner.store.database import Database
from tuner.store.queries import plans
from tuner.store.queries.plans import PlansVersion, StoredPlan

#: A new plan is visible after at most this time. It saves most of a millisecond for each look-up.
EXTENT_TTL_S: Final = 1.0
#: Plans never change; this limits how long an answer stays after somebody changed the database by hand.
_ANSWER_TTL_S: Final = 60.0
#: Entries: some 20 MB of plans.
_MOST: Final = 8192
_NONE: Final = "none"


class LookupAnswer(NamedTuple):
    """The JSON of a `Lookup`, and its ETag."""

    body: bytes
    tag: str


class Lookups:
    """A cache of answers by team and query, valid until plans are added or removed.

    The extent of the plan table is part of the cache key and is read once a second. It is read before the answer, so
    an answer may be newer than its extent, never older.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._extent: TtlCache[None, PlansVersion] = TtlCache(EXTENT_TTL_S, most=1)
        self._known: TtlCache[tuple[PlansVersion | None, str, bytes], LookupAnswer] = TtlCache(_ANSWER_TTL_S, _MOST)

    async def answer(self, query: bytes, team: str) -> LookupAnswer:
        """The answer to a raw query string, from the plans of `team`. Raises RequestValidationError."""
        extent = await self._extent.get(None, self._count)
        key = (extent, team, hashlib.sha256(query).digest())
        found = await self._known.get(key, partial(self._find, query, team))
        assert found is not None
        return found

    def _count(self) -> PlansVersion:
        with self._database.read() as connection:
            return plans.extent(connection)

    def _find(self, query: bytes, team: str) -> LookupAnswer:
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
            body = _match_json(found[0], asked.given_fields()) if found else _no_match_json(connection, asked, team)
        return LookupAnswer(body, hashlib.sha256(body).hexdigest())


def question_of(query: bytes) -> Question:
    """The parsed query. One record: FastAPI takes longer for ten parameters than the database for the plan.

    Raises RequestValidationError.
    """
    try:
        return Question.model_validate(dict(QueryParams(query)))
    except ValidationError as error:
        raise refused(error) from error


def fit(was: Mapping[str, object], now: Mapping[str, str | int]) -> tuple[Match, str]:
    """Like `Environment.match`, for a machine of which only `now` is known. An unknown batch of the plan matches."""
    for name, value in now.items():
        if was[name] != value and (name, was[name]) != ("batch", ""):
            return Match.COMPATIBLE, f"tuned with {name} {was[name]}, this is {value}"
    return Match.EXACT, "same machine type and software"


def spliced(plan_id: str, document: str) -> str:
    """The JSON of a plan with its id, as `Plan.from_json` reads it. `document` is a JSON object that is not empty."""
    return f'{{"plan_id":"{plan_id}",{document[1:]}'


def _match_json(found: StoredPlan, given: Mapping[str, str | int]) -> bytes:
    match, reason = fit(found._asdict(), given)
    plan = spliced(found.plan_id, found.document)
    return f'{{"match":"{match.value}","plan":{plan},"reason":{canonical_json(reason)}}}'.encode()


def _no_match_json(connection: Connection, asked: Question, team: str) -> bytes:
    known_plans = plans.find_documents(connection, asked.fingerprint, team=team)
    others = sorted({f"{plan.gpu} ({plan.device})" for plan in known_plans})
    known = f"tuned on {', '.join(others)}" if others else "it was never tuned here"
    reason = f"no plan of this workload for {asked.gpu}: {known}; POST {API}/runs asks for one"
    return canonical_json({"match": _NONE, "plan": None, "reason": reason}).encode()
