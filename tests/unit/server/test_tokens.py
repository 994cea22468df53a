"""`kitsune token`, the token that a server on loopback keeps for its user, and what `kitsune serve` refuses."""

import json
import os
import socket
import threading
from datetime import UTC, datetime, timedelta

import pytest

from kitsune.client.server_address import TOKEN_FILE
from kitsune.errors import SettingsError
from server.tokens import ensure_local_token
from tuner.settings import Settings
from tuner.store.engine import open_database
from tuner.store.queries import tokens
from tuner.store.queries.tokens import Scope


@pytest.fixture
def store():
    """The default database of the commands."""
    with open_database(Settings.from_environment().database_url) as database:
        yield database


def known(database, secret: str):
    with database.read() as connection:
        return tokens.authenticate(connection, secret)


def test_a_token_is_made_shown_once_listed_and_revoked(call, store):
    code, out, err = call("token", "create", "laptop")
    secret = out.strip()
    assert (code, secret[:4], len(secret)) == (0, "ksn_", 47)
    token = known(store, secret)
    assert (token.name, token.scopes, token.expires_at) == ("laptop", (Scope.READ, Scope.SUBMIT), None)
    assert token.id in err and secret not in err
    code, out, _ = call("token", "list")
    assert code == 0 and token.id in out and "laptop" in out and secret not in out
    assert call("token", "revoke", token.id)[0] == 0
    assert known(store, secret) is None
    assert "revoked" in call("token", "list")[1]


def test_a_token_ends_when_it_was_told_to(call, store):
    out = json.loads(call("token", "create", "ci", "--scope", "submit", "--expires", "30d", "--json")[1])
    token = known(store, out["secret"])
    assert token.scopes == (Scope.SUBMIT,)
    assert abs(token.expires_at - datetime.now(UTC) - timedelta(days=30)) < timedelta(minutes=1)
    listed = json.loads(call("token", "list", "--json")[1])["tokens"]
    assert [one["id"] for one in listed] == [token.id] == [out["token"]["id"]]
    assert "secret" not in listed[0]


def test_a_token_is_of_one_team(call, store):
    code, out, err = call("token", "create", "bob", "--team", "vision-2")
    assert code == 0 and "team vision-2" in " ".join(err.split())
    assert known(store, out.strip()).team == "vision-2"
    made = json.loads(call("token", "create", "ann", "--json")[1])
    assert made["token"]["team"] == "default"
    assert "vision-2" in call("token", "list")[1]


@pytest.mark.parametrize("team", ["", "A", "a b", "-a", "a" * 41, "a\n", "é", "a/b"])
def test_a_team_of_another_form_is_refused(call, store, team):
    code, _, err = call("token", "create", "bob", "--team", team)
    assert code == 2 and "name of a team" in " ".join(err.split())
    with store.read() as connection:
        assert tokens.listed(connection) == []


@pytest.mark.parametrize(
    "words",
    [("--scope", "root"), ("--scope", ""), ("--expires", "soon"), ("--expires", "0"), ("--expires", "99999999d")],
)
def test_a_token_that_makes_no_sense_is_not_made(call, store, words):
    code, _, err = call("token", "create", "x", *words)
    assert code == 2 and words[0] in err
    with store.read() as connection:
        assert tokens.listed(connection) == []


@pytest.mark.parametrize("name", ["", "  ", "a\nb", "a\x1b[2J", "a\u202eb", "a\u2066b", "a\0b", "x" * 101])
def test_a_name_that_cannot_be_shown_is_refused(call, store, name):
    code, _, err = call("token", "create", name)
    assert code == 2 and "name" in err and "100 printable" in " ".join(err.split())
    assert "\u202e" not in err and "\x1b[2J" not in err
    with store.read() as connection:
        assert tokens.listed(connection) == []


@pytest.mark.parametrize("name", ["x" * 100, "Zoë's laptop", "狐"])
def test_a_name_may_be_of_any_script(call, store, name):
    assert call("token", "create", name)[0] == 0
    with store.read() as connection:
        assert [token.name for token in tokens.listed(connection)] == [name]


def test_the_list_says_which_tokens_have_expired(call, store):
    with store.begin() as connection:
        tokens.create(connection, "past", (Scope.READ,), expires_at=datetime(2020, 1, 2, 3, 4, tzinfo=UTC))
    out = " ".join(call("token", "list")[1].split())
    assert "expired 2020-01-02 03:04 UTC" in out and "until 2020" not in out


