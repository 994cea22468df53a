"""The tables of the store: columns for values that are filtered or sorted by, JSON text for the rest.

Every name starts with `kitsune_`, because Optuna's tables (`trials`, `studies`, `alembic_version`) may share the
database.
"""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import (
    BigInteger,
    Column,
    ColumnElement,
    DateTime,
    Dialect,
    Double,
    ForeignKey,
    Index,
    LargeBinary,
    MetaData,
    Table,
    Text,
    TypeDecorator,
)

from kitsune.base.base_record import Record, canonical_json
from tuner.records import DEFAULT_TEAM

#: The newest revision in `migrations/versions`; a test compares them.
SCHEMA_REVISION = "0014"
#: Separate from Optuna's `alembic_version` in the same database.
VERSION_TABLE = "kitsune_alembic_version"

#: Columns that a list of runs can be sorted by. Each has an index (team, column, id), from which a page is read.
SORTED_BY = ("created_at", "label", "gain", "gain_low", "memory_ratio", "verdict", "trials", "gpu", "status")

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "pk": "pk_%(table_name)s",
    }
)


class Line(TypeDecorator[str]):
    """Text without NUL characters, which PostgreSQL cannot store; both databases refuse them."""

    impl = Text
    cache_ok = True
    python_type = str

    def process_bind_param(self, value: str | None, _dialect: Dialect) -> str | None:
        if value is not None and "\x00" in value:
            raise ValueError(f"text with a NUL character cannot be stored: {value!r:.100}")
        return value


class Whole(TypeDecorator[int]):
    """An integer of at most 64 bits; both databases refuse larger ones."""

    impl = BigInteger
    cache_ok = True
    python_type = int

    def process_bind_param(self, value: int | None, _dialect: Dialect) -> int | None:
        if value is not None and not -(2**63) <= value < 2**63:
            raise ValueError(f"a number of more than 64 bits cannot be stored: {value}")
        return value


