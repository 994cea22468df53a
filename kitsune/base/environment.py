"""Reads KITSUNE_ environment variables, and finds the folder in which Kitsune keeps its files."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from kitsune.errors import SettingsError

PREFIX: Final = "KITSUNE_"
TRUE, FALSE = {"1", "true", "yes", "on"}, {"0", "false", "no", "off"}


def variable(name: str, variables: Mapping[str, str] | None = None) -> str | None:
    """The variable KITSUNE_<NAME>, of this process or of `variables`; None when unset, empty or blank."""
    value = (os.environ if variables is None else variables).get(PREFIX + name.upper(), "").strip()
    return value or None


def is_disabled(variables: Mapping[str, str] | None = None) -> bool:
    """Whether KITSUNE_DISABLE=1 is set, which makes every step run as given. Raises SettingsError as `is_on` does."""
    return is_on("disable", variables, default=False)


def is_on(name: str, variables: Mapping[str, str] | None = None, *, default: bool) -> bool:
    """KITSUNE_<NAME> as a boolean. Raises SettingsError for a value that is neither true nor false."""
    value = variable(name, variables)
    if value is None:
        return default
    if value.lower() in TRUE | FALSE:
        return value.lower() in TRUE
    raise SettingsError(f"{PREFIX}{name.upper()} is {value!r}; use 1 or 0")


def home_folder(variables: Mapping[str, str] | None = None) -> Path:
    """KITSUNE_HOME, or "kitsune" in the user's data folder, as an absolute path. It may not exist yet.

    The data folder is that of the XDG Base Directory Specification, which ignores relative paths. Raises SettingsError
    when the user has no home folder, as in some containers.
    """
    given = variable("home", variables)
    if given is not None:
        return _absolute(given)
    base = (os.environ if variables is None else variables).get("XDG_DATA_HOME", "")
    return Path(base) / "kitsune" if base and Path(base).is_absolute() else _absolute("~/.local/share/kitsune")


def private_folder(folder: Path) -> Path:
    """Creates the folder and its missing parents, readable by this user only. Raises OSError."""
    for each in reversed([folder, *folder.parents]):
        if not each.exists():
            each.mkdir(mode=0o700, exist_ok=True)
    return folder


def _absolute(folder: str) -> Path:
    try:
        return Path(folder).expanduser().absolute()
    except RuntimeError as error:
        raise SettingsError(
            f"{PREFIX}HOME: cannot find the folder {folder!r} ({error}); set {PREFIX}HOME to an absolute path"
        ) from error
