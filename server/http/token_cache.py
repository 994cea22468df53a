"""A secret in, the live token that it belongs to out; remembered for a moment, so few requests ask the database."""

import hashlib
from functools import partial
from typing import Final

from server.http.ttl_cache import Remembered
from tuner.store.database import Database
from tuner.store.queries import tokens
from tuner.store.queries.tokens import Token
from tuner.wall_clock import utcnow

#: A revoked token may be used for so long: the price of half a millisecond for each request.
REMEMBERED_S: Final = 1.0


class Admission:
    """Which tokens were good a moment ago, by the digest of their secret. Only good ones are remembered."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._known: Remembered[bytes, Token] = Remembered(REMEMBERED_S, most=1024)

    async def token_of(self, secret: str) -> Token | None:
        """None when it is unknown, expired or revoked.

        The database, and the memory, are asked for the digest of the secret: nothing compares secrets, so no time
        tells of them.
        """
        digest = hashlib.sha256(secret.encode()).digest()
        token = await self._known.of(digest, partial(self._ask, secret))
        return token if token is not None and token.is_good(utcnow()) else None

    def _ask(self, secret: str) -> Token | None:
        with self._database.read() as connection:
            return tokens.authenticate(connection, secret)
