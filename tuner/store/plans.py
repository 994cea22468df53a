"""Plans: content-addressed by plan_id, written once, found by workload and machine."""

import json
import logging
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Row, and_, case, literal, select

from kitsune.errors import PlanError
from kitsune.plan import Environment, Plan
from tuner.records import Run
from tuner.store import tables
from tuner.store.lease import insert_if_held, insert_new
from tuner.store.rows import to_row, utcnow

_log = logging.getLogger(__name__)
_plans = tables.plans

#: The columns that tell a plan for exactly this machine from one for its like (see Environment.match).
_EXACT = ("compute_capability", "memory_bytes", "torch", "triton", "cuda", "driver")


def put(connection: Connection, plan: Plan, run: Run | None = None, *, now: datetime | None = None) -> bool:
    """Stores the plan unless it is there already (then False): a plan never changes once written.

    `run` is the claim under which a worker writes: LeaseLostError when it no longer holds. Without it the plan comes
    from outside, such as from a file.
    """
    row = _to_row(plan, now or utcnow())
    if run is not None:
        return insert_if_held(connection, run, _plans, row)
    values = select(*(literal(value, _plans.c[name].type) for name, value in row.items())).where(literal(1) == 1)
    return insert_new(connection, _plans, list(row), values)


def get(connection: Connection, plan_id: str) -> Plan | None:
    """Raises PlanError when the stored plan is not what was written under this id."""
    row = connection.execute(select(_plans).where(_plans.c.plan_id == plan_id)).one_or_none()
    return None if row is None else _from_row(row)


def find(connection: Connection, fingerprint: str, environment: Environment, *, limit: int = 20) -> list[Plan]:
    """Plans of a workload for this type of device, best first.

    Those of exactly this environment come before those of the same torch and triton, these before the rest; among
    equals the largest measured gain over the step as given comes first (that baseline is the same in every run), then
    the newest. Plans that this version cannot read are left out with a warning.
    """
    same = {name: _plans.c[name] == getattr(environment, name) for name in _EXACT}
    nearness = case((and_(*same.values()), 2), (and_(same["torch"], same["triton"]), 1), else_=0)
    statement = (
        select(_plans)
        .where(
            _plans.c.fingerprint == fingerprint,
            _plans.c.device == environment.device,
            _plans.c.gpu == environment.gpu,
        )
        .order_by(
            nearness.desc(),
            _plans.c.speedup_over_eager.desc().nulls_last(),
            _plans.c.created_at.desc(),
            _plans.c.plan_id,
        )
        .limit(limit)
    )
    found = (_readable(row) for row in connection.execute(statement))
    return [plan for plan in found if plan is not None]


def _to_row(plan: Plan, now: datetime) -> dict[str, Any]:
    machine = to_row(plan.environment) if plan.environment else {}
    evidence = plan.evidence
    return {
        "plan_id": plan.plan_id,
        "fingerprint": plan.fingerprint,
        **{name: machine.get(name) for name in ("device", "gpu", *_EXACT)},
        "run_id": evidence.run_id if evidence else None,
        "verdict": evidence.verdict if evidence else None,
        "speedup": evidence.speedup.median if evidence else None,
        "speedup_over_eager": evidence.speedup_over_eager.median if evidence else None,
        "created_at": now,
        "document": plan,
    }


def _from_row(row: Row[Any]) -> Plan:
    try:
        content = json.loads(row.document)
    except (ValueError, RecursionError) as error:
        raise PlanError("plan", f"{row.plan_id} is stored as something that is not JSON") from error
    return Plan.from_json({**content, "plan_id": row.plan_id} if isinstance(content, dict) else content)


def _readable(row: Row[Any]) -> Plan | None:
    try:
        return _from_row(row)
    except PlanError as error:
        _log.warning("plan %s is left out: %s", row.plan_id, error)
        return None
