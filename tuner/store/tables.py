"""The tables of the store: columns for what is filtered and sorted by, JSON text for the rest. Nothing else here.

Every name starts with `kitsune_`: Optuna's own tables (`trials`, `studies`, `alembic_version`) may share the database.
"""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import (
    BigInteger,
    Column,
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

#: The newest revision in `migrations/versions`; a test compares.
SCHEMA_REVISION = "0012"
#: Ours alone: Optuna keeps its own revision in `alembic_version` of the same database.
VERSION_TABLE = "kitsune_alembic_version"

#: A list of runs can be in the order of each: a page of it is read off an index, which ends in "id".
SORTED_BY = ("created_at", "label", "gain", "gain_low", "memory_ratio", "verdict", "trials", "gpu", "status")

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "pk": "pk_%(table_name)s",
    }
)


class Line(TypeDecorator[str]):
    """Text without NUL characters, which PostgreSQL cannot hold: refused on both databases alike."""

    impl = Text
    cache_ok = True
    python_type = str

    def process_bind_param(self, value: str | None, _dialect: Dialect) -> str | None:
        if value is not None and "\x00" in value:
            raise ValueError(f"text with a NUL character cannot be stored: {value!r:.100}")
        return value


class Whole(TypeDecorator[int]):
    """A whole number of at most 64 bits: a larger one is refused on both databases alike."""

    impl = BigInteger
    cache_ok = True
    python_type = int

    def process_bind_param(self, value: int | None, _dialect: Dialect) -> int | None:
        if value is not None and not -(2**63) <= value < 2**63:
            raise ValueError(f"a number of more than 64 bits cannot be stored: {value}")
        return value


class Moment(TypeDecorator[datetime]):
    """An instant to the microsecond, stored in UTC (SQLite has no time zones; its text sorts as time does)."""

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
    """Canonical JSON going in (ASCII, so any character fits); text coming out, which `rows.from_row` decodes."""

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
    Column("created_at", Moment, nullable=False),
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
    Column("created_at", Moment, nullable=False),
)

# The bytes of an archive are kept once, whoever sends them; a team may refer to those that it sent itself. Their size
# stands here too: to read it beside the bytes, SQLite walks through all of them.
archive_owners = Table(
    "kitsune_archive_owners",
    metadata,
    Column("team", Line, primary_key=True),
    Column("sha256", Line, ForeignKey(archives.c.sha256), primary_key=True),
    Column("created_at", Moment, nullable=False),
    Column("size_bytes", Whole, nullable=False, server_default="0"),
    Column("sent_at", Moment),
    Index(None, "sha256"),
)

# Which steps of a team are of which model and optimizer: what a look-up by a model needs, also without the archives.
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
    Column("seed", Whole, nullable=False),
    Column("status", Line, nullable=False),
    Column("attempt", Whole, nullable=False),
    Column("worker", Line),
    Column("created_at", Moment, nullable=False),
    Column("started_at", Moment),
    Column("heartbeat_at", Moment),
    Column("lease_until", Moment),
    Column("finished_at", Moment),
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
    Column("started_at", Moment, nullable=False),
    Column("finished_at", Moment, nullable=False),
    Column("spent", JsonText),
)

# The launches of a step by the plan of the run, compressed: read for one page, and never beside a list of runs.
timelines = Table(
    "kitsune_timelines",
    metadata,
    Column("run_id", Line, ForeignKey(runs.c.id, ondelete="CASCADE"), primary_key=True),
    Column("content", LargeBinary, nullable=False),
)

submits = Table(
    "kitsune_submits",
    metadata,
    Column("owner", Line, primary_key=True),
    Column("key", Line, primary_key=True),
    Column("digest", Line, nullable=False),
    Column("run_id", Line, ForeignKey(runs.c.id), nullable=False),
    Column("created_at", Moment, nullable=False),
    Index(None, "run_id"),
)

shares = Table(
    "kitsune_shares",
    metadata,
    Column("id", Line, primary_key=True),
    Column("digest", Line, nullable=False),
    Column("run_id", Line, ForeignKey(runs.c.id), nullable=False),
    Column("team", Line, nullable=False),
    Column("created_at", Moment, nullable=False),
    Column("expires_at", Moment),
    Column("ended_at", Moment),
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
    Column("created_at", Moment, nullable=False),
    Column("expires_at", Moment),
    Column("revoked_at", Moment),
    Column("team", Line, nullable=False, server_default=DEFAULT_TEAM),
    Index(None, "digest", unique=True),
)

sessions = Table(
    "kitsune_sessions",
    metadata,
    Column("cookie", Line, primary_key=True),
    Column("token_id", Line, ForeignKey(tokens.c.id), nullable=False),
    Column("csrf", Line, nullable=False),
    Column("started_at", Moment, nullable=False),
    Column("ends_at", Moment, nullable=False),
    Index(None, "ends_at"),
)
