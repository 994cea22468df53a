"""Settings: environment variables in, one frozen record out, read once and handed down."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Self
from urllib.parse import quote

from pydantic import Field, ValidationError

from kitsune.errors import SettingsError
from kitsune.record import Record

PREFIX = "KITSUNE_"


class Settings(Record):
    """What the environment decides. The variable of a field is KITSUNE_ and its name in capitals."""

    home: Path = Field(description="folder of everything that Kitsune keeps on this machine")
    database_url: str = Field(
        min_length=1, description="sqlite:///PATH, or postgresql://USER:PASSWORD@HOST/NAME for a team"
    )
    disable: bool = Field(default=False, description="true: nothing is tuned and no plan is applied")

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Self:
        """Settings of this process, or of the given variables. An empty variable counts as unset.

        Raises SettingsError naming the variable that makes no sense.
        """
        variables = os.environ if environment is None else environment
        given = {name: variables[PREFIX + name.upper()] for name in cls.model_fields if _is_set(variables, name)}
        home = _absolute(given["home"]) if "home" in given else _default_home(variables)
        values = {"database_url": sqlite_url(home / "kitsune.db"), **given, "home": home}
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            first = error.errors()[0]
            variable = PREFIX + str(first["loc"][0]).upper()
            raise SettingsError(f"{variable}={first['input']!r}: {first['msg']}; correct or unset it") from error


def sqlite_url(path: Path) -> str:
    """The database URL of a file; characters that mean something in a URL are escaped."""
    return "sqlite:///" + quote(str(path), safe=" !\"$'()*+,-./:;<=>@[\\]^_`{|}~")


def _is_set(variables: Mapping[str, str], name: str) -> bool:
    return bool(variables.get(PREFIX + name.upper(), "").strip())


def _default_home(variables: Mapping[str, str]) -> Path:
    """The user's data folder after the XDG Base Directory Specification, which ignores relative paths."""
    base = variables.get("XDG_DATA_HOME", "")
    if base and Path(base).is_absolute():
        return Path(base) / "kitsune"
    return _absolute("~/.local/share/kitsune")


def _absolute(folder: str) -> Path:
    try:
        return Path(folder).expanduser().absolute()
    except RuntimeError as error:  # the user has no home folder, as in some containers
        raise SettingsError(
            f"{PREFIX}HOME: cannot find the folder {folder!r} ({error}); set {PREFIX}HOME to an absolute path"
        ) from error
