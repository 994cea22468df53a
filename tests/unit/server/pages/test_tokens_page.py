"""The page of tokens: new ones are shown once, revoking is final, other teams' tokens are out of reach."""

import re
from datetime import timedelta

import pytest

from tests.unit.server.conftest import made
from tests.unit.server.pages.conftest import assert_page, csrf_of
from tuner.store.queries import tokens
from tuner.store.queries.tokens import Scope
from tuner.wall_clock import utcnow

GIVEN = {"name": "ci", "scope": ["read"], "expires": "90d"}


def make(client, **changes):
    """Follows the redirect to the page with the new token, as a browser does."""
    answer = client.post("/tokens", data={"csrf": csrf_of(client), **GIVEN, **changes})
    if answer.status_code != 303:
        return answer
    assert answer.headers["location"] == "/tokens"
    return client.get("/tokens")


def all_tokens(database):
    with database.read() as connection:
        return {token.name: token for token in tokens.listed(connection)}


def test_a_token_is_shown_once_and_works(admin, database):
    text = assert_page(make(admin, scope=["read", "submit"]), 200, "it is not shown again")
    (secret,) = re.findall(r"ksn_[\w-]{43}", text)
    with database.read() as connection:
        token = tokens.authenticate(connection, secret)
    assert (token.name, token.team, token.scopes) == ("ci", "default", (Scope.READ, Scope.SUBMIT))
    assert abs(token.expires_at - utcnow() - timedelta(days=90)) < timedelta(minutes=1)
    assert secret not in admin.get("/tokens").text
    assert len(all_tokens(database)) == 2, "loading the page again makes no other"


def test_a_token_without_end(admin, database):
    assert_page(make(admin, expires=""), 200, "without end")
    assert all_tokens(database)["ci"].expires_at is None


@pytest.mark.parametrize(
    "changes",
    [{"name": " "}, {"name": "x" * 101}, {"name": "a\u202eb"}, {"scope": []}, {"scope": ["root"]}, {"expires": "soon"},
     {"team": "Not A Team!"}, {"expires": "9999999999d"}],
)  # fmt: skip
def test_what_makes_no_sense_makes_no_token(admin, database, changes):
    text = assert_page(make(admin, **changes), 422, 'role="alert"')
    assert "ksn_" not in text
    assert set(all_tokens(database)) == {"test"}


def test_a_revoked_token_is_worthless(admin, database):
    token, secret = made(database, Scope.READ)
    answer = admin.post(f"/tokens/{token.id}/revoke", data={"csrf": csrf_of(admin)})
    assert (answer.status_code, answer.headers["location"]) == (303, "/tokens")
    with database.read() as connection:
        assert tokens.authenticate(connection, secret) is None
    assert "revoked" in admin.get("/tokens").text


def test_those_who_run_the_server_give_tokens_to_every_team(admin, database):
    assert_page(make(admin, team="vision"), 200, "vision")
    assert all_tokens(database)["ci"].team == "vision"


def test_others_give_and_see_those_of_their_own(browser, database):
    client = browser(Scope.ADMIN, team="vision")
    with database.begin() as connection:
        foreign, _ = tokens.create(connection, "foreign", (Scope.READ,), team="speech")
    assert_page(make(client, team="speech"), 422, "vision only")
    assert_page(make(client, team="default"), 422, "vision only")
    assert_page(make(client), 200)
    assert all_tokens(database)["ci"].team == "vision"
    text = client.get("/tokens").text
    assert "foreign" not in text and 'name="team"' not in text
    assert client.post(f"/tokens/{foreign.id}/revoke", data={"csrf": csrf_of(client)}).status_code == 404
    assert all_tokens(database)["foreign"].revoked_at is None
