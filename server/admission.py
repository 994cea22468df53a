"""A secret in, the live token that it belongs to out; remembered for a moment, so few requests ask the database."""

import hashlib
import time
from typing import Final

from anyio import to_thread

from tuner.store import tokens
from tuner.store.database import Database
from tuner.store.rows import utcnow
from tuner.store.tokens import Token

#: A revoked token may be used for so long: the price of half a millisecond for each request.
REMEMBERED_S: Final = 1.0
_MOST: Final = 1024


class Admission:
    """Which tokens were good a moment ago, by the digest of their secret. Only good ones are remembered."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._known: dict[bytes, tuple[Token, float]] = {}

    async def token_of(self, secret: str) -> Token | None:
        """None when it is unknown, expired or revoked.

        The database, and the memory, are asked for the digest of the secret: nothing compares secrets, so no time
        tells of them.
        """
        digest = hashlib.sha256(secret.encode()).digest()
        token, until = self._known.get(digest, (None, 0.0))
        now = time.monotonic()
        if token is None or now >= until:
            token = await to_thread.run_sync(self._ask, secret)
            self._remember(digest, token, now + REMEMBERED_S)
        return token if token is not None and token.is_good(utcnow()) else None

    def _remember(self, digest: bytes, token: Token | None, until: float) -> None:
        if token is None:
            self._known.pop(digest, None)
            return
        if len(self._known) >= _MOST:
            self._known.clear()
        self._known[digest] = token, until

    def _ask(self, secret: str) -> Token | None:
        with self._database.read() as connection:
            return tokens.authenticate(connection, secret)
