"""New verdicts of runs, trials and plans: "ambiguous" and "too_noisy".

No table changes: verdicts are text without a constraint. The revision prevents older programs, which would fail on the
first row with a new verdict, from opening the database.

Revision ID: 0010
Revises: 0009
"""

from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Existing rows keep their verdicts."""


def downgrade() -> None:
    """Maps the new verdicts to old ones: "too_noisy" to "ambiguous"; in plans, which had neither, both to "same"."""
    for table in ("runs", "trials"):
        op.execute(f"UPDATE kitsune_{table} SET verdict = 'ambiguous' WHERE verdict = 'too_noisy'")  # noqa: S608
    op.execute("UPDATE kitsune_plans SET verdict = 'same' WHERE verdict IN ('ambiguous', 'too_noisy')")
