"""What `kitsune token` does, and the token file that a server on loopback keeps for its user."""

import contextlib
import os
import re
import secrets
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from sqlalchemy import Connection

from kitsune.base.durations import seconds_of
from kitsune.base.environment import private_folder
from kitsune.cli import output
from kitsune.client.server_address import TOKEN_FILE
from kitsune.errors import NotFoundError, SettingsError, StoreError
from server.payloads.names import MAX_NAME, is_showable
from tuner.settings import Settings
from tuner.store.database import Database
from tuner.store.engine import open_database
from tuner.store.queries import tokens
from tuner.store.queries.tokens import Scope, Token

LOCAL: Final = "this machine"
_MAX_BYTES: Final = 200
_TEAM: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,39}")
_SECRET: Final = re.compile(rb"(ksn_[A-Za-z0-9_-]{43})\s*")


def create(
    database_url: str | None, name: str, scopes: list[str], expires: str | None, team: str, *, as_json: bool
) -> None:
    """Creates a token and prints it. Raises SettingsError for an invalid name, team, scope or lifetime."""
    check_name(name)
    check_team(team)
    wanted, until = scopes_of(scopes), expiry(expires)
    with _open(database_url) as database, database.begin() as connection:
        token, secret = tokens.create(connection, name, wanted, team=team, expires_at=until)
    if as_json:
        output.emit({"token": token.model_dump(mode="json"), "secret": secret})
    else:
        output.stdout().print(secret, soft_wrap=True)
        output.note(
            f"Token {token.id} of {name}, team {team}: {_allowed(token)}, {_until(token)}. It is not shown again."
        )


def list_all(database_url: str | None, *, as_json: bool) -> None:
    with _open(database_url) as database, database.read() as connection:
        found = tokens.listed(connection)
    if as_json:
        output.emit({"tokens": [token.model_dump(mode="json") for token in found]})
    elif found:
        rows = [
            (token.id, token.name, token.team, _allowed(token), f"{token.created_at:%Y-%m-%d}", _until(token))
            for token in found
        ]
        output.stdout().print(output.table("id", "name", "team", "may", "made", "until", rows=rows))
    else:
        output.note("No tokens yet. A first one: kitsune token create NAME")


def revoke(database_url: str | None, token_id: str, *, as_json: bool) -> None:
    """Raises NotFoundError if there is no such token."""
    with _open(database_url) as database, database.begin() as connection:
        token = tokens.revoke(connection, token_id)
    if token is None:
        raise NotFoundError(f"there is no token {token_id!r}; 'kitsune token list' shows them")
    if as_json:
        output.emit({"token": token.model_dump(mode="json")})
    else:
        output.note(f"Token {token.id} of {token.name} is revoked.")


def check_name(name: str) -> None:
    """Raises SettingsError for an empty name, and for one that a terminal cannot show safely."""
    if not name.strip() or not is_showable(name):
        raise SettingsError(
            f"the name of a token is {name!a:.100}; use 1 to {MAX_NAME} printable characters, in one line"
        )


def check_team(team: str) -> None:
    """Raises SettingsError for an invalid name of a team."""
    if _TEAM.fullmatch(team) is None:
        raise SettingsError(
            f"the name of a team is {team!a:.100}; use 1 to 40 of the characters a-z, 0-9, '.', '_' and '-', the first "
            "a letter or a digit"
        )


def scopes_of(words: list[str]) -> tuple[Scope, ...]:
    """Raises SettingsError for an unknown scope."""
    unknown = sorted(set(words) - set(Scope))
    if unknown:
        raise SettingsError(f"--scope {unknown[0]!r:.100} is none; there are {', '.join(Scope)}")
    return tuple(scope for scope in Scope if scope in words)


def expiry(length: str | None, what: str = "--expires") -> datetime | None:
    """The moment at which a lifetime such as "12h" or "30d" ends; None: never. Raises SettingsError naming `what`."""
    if length is None:
        return None
    try:
        return datetime.now(UTC) + timedelta(seconds=seconds_of(length, what))
    except OverflowError as error:
        raise SettingsError(f"{what} {length!r:.100} is too far away; leave it out for one without end") from error


def has_live_token(connection: Connection) -> bool:
    now = datetime.now(UTC)
    return any(token.is_good(now) for token in tokens.listed(connection))


def ensure_local_token(database: Database, home: Path) -> Path:
    """The path of a file with a token that is valid for this database; created if missing, readable by this user only.

    A token that the database does not know is added to it, since the file may have been used with another database. A
    revoked token is replaced. Raises SettingsError when the file cannot be used.
    """
    path = home / TOKEN_FILE
    try:
        private_folder(home)
        if not path.exists():
            with contextlib.suppress(FileExistsError):  # another server of this user was first; its token will do
                _write(path, os.link)
        if not (_works(database, _read(path)) or _is_added(database, _read(path))):
            _write(path, os.replace)
            _is_added(database, _read(path))
    except OSError as error:
        raise SettingsError(
            f"the token of this machine cannot be kept in {path} ({error.strerror}); set KITSUNE_HOME"
        ) from error
    return path


def _read(path: Path) -> str:
    """The token in the file, which becomes readable by this user only. Raises SettingsError if it holds none."""
    path.chmod(0o600)
    with path.open("rb") as file:
        found = _SECRET.fullmatch(file.read(_MAX_BYTES))
    if found is None:
        raise SettingsError(f"{path} does not hold a token; move it away, and a new one is made")
    return found[1].decode()


def _write(path: Path, place: Callable[[Path, Path], None]) -> None:
    """Writes a new secret atomically, so that no reader sees a part of it."""
    draft = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    with os.fdopen(os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
        file.write(f"{tokens.new_secret()}\n")
    try:
        place(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def _works(database: Database, secret: str) -> bool:
    with database.read() as connection:
        token = tokens.authenticate(connection, secret)
    return token is not None


def _is_added(database: Database, secret: str) -> bool:
    """Adds the token to the database; False if it is there already and no longer valid."""
    try:
        with database.begin() as connection:
            tokens.create(connection, LOCAL, tuple(Scope), secret=secret)
    except StoreError:
        return _works(database, secret)
    return True


def _allowed(token: Token) -> str:
    return ", ".join(token.scopes)


def _until(token: Token) -> str:
    if token.revoked_at is not None:
        return f"revoked {token.revoked_at:%Y-%m-%d}"
    if token.expires_at is None:
        return "without end"
    word = "until" if token.is_good(datetime.now(UTC)) else "expired"
    return f"{word} {token.expires_at:%Y-%m-%d %H:%M} UTC"


def _open(database_url: str | None) -> Database:
    return open_database(database_url or Settings.from_environment().database_url)
