"""Settings of `kitsune serve`: address, limits, quotas and timeouts, from options and the environment."""

from collections.abc import Mapping
from typing import Any, Final, Self

from pydantic import Field, ValidationError

from kitsune.base.base_record import Record
from kitsune.base.environment import PREFIX, variable
from kitsune.base.json_logging import LogFormat
from kitsune.client.server_address import DEFAULT_HOST, DEFAULT_PORT, is_loopback
from kitsune.errors import SettingsError
from kitsune.submission.format.limits import MAX_ARCHIVE_BYTES
from tuner.store.queries.submits import Quota

#: Read from options only: Kubernetes sets KITSUNE_PORT itself, to another value, for a service of that name.
BY_OPTION: Final = frozenset({"host", "port", "allow_remote", "allowed_hosts"})
#: A century. To keep runs forever, leave `retention_days` unset.
MOST_DAYS: Final = 36_500


class ServerSettings(Record):
    """The defaults are for a server that only this machine can reach."""

    host: str = DEFAULT_HOST
    port: int = Field(default=DEFAULT_PORT, ge=0, le=65535, description="0: any free one")
    allow_remote: bool = False
    allowed_hosts: tuple[str, ...] = Field(
        default=(), description="names by which clients reach this server, beside its addresses"
    )
    log_format: LogFormat = Field(
        default=LogFormat.TEXT, description="`json`: one object a line, with a line for each request"
    )
    retention_days: float | None = Field(
        default=None, gt=0, le=MOST_DAYS, description="runs that ended longer ago are deleted; unset: none is"
    )
    requests_per_minute: int = Field(default=30_000, ge=0, description="of one token; 0: any number")
    lookups_per_minute: int = Field(default=0, ge=0, description="of plans, by one token; 0: any number")
    active_runs: int = Field(default=10_000, ge=0, description="that one team has queued or running; 0: any number")
    token_active_runs: int = Field(
        default=10_000, ge=0, description="that one token has queued or running; 0: any number"
    )
    team_archive_bytes: int = Field(
        default=16 * 2**30, ge=0, description="that the archives of one team may have; 0: any number"
    )
    max_json_bytes: int = Field(default=64 * 2**10, gt=0, description="that the body of a request may have")
    max_archive_bytes: int = Field(default=MAX_ARCHIVE_BYTES, gt=0, description="that an archive may have")
    json_timeout_s: float = Field(default=10.0, gt=0, description="by then the body of a request has arrived")
    archive_timeout_s: float = Field(default=120.0, gt=0, description="the same for an archive: 32 MiB at 2.2 Mbit/s")
    events_poll_s: float = Field(default=0.5, gt=0, description="how often a stream of events looks into the database")
    events_ping_s: float = Field(
        default=15.0, gt=0, description="an idle stream sends a keep-alive at least this often"
    )

    @classmethod
    def from_environment(cls, given: Mapping[str, Any], variables: Mapping[str, str] | None = None) -> Self:
        """The settings from options, and from KITSUNE_<NAME> variables for those not given.

        Raises SettingsError that names the option or the variable that is invalid.
        """
        told = {name: variable(name, variables) for name in cls.model_fields if name not in BY_OPTION}
        found = {name: value for name, value in told.items() if value is not None and name not in given}
        try:
            return cls.model_validate({**found, **given})
        except ValidationError as error:
            [wrong, *_] = error.errors(include_url=False)
            name, said = str(wrong["loc"][0]), wrong["msg"][:1].lower() + wrong["msg"][1:]
            spelled = f"{PREFIX}{name.upper()}" if name in found else f"--{name.replace('_', '-')}"
            raise SettingsError(f"{spelled} is {wrong['input']!r:.100}; {said}") from error

    @property
    def quota(self) -> Quota:
        return Quota(team=self.active_runs, owner=self.token_active_runs)

    @property
    def is_loopback(self) -> bool:
        return is_loopback(self.host)

    def check_reach(self) -> None:
        """Raises SettingsError if other machines can reach the address and `allow_remote` is not set."""
        if not (self.is_loopback or self.allow_remote):
            raise SettingsError(
                f"--host {self.host} can be reached from other machines; add --allow-remote if that is meant, and put "
                "a proxy with TLS in front: tokens travel as they are"
            )
