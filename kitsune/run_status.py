"""The states of a tuning run, as the database, the server and the client all name them."""

from enum import StrEnum


class RunStatus(StrEnum):
    """The state of a tuning run."""

    QUEUED = "queued"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_finished(self) -> bool:
        return self in (RunStatus.FINISHED, RunStatus.FAILED, RunStatus.CANCELLED)