class UtcMicroseconds(TypeDecorator[datetime]):
    """A time in microseconds, stored in UTC. (SQLite has no time zones and stores text that sorts like time.)"""

    impl = DateTime(timezone=True)
    cache_ok = True
    python_type = datetime

    def process_bind_param(self, value: datetime | None, _dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError(f"a time without a zone cannot be stored: {value}")
        return value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, _dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


class JsonText(TypeDecorator[Any]):
    """Stores values as canonical JSON (ASCII, so any character fits). Reads text, which `rows.from_row` decodes."""

    impl = Text
    cache_ok = True

    def process_bind_param(
        self, value: Record | Mapping[str, Any] | Sequence[Any] | None, _dialect: Dialect
    ) -> str | None:
        if value is None:
            return None
        if isinstance(value, Record):
            return value.canonical_json()
        return canonical_json(dict(value) if isinstance(value, Mapping) else list(value))


plans = Table(
    "kitsune_plans",
    metadata,
    Column("plan_id", Line, primary_key=True),
    Column("fingerprint", Line, nullable=False),
    Column("batch", Line, nullable=False, server_default=""),
    Column("device", Line),
    Column("gpu", Line),
    Column("compute_capability", Line),
    Column("memory_bytes", Whole),
    Column("driver", Line),
    Column("cuda", Line),
    Column("torch", Line),
    Column("triton", Line),
    Column("run_id", Line),
    Column("verdict", Line),
    Column("speedup", Double),
    Column("speedup_over_eager", Double),
    Column("created_at", UtcMicroseconds, nullable=False),
    Column("document", JsonText, nullable=False),
    Column("team", Line, nullable=False, server_default=DEFAULT_TEAM),
    Index(None, "fingerprint", "gpu"),
    Index(None, "created_at"),
)

archives = Table(
    "kitsune_archives",
    metadata,
    Column("sha256", Line, primary_key=True),
    Column("content", LargeBinary, nullable=False),
    Column("size_bytes", Whole, nullable=False),
    Column("fingerprint", Line, nullable=False),
    Column("model_fingerprint", Line, nullable=False),
    Column("created_at", UtcMicroseconds, nullable=False),
)

# The bytes of an archive are stored once, for all teams; a team may use only archives that it sent itself. The size is
# here too, because reading it from the row with the bytes makes SQLite walk through all of them.
archive_owners = Table(
    "kitsune_archive_owners",
    metadata,
    Column("team", Line, primary_key=True),
    Column("sha256", Line, ForeignKey(archives.c.sha256), primary_key=True),
    Column("created_at", UtcMicroseconds, nullable=False),
    Column("size_bytes", Whole, nullable=False, server_default="0"),
    Column("sent_at", UtcMicroseconds),
    Index(None, "sha256"),
)

# The model and optimizer of each step of a team, for look-ups by model, which must work without the archives.
models = Table(
    "kitsune_models",
    metadata,
    Column("team", Line, primary_key=True),
    Column("fingerprint", Line, primary_key=True),
    Column("model_fingerprint", Line, primary_key=True),
    Index(None, "model_fingerprint"),
)

runs = Table(
    "kitsune_runs",
    metadata,
    Column("id", Line, primary_key=True),
    Column("workload", Line, nullable=False),
    Column("fingerprint", Line, nullable=False),
    Column("device", Line, nullable=False),
    Column("budget_trials", Whole),
    Column("budget_s", Double),
    Column("memory_limit_bytes", Whole),
    Column("seed", Whole, nullable=False),
    Column("status", Line, nullable=False),
    Column("attempt", Whole, nullable=False),
    Column("worker", Line),
    Column("created_at", UtcMicroseconds, nullable=False),
    Column("started_at", UtcMicroseconds),
    Column("heartbeat_at", UtcMicroseconds),
    Column("lease_until", UtcMicroseconds),
    Column("finished_at", UtcMicroseconds),
    Column("environment", JsonText),
    Column("gpu", Line),
    Column("inapplicable", JsonText, nullable=False),
    Column("plan_id", Line, ForeignKey(plans.c.plan_id)),
    Column("verdict", Line),
    Column("error", Line),
    Column("name", Line, nullable=False, server_default=""),
    Column("archive", Line, ForeignKey(archives.c.sha256)),
    Column("content", Line),
    Column("team", Line, nullable=False, server_default=DEFAULT_TEAM),
    Column("trials", Whole, nullable=False, server_default="0"),
    Column("speedup", JsonText),
    Column("gain", Double),
    Column("memory_ratio", Double),
    Column("tags", JsonText, nullable=False, server_default="[]"),
    Column("note", Line, nullable=False, server_default=""),
    Column("label", Line, nullable=False, server_default=""),
    Column("gain_low", Double),
    Column("owner", Line),
    Column("deaths", Whole, nullable=False, server_default="0"),
    Index(None, "archive"),
    Index(None, "plan_id"),
    Index(None, "content"),
    Index(None, "status", "created_at", "id"),
    Index(None, "owner", "status"),
    Index(None, "created_at", "id"),
    Index(None, "fingerprint", "created_at", "id"),
    *(Index(None, "team", name, "id") for name in SORTED_BY),
)

trials = Table(
    "kitsune_trials",
    metadata,
    Column("run_id", Line, ForeignKey(runs.c.id), primary_key=True),
    Column("number", Whole, primary_key=True, autoincrement=False),
    Column("attempt", Whole, nullable=False),
    Column("source", Line, nullable=False),
    Column("knobs", JsonText, nullable=False),
    Column("verdict", Line),
    Column("speedup", Double),
    Column("failure_kind", Line),
    Column("measurement", JsonText),
    Column("comparison", JsonText),
    Column("failure", JsonText),
    Column("started_at", UtcMicroseconds, nullable=False),
    Column("finished_at", UtcMicroseconds, nullable=False),
    Column("spent", JsonText),
)

# The launches of a step under the plan of the run, compressed. A separate table, because only one page reads it.
timelines = Table(
    "kitsune_timelines",
    metadata,
    Column("run_id", Line, ForeignKey(runs.c.id, ondelete="CASCADE"), primary_key=True),
    Column("content", LargeBinary, nullable=False),
)

# The time of a step by class of kernels, as given and under the plan of the run, likewise.
class_tables = Table(
    "kitsune_class_tables",
    metadata,
    Column("run_id", Line, ForeignKey(runs.c.id, ondelete="CASCADE"), primary_key=True),
    Column("given", JsonText, nullable=False),
    Column("plan", JsonText, nullable=False),
)

submits = Table(
    "kitsune_submits",
    metadata,
    Column("owner", Line, primary_key=True),
    Column("key", Line, primary_key=True),
    Column("digest", Line, nullable=False),
    Column("run_id", Line, ForeignKey(runs.c.id), nullable=False),
    Column("created_at", UtcMicroseconds, nullable=False),
    Index(None, "run_id"),
)

shares = Table(
    "kitsune_shares",
    metadata,
    Column("id", Line, primary_key=True),
    Column("digest", Line, nullable=False),
    Column("run_id", Line, ForeignKey(runs.c.id), nullable=False),
    Column("team", Line, nullable=False),
    Column("created_at", UtcMicroseconds, nullable=False),
    Column("expires_at", UtcMicroseconds),
    Column("ended_at", UtcMicroseconds),
    Index(None, "digest", unique=True),
    Index(None, "run_id"),
)

tokens = Table(
    "kitsune_tokens",
    metadata,
    Column("id", Line, primary_key=True),
    Column("name", Line, nullable=False),
    Column("digest", Line, nullable=False),
    Column("scopes", JsonText, nullable=False),
    Column("created_at", UtcMicroseconds, nullable=False),
    Column("expires_at", UtcMicroseconds),
    Column("revoked_at", UtcMicroseconds),
    Column("team", Line, nullable=False, server_default=DEFAULT_TEAM),
    Index(None, "digest", unique=True),
)

sessions = Table(
    "kitsune_sessions",
    metadata,
    Column("cookie", Line, primary_key=True),
    Column("token_id", Line, ForeignKey(tokens.c.id), nullable=False),
    Column("csrf", Line, nullable=False),
    Column("started_at", UtcMicroseconds, nullable=False),
    Column("ends_at", UtcMicroseconds, nullable=False),
    Index(None, "ends_at"),
)


def of_team(table: Table, team: str | None) -> tuple[ColumnElement[bool], ...]:
    """The condition for rows of this team; none where `team` is None, which means any team."""
    return () if team is None else (table.c.team == team,)
