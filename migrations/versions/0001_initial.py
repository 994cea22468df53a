"""Runs, trials and plans.

Revision ID: 0001
Revises:
"""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "kitsune_plans",
        sa.Column("plan_id", sa.Text(), nullable=False),
        sa.Column("fingerprint", sa.Text(), nullable=False),
        sa.Column("device", sa.Text()),
        sa.Column("gpu", sa.Text()),
        sa.Column("compute_capability", sa.Text()),
        sa.Column("memory_bytes", sa.BigInteger()),
        sa.Column("driver", sa.Text()),
        sa.Column("cuda", sa.Text()),
        sa.Column("torch", sa.Text()),
        sa.Column("triton", sa.Text()),
        sa.Column("run_id", sa.Text()),
        sa.Column("verdict", sa.Text()),
        sa.Column("speedup", sa.Double()),
        sa.Column("speedup_over_eager", sa.Double()),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("document", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("plan_id", name="pk_kitsune_plans"),
    )
    op.create_index("ix_kitsune_plans_fingerprint_gpu", "kitsune_plans", ["fingerprint", "gpu"])

    op.create_table(
        "kitsune_runs",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("workload", sa.Text(), nullable=False),
        sa.Column("fingerprint", sa.Text(), nullable=False),
        sa.Column("device", sa.Text(), nullable=False),
        sa.Column("budget_trials", sa.BigInteger()),
        sa.Column("budget_s", sa.Double()),
        sa.Column("seed", sa.BigInteger(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("attempt", sa.BigInteger(), nullable=False),
        sa.Column("worker", sa.Text()),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True)),
        sa.Column("heartbeat_at", sa.DateTime(timezone=True)),
        sa.Column("lease_until", sa.DateTime(timezone=True)),
        sa.Column("finished_at", sa.DateTime(timezone=True)),
        sa.Column("environment", sa.Text()),
        sa.Column("gpu", sa.Text()),
        sa.Column("inapplicable", sa.Text(), nullable=False),
        sa.Column("plan_id", sa.Text()),
        sa.Column("verdict", sa.Text()),
        sa.Column("error", sa.Text()),
        sa.ForeignKeyConstraint(["plan_id"], ["kitsune_plans.plan_id"], name="fk_kitsune_runs_plan_id"),
        sa.PrimaryKeyConstraint("id", name="pk_kitsune_runs"),
    )
    op.create_index("ix_kitsune_runs_created_at_id", "kitsune_runs", ["created_at", "id"])
    op.create_index("ix_kitsune_runs_fingerprint_created_at_id", "kitsune_runs", ["fingerprint", "created_at", "id"])
    op.create_index("ix_kitsune_runs_status_created_at_id", "kitsune_runs", ["status", "created_at", "id"])

    op.create_table(
        "kitsune_trials",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("number", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("attempt", sa.BigInteger(), nullable=False),
        sa.Column("source", sa.Text(), nullable=False),
        sa.Column("knobs", sa.Text(), nullable=False),
        sa.Column("verdict", sa.Text()),
        sa.Column("speedup", sa.Double()),
        sa.Column("failure_kind", sa.Text()),
        sa.Column("measurement", sa.Text()),
        sa.Column("comparison", sa.Text()),
        sa.Column("failure", sa.Text()),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["kitsune_runs.id"], name="fk_kitsune_trials_run_id"),
        sa.PrimaryKeyConstraint("run_id", "number", name="pk_kitsune_trials"),
    )


def downgrade() -> None:
    op.drop_table("kitsune_trials")
    op.drop_table("kitsune_runs")
    op.drop_table("kitsune_plans")
