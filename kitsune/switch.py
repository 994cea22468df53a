"""The off-switch: KITSUNE_DISABLE=1 makes every step run as given."""

import os

from kitsune.errors import SettingsError

TRUE, FALSE = {"1", "true", "yes", "on"}, {"", "0", "false", "no", "off"}


def is_disabled() -> bool:
    """Raises SettingsError for a value that is neither true nor false."""
    value = os.environ.get("KITSUNE_DISABLE", "").strip().lower()
    if value in TRUE | FALSE:
        return value in TRUE
    raise SettingsError(f"KITSUNE_DISABLE is {value!r}; use 1 or 0")
