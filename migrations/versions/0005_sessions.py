"""Browser sessions.

Revision ID: 0005
Revises: 0004
"""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "kitsune_sessions",
        sa.Column("cookie", sa.Text(), nullable=False),
        sa.Column("token_id", sa.Text(), nullable=False),
        sa.Column("csrf", sa.Text(), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("ends_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["token_id"], ["kitsune_tokens.id"], name="fk_kitsune_sessions_token_id"),
        sa.PrimaryKeyConstraint("cookie", name="pk_kitsune_sessions"),
    )
    op.create_index("ix_kitsune_sessions_ends_at", "kitsune_sessions", ["ends_at"])


def downgrade() -> None:
    op.drop_table("kitsune_sessions")
