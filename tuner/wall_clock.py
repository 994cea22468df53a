"""The wall clock of this machine in UTC, for dates and for times shown to users.

It may be wrong and may jump, so durations never use it, nor do leases if the database has its own clock.
"""

from datetime import UTC, datetime, timedelta

from tuner import fault_injection


def utcnow() -> datetime:
    return datetime.now(UTC) + timedelta(seconds=fault_injection.seconds("clock-ahead"))
