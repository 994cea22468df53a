"""Archives, tokens and submits; name, archive and request digest of a run.

Revision ID: 0002
Revises: 0001
"""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "kitsune_archives",
        sa.Column("sha256", sa.Text(), nullable=False),
        sa.Column("content", sa.LargeBinary(), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("fingerprint", sa.Text(), nullable=False),
        sa.Column("model_fingerprint", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("sha256", name="pk_kitsune_archives"),
    )
    op.create_index("ix_kitsune_archives_fingerprint", "kitsune_archives", ["fingerprint"])
    op.create_index("ix_kitsune_archives_model_fingerprint", "kitsune_archives", ["model_fingerprint"])

    op.create_table(
        "kitsune_tokens",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("digest", sa.Text(), nullable=False),
        sa.Column("scopes", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True)),
        sa.Column("revoked_at", sa.DateTime(timezone=True)),
        sa.PrimaryKeyConstraint("id", name="pk_kitsune_tokens"),
    )
    op.create_index("ix_kitsune_tokens_digest", "kitsune_tokens", ["digest"], unique=True)

    # No batch mode: SQLite would recreate the table, and refuse to drop the old one while trials refer to it.
    op.execute("ALTER TABLE kitsune_runs ADD COLUMN name TEXT DEFAULT '' NOT NULL")
    op.execute(
        "ALTER TABLE kitsune_runs ADD COLUMN archive TEXT "
        "CONSTRAINT fk_kitsune_runs_archive REFERENCES kitsune_archives (sha256)"
    )
    op.execute("ALTER TABLE kitsune_runs ADD COLUMN content TEXT")
    op.create_index("ix_kitsune_runs_archive", "kitsune_runs", ["archive"])
    op.create_index("ix_kitsune_runs_content", "kitsune_runs", ["content"])

    op.create_table(
        "kitsune_submits",
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("digest", sa.Text(), nullable=False),
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["kitsune_runs.id"], name="fk_kitsune_submits_run_id"),
        sa.PrimaryKeyConstraint("owner", "key", name="pk_kitsune_submits"),
    )


def downgrade() -> None:
    op.drop_table("kitsune_submits")
    for name in ("content", "archive"):
        op.drop_index(f"ix_kitsune_runs_{name}", "kitsune_runs")
    for name in ("content", "archive", "name"):
        op.execute(f"ALTER TABLE kitsune_runs DROP COLUMN {name}")
    op.drop_table("kitsune_tokens")
    op.drop_table("kitsune_archives")
