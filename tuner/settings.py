"""Settings from environment variables: one frozen record, read once and passed on."""

from collections.abc import Mapping
from pathlib import Path
from typing import Self
from urllib.parse import quote

from pydantic import Field

from kitsune.base.base_record import Record
from kitsune.base.environment import home_folder, is_disabled, is_on, variable
from kitsune.errors import UnfitError
from tuner.fault_injection import Fault, parsed, plant


class Settings(Record):
    """What the environment decides. The variable of a field is KITSUNE_ and its name in capitals."""

    home: Path = Field(description="folder of everything that Kitsune keeps on this machine")
    database_url: str = Field(
        min_length=1, description="sqlite:///PATH, or postgresql://USER:PASSWORD@HOST/NAME for a team"
    )
    disable: bool = Field(default=False, description="true: nothing is tuned and no plan is applied")
    confine: bool = Field(default=True, description="false: processes that measure models of others keep the network")
    faults: tuple[Fault, ...] = Field(default=(), description="planted for a test of what becomes of them")

    @classmethod
    def from_environment(cls, variables: Mapping[str, str] | None = None) -> Self:
        """Settings of this process, or of the given variables. An empty variable counts as unset.

        Raises SettingsError, which names the invalid variable.
        """
        home = home_folder(variables)
        database_url = variable("database_url", variables) or sqlite_url(home / "kitsune.db")
        confine = is_on("confine", variables, default=True)
        faults = parsed(variable("faults", variables) or "")
        return cls(home=home, database_url=database_url, disable=is_disabled(variables), confine=confine, faults=faults)


def settings_for_tuning() -> Settings:
    """The settings of this process, whose faults are planted. Raises UnfitError when tuning is switched off."""
    settings = Settings.from_environment()
    if settings.disable:
        raise UnfitError("KITSUNE_DISABLE is set, so nothing is tuned; unset it first")
    plant(settings.faults)
    return settings


def sqlite_url(path: Path) -> str:
    """The database URL of a file, with special characters of URLs escaped."""
    return "sqlite:///" + quote(str(path), safe=" !\"$'()*+,-./:;<=>@[\\]^_`{|}~")