def test_an_unknown_token_cannot_be_revoked(call):
    code, _, err = call("token", "revoke", "nobody")
    assert code == 4 and "token list" in err


def test_no_tokens_teach_the_first_command(call):
    code, out, err = call("token", "list")
    assert (code, out) == (0, "") and "kitsune token create" in err


# The token of this machine --------------------------------------------------------------------------------------------


def test_the_first_server_makes_a_token_that_only_its_user_can_read(database, tmp_path):
    path = ensure_local_token(database, tmp_path / "new" / "home")
    assert (path.name, path.stat().st_mode & 0o777) == (TOKEN_FILE, 0o600)
    assert path.read_text().count("\n") == 1
    assert known(database, path.read_text().strip()).scopes == tuple(Scope)
    assert os.listdir(path.parent) == [TOKEN_FILE]


def test_the_next_server_keeps_it(database, tmp_path):
    secret = ensure_local_token(database, tmp_path).read_text()
    assert ensure_local_token(database, tmp_path).read_text() == secret
    with database.read() as connection:
        assert len(tokens.listed(connection)) == 1


def test_a_server_on_another_database_takes_it_in(database, tmp_path):
    secret = ensure_local_token(database, tmp_path).read_text()
    with open_database(f"sqlite:///{tmp_path}/other.db") as other:
        assert ensure_local_token(other, tmp_path).read_text() == secret
        assert known(other, secret.strip())


def test_a_revoked_one_is_replaced(database, tmp_path):
    secret = ensure_local_token(database, tmp_path).read_text().strip()
    with database.begin() as connection:
        tokens.revoke(connection, tokens.authenticate(connection, secret).id)
    path = ensure_local_token(database, tmp_path)
    assert path.read_text().strip() != secret
    assert known(database, path.read_text().strip()) and not known(database, secret)
    assert path.stat().st_mode & 0o777 == 0o600


def test_what_others_may_read_is_shut(database, tmp_path):
    path = ensure_local_token(database, tmp_path)
    path.chmod(0o644)
    ensure_local_token(database, tmp_path)
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("content", [b"", b"hello\n", b"ksn_short\n", b"\xff" * 47, b"ksn_" + b"A" * 43 + b"\nmore\n"])
def test_a_file_that_holds_something_else_is_left_alone(database, tmp_path, content):
    (tmp_path / TOKEN_FILE).write_bytes(content)
    with pytest.raises(SettingsError, match="does not hold a token"):
        ensure_local_token(database, tmp_path)
    assert (tmp_path / TOKEN_FILE).read_bytes() == content


def test_a_place_that_cannot_be_written_is_named(database, tmp_path):
    (tmp_path / "home").write_text("a file")
    with pytest.raises(SettingsError, match="KITSUNE_HOME"):
        ensure_local_token(database, tmp_path / "home")


def test_servers_that_start_together_agree(database, tmp_path):
    found: list[str] = []
    starts = [
        threading.Thread(target=lambda: found.append(ensure_local_token(database, tmp_path).read_text()))
        for _ in range(8)
    ]
    for start in starts:
        start.start()
    for start in starts:
        start.join()
    assert len(found) == 8 and len(set(found)) == 1
    assert known(database, found[0].strip())


# serve ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", "*", "https://t2.example.com", "tuner.example.com/"])
def test_a_name_that_no_client_can_use_is_refused_at_the_start(call, name, kitsune_home, taken_port):
    code, _, err = call("serve", "--port", str(taken_port), "--allow-host", name)
    assert code == 2 and "--allow-host" in err and "tuner.example.com" in err
    assert not kitsune_home.exists()


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.7", "::", "example.com"])
def test_an_address_that_others_reach_must_be_asked_for(call, host, kitsune_home):
    code, _, err = call("serve", "--host", host)
    assert code == 2 and "--allow-remote" in err
    assert not kitsune_home.exists()


def test_others_are_let_in_only_when_there_is_a_token(call, store):
    code, _, err = call("serve", "--host", "0.0.0.0", "--port", "0", "--allow-remote")
    assert code == 2 and "kitsune token create" in err
    call("token", "create", "x", "--expires", "1s")
    token = json.loads(call("token", "list", "--json")[1])["tokens"][0]
    call("token", "revoke", token["id"])
    assert call("serve", "--host", "0.0.0.0", "--port", "0", "--allow-remote")[0] == 2


def test_a_port_that_is_taken_is_named(call, taken_port):
    code, _, err = call("serve", "--port", str(taken_port))
    assert code == 2 and str(taken_port) in err and "--port" in err


@pytest.fixture
def taken_port():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]
