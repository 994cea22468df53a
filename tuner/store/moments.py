"""What time it is for those who share a database.

On PostgreSQL its own clock, read in the very statement that needs it: hosts may be minutes apart, and a lease that one
writes is judged by others. A file of SQLite's is on one machine, whose clock all of them have (docs/decisions/0070).
"""

import time
from datetime import datetime, timedelta
from typing import Final

from sqlalchemy import ColumnElement, Connection, DateTime, func, select

from kitsune.errors import UnfitError
from tuner.store.database import Database
from tuner.store.error_translation import shown
from tuner.wall_clock import utcnow

#: A moment, or the statement's own.
Instant = datetime | ColumnElement[datetime]

#: So far may the clock of a host be from the database's: tokens, sessions and retention go by dates of the hosts.
MOST_SKEW_S: Final = 60.0


def current(connection: Connection) -> Instant:
    """When the statement began in which it stands: a wait for a lock must not make a lease look older than it was."""
    return _its_clock() if connection.dialect.name == "postgresql" else utcnow()


def skew_s(database: Database) -> float:
    """By how many seconds the clock of this machine is ahead of the database's, at least; 0 for a file."""
    if database.engine.dialect.name != "postgresql":
        return 0.0
    with database.read() as connection:
        connection.execute(select(1))  # not to time the connecting
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
