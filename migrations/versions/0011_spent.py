"""Time spent per part of a trial, as JSON; NULL for earlier trials.

Revision ID: 0011
Revises: 0010
"""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("kitsune_trials", sa.Column("spent", sa.Text()))


def downgrade() -> None:
    op.drop_column("kitsune_trials", "spent")
