"""Number of workers that a run has lost since its last progress, so that the trial that kills them can be given up.

Existing runs start at 0.

Revision ID: 0012
Revises: 0011
"""

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("kitsune_runs", sa.Column("deaths", sa.BigInteger(), nullable=False, server_default="0"))


def downgrade() -> None:
    op.drop_column("kitsune_runs", "deaths")
