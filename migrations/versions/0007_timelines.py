"""Timelines: the launches of a step under the plan of a run.

Revision ID: 0007
Revises: 0006
"""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "kitsune_timelines",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("content", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(
            ["run_id"], ["kitsune_runs.id"], name="fk_kitsune_timelines_run_id", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("run_id", name="pk_kitsune_timelines"),
    )


def downgrade() -> None:
    op.drop_table("kitsune_timelines")
