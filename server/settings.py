"""What `kitsune serve` was told, as one frozen record: where it listens, whom it answers, how much it takes."""

from pydantic import Field

from kitsune.errors import SettingsError
from kitsune.record import Record
from kitsune.server_address import DEFAULT_HOST, DEFAULT_PORT, is_loopback
from kitsune.submission.limits import MAX_ARCHIVE_BYTES


class ServerSettings(Record):
    """The defaults are those of a server that only this machine can reach."""

    host: str = DEFAULT_HOST
    port: int = Field(default=DEFAULT_PORT, ge=0, le=65535, description="0: any free one")
    allow_remote: bool = False
    allowed_hosts: tuple[str, ...] = Field(
        default=(), description="names by which clients reach this server, beside its addresses"
    )
    max_json_bytes: int = 64 * 2**10
    max_archive_bytes: int = MAX_ARCHIVE_BYTES
    json_timeout_s: float = Field(default=10.0, description="by then the body of a request has arrived")
    archive_timeout_s: float = Field(default=120.0, description="the same for an archive: 64 MiB at 4.5 Mbit/s")
    events_poll_s: float = Field(default=0.5, description="how often a stream of events looks into the database")
    events_ping_s: float = Field(default=15.0, description="a silent stream says at least this often that it lives")

    @property
    def is_loopback(self) -> bool:
        return is_loopback(self.host)

    def check_reach(self) -> None:
        """Raises SettingsError for an address that others can reach, unless that was asked for."""
        if not (self.is_loopback or self.allow_remote):
            raise SettingsError(
                f"--host {self.host} can be reached from other machines; add --allow-remote if that is meant, and put "
                "a proxy with TLS in front: tokens travel as they are"
            )
