"""Winning configurations of earlier runs on the same GPU model, to be tried first in a new run.

Most similar first: plans of the same step, with the same batch before others; plans of the same model and optimizer
with another loss; plans of other models. These are ordered by how many inapplicable choices differ, since that is what
the inspection knows of an architecture: a convolution, attention, a half-precision dtype, a hook, an optimizer. Ties
are ordered by how often a configuration won.
"""

import json
from collections import Counter
from collections.abc import Collection
from typing import Any, Final

from sqlalchemy import Connection, Row, Select, and_, or_, select

from kitsune.knobs import Choice
from tuner.store import tables
from tuner.store.queries import plans

NEWEST: Final = 200  # number of plans that are considered
UNKNOWN: Final = 1_000  # distance to a run that is no longer stored


def winners(
    connection: Connection,
    *,
    fingerprint: str,
    model_fingerprint: str,
    gpu: str,
    limit: int,
    team: str | None = None,
    batch: str = "",
    inapplicable: Collection[str] = (),
) -> list[dict[str, Choice]]:
    """The distinct choices of at most `limit` stored plans for this GPU model, most similar step first.

    `team`: only plans of this team; None means all, as on a single-user machine. `batch` is as in `Plan.batch`,
    `inapplicable` the names in `Run.inapplicable`. Plans that keep the step as given are left out.
    """
    own = _of_model(connection, fingerprint, model_fingerprint, gpu, team)
    rows = {row.plan_id: row for row in (*own, *_of_gpu(connection, gpu, team))}
    stored = plans.get_readable(connection, list(rows), team=team)
    counts = Counter(plan.knobs for plan in stored.values())
    of_model = {row.plan_id for row in own}

    def rank(plan_id: str) -> tuple[int, int, int]:
        plan = stored[plan_id]
        if plan.fingerprint == fingerprint:
            return int(plan.batch != batch), 0, 0
        if plan_id in of_model or (model_fingerprint and plan.is_of(model_fingerprint)):
            return 2, 0, 0
        return 3, _distance(rows[plan_id].inapplicable, inapplicable), -counts[plan.knobs]

    nearest = [dict(stored[plan_id].knobs) for plan_id in sorted((each for each in rows if each in stored), key=rank)]
    return [knobs for place, knobs in enumerate(nearest) if knobs and knobs not in nearest[:place]][:limit]


def _of_model(
    connection: Connection, fingerprint: str, model_fingerprint: str, gpu: str, team: str | None
) -> list[Row[Any]]:
    """Plans of this step or model, largest gain first. `model_fingerprint` may be empty."""
    models = tables.models
    steps = select(models.c.fingerprint).where(
        models.c.model_fingerprint == model_fingerprint,
        models.c.model_fingerprint != "",
        *tables.of_team(models, team),
    )
    found = tables.plans.c.fingerprint
    statement = _plans_on(gpu, team).where(or_(found == fingerprint, found.in_(steps)), found != "")
    ordered = statement.order_by(tables.plans.c.speedup_over_eager.desc().nulls_last(), *_NEWEST_FIRST)
    return list(connection.execute(ordered.limit(NEWEST)))


def _of_gpu(connection: Connection, gpu: str, team: str | None) -> list[Row[Any]]:
    """Plans of any step, newest first."""
    return list(connection.execute(_plans_on(gpu, team).order_by(*_NEWEST_FIRST).limit(NEWEST)))


_NEWEST_FIRST = (tables.plans.c.created_at.desc(), tables.plans.c.plan_id)


def _plans_on(gpu: str, team: str | None) -> Select[Any]:
    found, runs = tables.plans.c, tables.runs
    made_by = and_(runs.c.id == found.run_id, runs.c.team == found.team)
    return (
        select(found.plan_id, runs.c.inapplicable)
        .select_from(tables.plans.outerjoin(runs, made_by))
        .where(found.gpu == gpu, *tables.of_team(tables.plans, team))
    )


def _distance(theirs: str | None, ours: Collection[str]) -> int:
    """How many choices apply to only one of two steps."""
    return UNKNOWN if theirs is None else len(set(json.loads(theirs)) ^ set(ours))
