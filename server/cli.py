"""The commands `kitsune serve` and `kitsune token`. Their modules are imported only when a command runs."""

from functools import partial
from typing import Annotated, Final

import typer

from kitsune.base.optional_imports import load
from kitsune.cli.main import Json, LogFormatOption
from tuner.records import DEFAULT_TEAM

#: Import names of the packages of the extra `server`.
EXTRA: Final = ("alembic", "fastapi", "prometheus_client", "sqlalchemy", "starlette", "uvicorn")
_load = partial(load, extra="server", packages=EXTRA)

Database = Annotated[
    str | None, typer.Option(metavar="URL", help="sqlite:///PATH or postgresql://...; default: KITSUNE_DATABASE_URL.")
]


def register(app: typer.Typer) -> None:
    """Adds `serve` and `token` to the app; called through the entry point."""
    app.command("serve")(serve)
    tokens = typer.Typer(help="Create, list or revoke access tokens of the server.")
    tokens.command("create")(token_create)
    tokens.command("list")(token_list)
    tokens.command("revoke")(token_revoke)
    app.add_typer(tokens, name="token")


def serve(
    host: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Address to listen on; default: 127.0.0.1.")
    ] = None,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="Default: 8537. 0: any free port.")] = None,
    database: Database = None,
    allow_remote: Annotated[
        bool, typer.Option("--allow-remote", help="Required to listen on an address that other machines can reach.")
    ] = False,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A host name that clients use for this server; may be repeated."),
    ] = None,
    retention_days: Annotated[
        float | None, typer.Option(metavar="DAYS", help="Delete runs that ended longer ago. Default: keep all.")
    ] = None,
    log_format: LogFormatOption = None,
) -> None:
    """Serve the HTTP API and the web pages; `kitsune worker` does the tuning."""
    given = {"host": host, "port": port, "retention_days": retention_days, "log_format": log_format}
    _load("server.serving").serve(given, database, allow_remote=allow_remote, allowed_hosts=allow_host or [])


def token_create(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The name of its user.")],
    scope: Annotated[
        list[str] | None, typer.Option(metavar="read|submit|admin", help="May be repeated; default: read and submit.")
    ] = None,
    expires: Annotated[str | None, typer.Option(metavar="TIME", help="Lifetime: 12h, 30d. Default: no limit.")] = None,
    team: Annotated[
        str, typer.Option(metavar="NAME", help="Limits it to the runs and plans of this team.")
    ] = DEFAULT_TEAM,
    database: Database = None,
    as_json: Json = False,
) -> None:
    """Create a token. It is shown once: the database keeps only its digest."""
    _load("server.tokens").create(database, name, scope or ["read", "submit"], expires, team, as_json=as_json)


def token_list(database: Database = None, as_json: Json = False) -> None:
    """List the tokens, with their scopes and expiry."""
    _load("server.tokens").list_all(database, as_json=as_json)


def token_revoke(
    token: Annotated[str, typer.Argument(metavar="ID", help="As `kitsune token list` shows it.")],
    database: Database = None,
    as_json: Json = False,
) -> None:
    """Revoke a token. It takes effect within a second."""
    _load("server.tokens").revoke(database, token, as_json=as_json)
