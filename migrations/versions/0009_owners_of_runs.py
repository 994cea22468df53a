"""The token that submitted a run, so that the number of its unfinished runs can be limited.

Existing runs get no owner and are not counted.

Revision ID: 0009
Revises: 0008
"""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("kitsune_runs", sa.Column("owner", sa.Text()))
    op.create_index("ix_kitsune_runs_owner_status", "kitsune_runs", ["owner", "status"])


def downgrade() -> None:
    op.drop_index("ix_kitsune_runs_owner_status", "kitsune_runs")
    op.drop_column("kitsune_runs", "owner")
