"""Runs the server: what `kitsune serve` does."""

import signal
import socket
from collections.abc import Mapping
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.config import LOGGING_CONFIG

from kitsune.base import json_logging
from kitsune.cli import output
from kitsune.errors import SettingsError
from server.app import create_app
from server.http.guard import parse_allowed_host
from server.http.protocol import BoundedProtocol, open_more_files
from server.http.request_log import RequestLog
from server.retention import deleting_old_runs
from server.settings import ServerSettings
from server.tokens import ensure_local_token, has_live_token
from tuner import fault_injection
from tuner.settings import Settings
from tuner.store.database import Database
from tuner.store.engine import open_database
from tuner.store.moments import check_clock


def serve(
    options: Mapping[str, Any], database_url: str | None, *, allow_remote: bool, allowed_hosts: list[str]
) -> None:
    """Serves until the process is told to stop.

    `options`: fields of ServerSettings; None where the environment or the default decides. Raises SettingsError when
    the address cannot be opened, or when other machines could connect but no token exists.
    """
    names = tuple(parse_allowed_host(name) for name in allowed_hosts)
    given = {name: value for name, value in options.items() if value is not None}
    settings = ServerSettings.from_environment({**given, "allow_remote": allow_remote, "allowed_hosts": names})
    json_logging.set_up(settings.log_format)
    settings.check_reach()
    open_more_files()
    here = Settings.from_environment()
    fault_injection.plant(here.faults)
    with open_database(database_url or here.database_url) as database:
        check_clock(database)
        welcome = _prepare(settings, database, here)
        with _listen(settings) as listening, deleting_old_runs(database, settings.retention_days):
            output.note(f"Kitsune serves on {_address(settings, listening)}; {welcome}")
            _Server(settings, database).run(sockets=[listening])


class _Server(uvicorn.Server):
    """uvicorn with our limits. On shutdown it accepts no new request, ends streams, and gives the others 10 s."""

    def __init__(self, settings: ServerSettings, database: Database) -> None:
        app = create_app(database, settings, is_stopping=lambda: self.should_exit)
        super().__init__(
            uvicorn.Config(
                RequestLog(app) if json_logging.is_json() else app,
                log_config=None if json_logging.is_json() else LOGGING_CONFIG,
                log_level="warning",
                access_log=False,
                server_header=False,
                proxy_headers=False,
                http=BoundedProtocol,
                ws="none",
                timeout_keep_alive=15,
                timeout_graceful_shutdown=10,
            )
        )

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Unlike uvicorn, does not raise SIGTERM again after the shutdown, so that the process exits with 0."""
        if sig == signal.SIGTERM:
            self.should_exit = True
        else:
            super().handle_exit(sig, frame)


def _prepare(settings: ServerSettings, database: Database, here: Settings) -> str:
    """The part of the start message about tokens. Raises SettingsError if not on loopback and no token exists."""
    if settings.is_loopback:
        return f"the token is in {ensure_local_token(database, here.home)}"
    with database.read() as connection:
        if not has_live_token(connection):
            raise SettingsError(
                f"--host {settings.host} lets other machines in, but there is no token; make one first: "
                "kitsune token create NAME"
            )
    return "tokens travel as they are: put a proxy with TLS in front"


def _listen(settings: ServerSettings) -> socket.socket:
    """A listening socket; its backlog holds connections until the application is ready. Raises SettingsError."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((settings.host, settings.port))
        listening.listen(2048)
    except OSError as error:
        listening.close()
        raise SettingsError(
            f"cannot listen on {settings.host} port {settings.port} ({error.strerror}); choose others with --host and "
            "--port"
        ) from error
    return listening


def _address(settings: ServerSettings, listening: socket.socket) -> str:
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return f"http://{host}:{listening.getsockname()[1]}"
