"""A list of runs can be sorted by label, verdict and the low end of the gain.

In offline mode (`alembic upgrade --sql`) older runs get no label and no low end, because both are computed from rows.

Revision ID: 0008
Revises: 0007
"""

import json
from typing import Any

import sqlalchemy as sa
from alembic import context, op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

_NEW = ("label", "gain_low", "verdict")


def upgrade() -> None:
    op.add_column("kitsune_runs", sa.Column("label", sa.Text(), server_default="", nullable=False))
    op.add_column("kitsune_runs", sa.Column("gain_low", sa.Double()))
    if not context.is_offline_mode():
        _tell(op.get_bind())
    op.drop_index("ix_kitsune_runs_team_workload_id", "kitsune_runs")
    for name in _NEW:
        op.create_index(f"ix_kitsune_runs_team_{name}_id", "kitsune_runs", ["team", name, "id"])


def downgrade() -> None:
    for name in _NEW:
        op.drop_index(f"ix_kitsune_runs_team_{name}_id", "kitsune_runs")
    op.create_index("ix_kitsune_runs_team_workload_id", "kitsune_runs", ["team", "workload", "id"])
    op.drop_column("kitsune_runs", "gain_low")
    op.drop_column("kitsune_runs", "label")


def _tell(connection: sa.Connection) -> None:
    found = connection.execute(sa.text("SELECT id, name, workload, archive, fingerprint, speedup FROM kitsune_runs"))
    told = [{"id": row.id, "label": _label(row).casefold(), "gain_low": _low(row.speedup)} for row in found]
    if told:
        connection.execute(sa.text("UPDATE kitsune_runs SET label = :label, gain_low = :gain_low WHERE id = :id"), told)


def _label(row: sa.Row[Any]) -> str:
    """The label of a run as this version showed it; unprintable characters are replaced."""
    text = row.name or row.workload
    if not row.name and text.startswith("zoo:"):
        name, _, options = text.removeprefix("zoo:").partition("?")
        text = f"{name} ({options.replace('&', ', ').replace('=', ' ')})" if options else name
    elif not row.name and text == "archive":
        text = f"a submitted model ({(row.archive or row.fingerprint)[:12]})"
    elif not row.name and text == "live":
        text = "a live model"
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)


def _low(speedup: str | None) -> float | None:
    return None if speedup is None else float(json.loads(speedup)["low"])
