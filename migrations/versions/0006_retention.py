"""Deleting runs and archives: the models of steps are stored apart from archives; indexes of referring columns.

Revision ID: 0006
Revises: 0005
"""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

_INDEXES = {"plans": "created_at", "runs": "plan_id", "submits": "run_id"}


def upgrade() -> None:
    op.create_table(
        "kitsune_models",
        sa.Column("team", sa.Text(), nullable=False),
        sa.Column("fingerprint", sa.Text(), nullable=False),
        sa.Column("model_fingerprint", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("team", "fingerprint", "model_fingerprint", name="pk_kitsune_models"),
    )
    op.create_index("ix_kitsune_models_model_fingerprint", "kitsune_models", ["model_fingerprint"])
    op.execute(
        "INSERT INTO kitsune_models (team, fingerprint, model_fingerprint) "
        "SELECT DISTINCT kitsune_archive_owners.team, fingerprint, model_fingerprint FROM kitsune_archives "
        "JOIN kitsune_archive_owners ON kitsune_archive_owners.sha256 = kitsune_archives.sha256"
    )
    for column in (
        sa.Column("size_bytes", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("sent_at", sa.DateTime(timezone=True)),
    ):
        op.add_column("kitsune_archive_owners", column)
    op.execute(
        "UPDATE kitsune_archive_owners SET sent_at = created_at, size_bytes = (SELECT size_bytes FROM kitsune_archives "
        "WHERE kitsune_archives.sha256 = kitsune_archive_owners.sha256)"
    )
    for name in ("fingerprint", "model_fingerprint"):
        op.drop_index(f"ix_kitsune_archives_{name}", "kitsune_archives")
    for table, column in _INDEXES.items():
        op.create_index(f"ix_kitsune_{table}_{column}", f"kitsune_{table}", [column])


def downgrade() -> None:
    for table, column in _INDEXES.items():
        op.drop_index(f"ix_kitsune_{table}_{column}", f"kitsune_{table}")
    for name in ("fingerprint", "model_fingerprint"):
        op.create_index(f"ix_kitsune_archives_{name}", "kitsune_archives", [name])
    for name in ("sent_at", "size_bytes"):
        op.drop_column("kitsune_archive_owners", name)
    op.drop_table("kitsune_models")
