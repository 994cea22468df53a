"""Resolves the server's address and token from arguments and KITSUNE_ variables. Does not import torch."""

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import httpx

from kitsune.base.environment import home_folder, variable
from kitsune.errors import SettingsError

DEFAULT_HOST: Final = "127.0.0.1"
DEFAULT_PORT: Final = 8537
#: File in the home folder with the token that `kitsune serve` creates on loopback.
TOKEN_FILE: Final = "token"  # noqa: S105
_HOST = re.compile(r"[\w.:-]+")
_TOKEN = re.compile(r"[\x21-\x7e]{1,1024}")


@dataclass(frozen=True, slots=True)
class Server:
    """The address of a server and the token for it. The token is left out of the repr."""

    url: str
    token: str | None = field(default=None, repr=False)

    @property
    def is_loopback(self) -> bool:
        return is_loopback(httpx.URL(self.url).host)


def server_of(
    server: str | None = None, token: str | None = None, variables: Mapping[str, str] | None = None
) -> Server:
    """`server`, else KITSUNE_SERVER, else the one on this machine, with its token.

    The token is `token`; else KITSUNE_TOKEN, unless KITSUNE_SERVER names another server; else, for a server on
    loopback, the one that `kitsune serve` keeps in the home folder. Raises SettingsError for an invalid address or
    token.
    """
    named = variable("server", variables)
    url = checked_url(server or named or f"http://{DEFAULT_HOST}:{DEFAULT_PORT}")
    if token is None and (named is None or checked_url(named) == url):
        token = variable("token", variables)
    if token is None and is_loopback(httpx.URL(url).host):
        token = _kept_token(home_folder(variables) / TOKEN_FILE)
    if token is not None and not _TOKEN.fullmatch(token):
        raise SettingsError("the token holds blanks or invalid characters; copy it again")
    return Server(url, token)


def checked_url(address: str) -> str:
    """The address in normal form, without a trailing slash. Raises SettingsError."""
    try:
        url = httpx.URL(address.strip())
    except (httpx.InvalidURL, ValueError) as error:
        raise SettingsError(f"the server {address!r:.200} is not a valid address: {error}") from error
    if url.userinfo:
        raise SettingsError("the server's address holds a user name or password; give a token instead: KITSUNE_TOKEN")
    is_whole = _HOST.fullmatch(url.host) and (url.port is None or 0 < url.port < 2**16)
    if url.scheme not in ("http", "https") or not is_whole or url.query or url.fragment:
        raise SettingsError(
            f"the server is {address!r:.200}; use an address such as http://{DEFAULT_HOST}:{DEFAULT_PORT}"
        )
    return str(url).rstrip("/")


def is_loopback(host: str) -> bool:
    """Whether a host of a URL, without brackets, is a loopback name or address."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _kept_token(file: Path) -> str | None:
    """The token in the file, or None when there is no file. Raises SettingsError when it cannot be read."""
    try:
        with file.open("rb") as opened:
            return opened.read(4096).decode("ascii").strip() or None
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(
            f"{file} cannot be read ({type(error).__name__}); set KITSUNE_TOKEN, or remove it"
        ) from error
