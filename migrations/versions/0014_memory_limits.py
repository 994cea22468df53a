"""Memory limit of a run: of the peak memory of a step, in bytes.

Existing runs have none.

Revision ID: 0014
Revises: 0013
"""

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("kitsune_runs", sa.Column("memory_limit_bytes", sa.BigInteger(), nullable=True))


def downgrade() -> None:
    op.drop_column("kitsune_runs", "memory_limit_bytes")
