"""Tokens, on SQLite and on PostgreSQL alike: who comes in, who does not, and that no secret is stored."""

import re
from hashlib import sha256

import pytest
from sqlalchemy import select

from kitsune.errors import StoreError
from tests.store.samples import START, after
from tuner.store import tables
from tuner.store.database import Database
from tuner.store.queries import tokens
from tuner.store.queries.tokens import Scope, Token

SECRET = "ksn_" + "aB3-_" * 8 + "xyz"


def made(database: Database, **changes: object) -> tuple[Token, str]:
    with database.begin() as connection:
        return tokens.create(connection, **{"name": "ci", "scopes": [Scope.READ], "now": START, **changes})


def whose(database: Database, secret: str, at: float = 0.0) -> Token | None:
    with database.read() as connection:
        return tokens.authenticate(connection, secret, now=after(at))


class TestTokens:
    # Who comes in

    def test_a_secret_is_of_256_bits_and_speaks_for_its_token(self, database: Database) -> None:
        token, secret = made(database, name="laptop", scopes=[Scope.SUBMIT, Scope.READ], expires_at=after(60))
        assert re.fullmatch(r"ksn_[A-Za-z0-9_-]{43}", secret)
        assert (token.name, token.scopes, token.created_at) == ("laptop", (Scope.READ, Scope.SUBMIT), START)
        assert (token.expires_at, token.revoked_at) == (after(60), None)
        assert whose(database, secret) == token

    def test_tokens_are_kept_apart(self, database: Database) -> None:
        pairs = [made(database) for _ in range(5)]
        assert len({token.id for token, _ in pairs}) == len({secret for _, secret in pairs}) == 5
        assert [whose(database, secret) for _, secret in pairs] == [token for token, _ in pairs]

    def test_scopes_are_named_once_and_in_order(self, database: Database) -> None:
        token, _ = made(database, scopes=[Scope.ADMIN, Scope.READ, Scope.ADMIN])
        assert token.scopes == (Scope.READ, Scope.ADMIN)
        assert made(database, scopes=[])[0].scopes == ()

    def test_the_secret_is_not_stored(self, database: Database) -> None:
        _, secret = made(database)
        with database.read() as connection:
            [row] = connection.execute(select(tables.tokens)).all()
        assert row.digest == sha256(secret.encode()).hexdigest()
        assert not any(secret[4:] in str(value) for value in row)

    def test_a_given_secret_is_taken_once(self, database: Database) -> None:
        token, secret = made(database, secret=SECRET)
        assert secret == SECRET
        assert whose(database, SECRET) == token
        with pytest.raises(StoreError, match="contradicts") as caught:
            made(database, secret=SECRET)
        assert SECRET not in str(caught.value)

    # Who does not

    @pytest.mark.parametrize(
        "secret",
        [
            "",
            "ksn_",
            SECRET[:-1],
            SECRET + "a",
            SECRET + "\n",
            " " + SECRET,
            SECRET.swapcase(),
            "KSN_" + SECRET[4:],
            SECRET[4:],
            SECRET[:-1] + "é",
            SECRET[:-1] + "\x00",
            SECRET[:-1] + "\ud800",
            SECRET[:-1] + "%",
            sha256(SECRET.encode()).hexdigest(),
            SECRET * 100_000,
        ],
        ids=range(15),
    )
    def test_a_secret_that_is_not_quite_right_is_nobodys(self, database: Database, secret: str) -> None:
        made(database, secret=SECRET)
        assert whose(database, secret) is None

    def test_an_unknown_secret_is_nobodys(self, database: Database) -> None:
        made(database)
        assert whose(database, SECRET) is None

    def test_a_token_ends_with_its_time(self, database: Database) -> None:
        token, secret = made(database, expires_at=after(60))
        assert whose(database, secret, at=59.999999) == token
        assert whose(database, secret, at=60) is None
        assert whose(database, secret, at=1e9) is None

    def test_a_token_without_end_has_none(self, database: Database) -> None:
        token, secret = made(database)
        assert whose(database, secret, at=1e9) == token

    def test_a_revoked_token_is_worthless_at_once_and_for_good(self, database: Database) -> None:
        token, secret = made(database, expires_at=after(60))
        other, other_secret = made(database)
        with database.begin() as connection:
            revoked = tokens.revoke(connection, token.id, now=after(5))
        assert revoked == token.model_copy(update={"revoked_at": after(5)})
        # Also for a machine whose clock is behind.
        assert whose(database, secret, at=0) is None
        assert whose(database, other_secret) == other
        with database.begin() as connection:
            assert tokens.revoke(connection, token.id, now=after(50)) == revoked

    def test_what_is_not_there_is_not_revoked(self, database: Database) -> None:
        with database.begin() as connection:
            assert tokens.revoke(connection, "no") is None

    @pytest.mark.parametrize("secret", ["ksn_short", SECRET + "\n", "password"])
    def test_a_given_secret_of_another_form_is_refused(self, database: Database, secret: str) -> None:
        with pytest.raises(StoreError, match="43 of the characters") as caught:
            made(database, secret=secret)
        assert secret not in str(caught.value)
        with database.read() as connection:
            assert tokens.listed(connection) == []

    @pytest.mark.parametrize("scopes", ['["root"]', '"read"', "nonsense"])
    def test_an_altered_row_lets_nobody_in(self, database: Database, scopes: str) -> None:
        _, secret = made(database)
        with database.begin() as connection:
            connection.exec_driver_sql(f"UPDATE kitsune_tokens SET scopes = '{scopes}'")
        with pytest.raises(StoreError, match="altered by hand"):
            whose(database, secret)

    # Looking

    def test_tokens_are_listed_the_oldest_first_whatever_became_of_them(self, database: Database) -> None:
        late, _ = made(database, now=after(2))
        early, _ = made(database, now=after(1), expires_at=after(1))
        with database.begin() as connection:
            revoked = tokens.revoke(connection, late.id)
            assert tokens.listed(connection) == [early, revoked]
