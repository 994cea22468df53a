"""The wall clock of this machine, in UTC: what people are shown, and dates.

It may be wrong and may jump, so no duration comes from it, and no lease where a database has a clock of its own.
"""

from datetime import UTC, datetime, timedelta

from tuner.measuring import fault_injection


def utcnow() -> datetime:
    return datetime.now(UTC) + timedelta(seconds=fault_injection.seconds("clock-ahead"))
