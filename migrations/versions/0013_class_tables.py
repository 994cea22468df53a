"""Class tables: the time of a step by class of kernels, as given and under the plan of a run.

Revision ID: 0013
Revises: 0012
"""

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "kitsune_class_tables",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("given", sa.Text(), nullable=False),
        sa.Column("plan", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(
            ["run_id"], ["kitsune_runs.id"], name="fk_kitsune_class_tables_run_id", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("run_id", name="pk_kitsune_class_tables"),
    )


def downgrade() -> None:
    op.drop_table("kitsune_class_tables")
