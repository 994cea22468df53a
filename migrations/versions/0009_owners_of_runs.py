"""Which token asked for a run: how many of its runs have not ended can be limited.

Of runs that are there already it is not known, and none of them counts.

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
