"""Teams; columns that a list of runs shows and sorts by; read-only links.

In offline mode (`alembic upgrade --sql`) the gain and the memory of older runs stay empty, because they must be read
from the documents of the plans.

Revision ID: 0004
Revises: 0003
"""

import json
import math
from typing import Any

import sqlalchemy as sa
from alembic import context, op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

_SORTED_BY = ("created_at", "gain", "memory_ratio", "trials", "workload", "gpu", "status")


def upgrade() -> None:
    for table in ("tokens", "plans", "runs"):
        op.add_column(f"kitsune_{table}", sa.Column("team", sa.Text(), server_default="default", nullable=False))
    for column in (
        sa.Column("trials", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("speedup", sa.Text()),
        sa.Column("gain", sa.Double()),
        sa.Column("memory_ratio", sa.Double()),
        sa.Column("tags", sa.Text(), server_default="[]", nullable=False),
        sa.Column("note", sa.Text(), server_default="", nullable=False),
    ):
        op.add_column("kitsune_runs", column)

    op.create_table(
        "kitsune_archive_owners",
        sa.Column("team", sa.Text(), nullable=False),
        sa.Column("sha256", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["sha256"], ["kitsune_archives.sha256"], name="fk_kitsune_archive_owners_sha256"),
        sa.PrimaryKeyConstraint("team", "sha256", name="pk_kitsune_archive_owners"),
    )
    op.create_index("ix_kitsune_archive_owners_sha256", "kitsune_archive_owners", ["sha256"])
    op.create_table(
        "kitsune_shares",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("digest", sa.Text(), nullable=False),
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("team", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True)),
        sa.Column("ended_at", sa.DateTime(timezone=True)),
        sa.ForeignKeyConstraint(["run_id"], ["kitsune_runs.id"], name="fk_kitsune_shares_run_id"),
        sa.PrimaryKeyConstraint("id", name="pk_kitsune_shares"),
    )
    op.create_index("ix_kitsune_shares_digest", "kitsune_shares", ["digest"], unique=True)
    op.create_index("ix_kitsune_shares_run_id", "kitsune_shares", ["run_id"])

    op.execute(
        "INSERT INTO kitsune_archive_owners (team, sha256, created_at) "
        "SELECT 'default', sha256, created_at FROM kitsune_archives"
    )
    op.execute(
        "UPDATE kitsune_runs SET trials = "
        "(SELECT count(*) FROM kitsune_trials WHERE kitsune_trials.run_id = kitsune_runs.id)"
    )
    if not context.is_offline_mode():
        _tell_of_plans(op.get_bind())
    for name in _SORTED_BY:
        op.create_index(f"ix_kitsune_runs_team_{name}_id", "kitsune_runs", ["team", name, "id"])


def downgrade() -> None:
    for name in _SORTED_BY:
        op.drop_index(f"ix_kitsune_runs_team_{name}_id", "kitsune_runs")
    op.drop_table("kitsune_shares")
    op.drop_table("kitsune_archive_owners")
    # No batch mode: SQLite would recreate the table, and refuse to drop the old one while others refer to it.
    for name in ("note", "tags", "memory_ratio", "gain", "speedup", "trials"):
        op.drop_column("kitsune_runs", name)
    for table in ("runs", "plans", "tokens"):
        op.drop_column(f"kitsune_{table}", "team")


def _tell_of_plans(connection: sa.Connection) -> None:
    """Sets gain and memory of the runs that have a plan, from its evidence."""
    found = connection.execute(
        sa.text(
            "SELECT kitsune_runs.id, kitsune_plans.document FROM kitsune_runs "
            "JOIN kitsune_plans ON kitsune_plans.plan_id = kitsune_runs.plan_id"
        )
    )
    told = [{"id": run_id, **summary} for run_id, document in found if (summary := _summary(document)) is not None]
    if told:
        connection.execute(
            sa.text(
                "UPDATE kitsune_runs SET speedup = :speedup, gain = :gain, memory_ratio = :memory_ratio WHERE id = :id"
            ),
            told,
        )


def _summary(document: str) -> dict[str, Any] | None:
    """None for a plan without evidence, and for one that is damaged."""
    try:
        evidence = json.loads(document)["evidence"]
        speedup = {name: float(evidence["speedup"][name]) for name in ("high", "low", "median")}
        before, after = float(evidence["baseline_peak_bytes"]), float(evidence["peak_bytes"])
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError):
        return None
    if not all(map(math.isfinite, (*speedup.values(), before, after))):
        return None
    return {
        "speedup": json.dumps(speedup, separators=(",", ":")),
        "gain": speedup["median"],
        "memory_ratio": after / before if before else None,
    }
