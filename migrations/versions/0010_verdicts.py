"""Verdicts that noise hides: runs, trials and plans may say "ambiguous" and "too_noisy".

No table changes: verdicts are text without a constraint. The revision keeps programs that do not know the new words,
and would fail on the first row with one of them, from opening the database.

Revision ID: 0010
Revises: 0009
"""

from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Rows of before keep what was said of them."""


def downgrade() -> None:
    """What was too noisy to tell is undecided in the words of before; no plan of before said either."""
    for table in ("runs", "trials"):
        op.execute(f"UPDATE kitsune_{table} SET verdict = 'ambiguous' WHERE verdict = 'too_noisy'")  # noqa: S608
    op.execute("UPDATE kitsune_plans SET verdict = 'same' WHERE verdict IN ('ambiguous', 'too_noisy')")
