"""The clock of the database, shared by all hosts that use it.

On PostgreSQL it is the server's clock, read in the statement that needs it: clocks of hosts may differ by minutes, and
a lease that one host writes is checked by others. An SQLite file is on one machine and uses its clock
(docs/decisions/0070).
"""

import time
from datetime import datetime, timedelta
from typing import Final

from sqlalchemy import ColumnElement, Connection, DateTime, func, select

from kitsune.errors import UnfitError
from tuner.store.database import Database
from tuner.store.error_translation import shown
from tuner.wall_clock import utcnow

#: A fixed moment, or an SQL expression for the start of the statement.
Instant = datetime | ColumnElement[datetime]

#: Maximal clock difference of a host: tokens, sessions and retention use the hosts' clocks.
MOST_SKEW_S: Final = 60.0


def current(connection: Connection) -> Instant:
    """The start of the statement that contains it, so that waiting for a lock does not make a lease look older."""
    return _its_clock() if connection.dialect.name == "postgresql" else utcnow()


def skew_s(database: Database) -> float:
    """Seconds by which this machine's clock is ahead of the database's (negative: behind), at least; 0 for SQLite."""
    if database.engine.dialect.name != "postgresql":
        return 0.0
    with database.read() as connection:
        connection.execute(select(1))  # connects first, to keep that out of the measurement
        begin, before = time.monotonic(), utcnow()
        theirs = connection.execute(select(_its_clock())).scalar_one()
        after = before + timedelta(seconds=time.monotonic() - begin)
    if before <= theirs <= after:
        return 0.0
    return (before - theirs).total_seconds() if theirs < before else (after - theirs).total_seconds()


def check_clock(database: Database) -> None:
    """Raises UnfitError when the clock of this machine is far from the database's."""
    ahead_s = skew_s(database)
    if abs(ahead_s) > MOST_SKEW_S:
        way = "ahead of" if ahead_s > 0 else "behind"
        raise UnfitError(
            f"the clock of this machine is {abs(ahead_s):.0f} s {way} that of the database {shown(database.engine.url)}"
            f" (at most {MOST_SKEW_S:.0f} s are allowed): dates of tokens and runs would be wrong; set the one that is "
            "wrong, as with `timedatectl set-ntp true`, and start again"
        )


def _its_clock() -> ColumnElement[datetime]:
    return func.statement_timestamp(type_=DateTime(timezone=True))
