"""Switches of the environment, and the off-switch: KITSUNE_DISABLE=1 makes every step run as given."""

from collections.abc import Mapping

from kitsune.base.environment import PREFIX, variable
from kitsune.errors import SettingsError

TRUE, FALSE = {"1", "true", "yes", "on"}, {"0", "false", "no", "off"}


def is_disabled(variables: Mapping[str, str] | None = None) -> bool:
    """Of this process, or by the given variables. Raises SettingsError for a value that is neither true nor false."""
    return is_on("disable", variables, default=False)


def is_on(name: str, variables: Mapping[str, str] | None = None, *, default: bool) -> bool:
    """What KITSUNE_ and the name in capitals says. Raises SettingsError for a value that is neither true nor false."""
    value = variable(name, variables)
    if value is None:
        return default
    if value.lower() in TRUE | FALSE:
        return value.lower() in TRUE
    raise SettingsError(f"{PREFIX}{name.upper()} is {value!r}; use 1 or 0")
