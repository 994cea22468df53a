"""The off-switch: KITSUNE_DISABLE=1 makes every step run as given."""

from collections.abc import Mapping

from kitsune.errors import SettingsError
from kitsune.home import variable

TRUE, FALSE = {"1", "true", "yes", "on"}, {"0", "false", "no", "off"}


def is_disabled(variables: Mapping[str, str] | None = None) -> bool:
    """Of this process, or by the given variables. Raises SettingsError for a value that is neither true nor false."""
    value = variable("disable", variables)
    if value is None or value.lower() in FALSE:
        return False
    if value.lower() in TRUE:
        return True
    raise SettingsError(f"KITSUNE_DISABLE is {value!r}; use 1 or 0")
