"""Plans: content-addressed by plan_id, written once, found by workload and machine.

A workload is identified by the fingerprint of its step, or by the `model_fingerprint` of an archive that was sent. The
latter finds plans for the model and optimizer with any loss, even after the archive was deleted.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import (
    BindParameter,
    ColumnElement,
    Connection,
    Integer,
    Row,
    Select,
    and_,
    bindparam,
    case,
    delete,
    exists,
    func,
    or_,
    select,
    union_all,
)

from kitsune.base.digest import digest_of
from kitsune.errors import PlanError
from kitsune.plan import Environment, Plan
from tuner.records import DEFAULT_TEAM, Run
from tuner.store import tables
from tuner.store.insert_once import insert_once
from tuner.store.lease import insert_if_held
from tuner.store.rows import to_row
from tuner.wall_clock import utcnow

_log = logging.getLogger(__name__)
_plans = tables.plans

#: The columns that must be equal for an exact match of the machine (see Environment.match).
_EXACT = ("compute_capability", "memory_bytes", "torch", "triton", "cuda", "driver")
#: Search columns that copy fields of the plan's document, and of its environment.
_OF_PLAN = ("fingerprint", "batch")
_OF_ENVIRONMENT = ("device", "gpu", *_EXACT)
#: Extra rows to read when one of the found plans is damaged.
_IN_RESERVE = 20


class PlansVersion(NamedTuple):
    """A version stamp of all plans: while it is unchanged, every search has the same result.

    A plan that replaces a deleted one is newer. Rows of `models` are never deleted.
    """

    plans: int
    models: int
    newest: datetime | None


class StoredPlan(NamedTuple):
    """The stored text of a plan, with the columns of its workload and machine."""

    plan_id: str
    fingerprint: str
    batch: str
    device: str
    gpu: str
    compute_capability: str
    memory_bytes: int
    torch: str
    triton: str
    cuda: str
    driver: str
    document: str


def _given(name: str) -> BindParameter[Any]:
    return bindparam(name, type_=_plans.c[name].type)


def _agrees(name: str) -> ColumnElement[bool]:
    """Whether the column equals the given value, or no value is given."""
    return or_(_given(name).is_(None), _plans.c[name] == _given(name))


def _best_first() -> Select[Any]:
    """The statement of all searches, built once because building it took longer than running it."""
    models = tables.models
    named = union_all(
        select(_given("fingerprint")),
        select(models.c.fingerprint).where(
            models.c.model_fingerprint == _given("fingerprint"),
            or_(_given("team").is_(None), models.c.team == _given("team")),
        ),
    )
    is_exact = and_(*(_agrees(name) for name in _EXACT))
    is_of_this_size = or_(_agrees("batch"), _plans.c.batch == "")
    is_near = and_(_agrees("torch"), _agrees("triton"))
    return (
        select(*(_plans.c[name] for name in StoredPlan._fields))
        .where(
            _plans.c.fingerprint.in_(named),
            _plans.c.gpu.is_not(None),  # a plan made by hand names no machine
            _agrees("team"),
            _agrees("device"),
            _agrees("gpu"),
        )
        .order_by(
            case((is_of_this_size, 1), else_=0).desc(),
            case((is_exact, 2), (is_near, 1), else_=0).desc(),
            _plans.c.speedup_over_eager.desc().nulls_last(),
            _plans.c.created_at.desc(),
            _plans.c.plan_id,
        )
        .limit(bindparam("limit", type_=Integer))
    )


_BEST_FIRST = _best_first()
_DOCUMENT = select(_plans.c.document).where(_plans.c.plan_id == bindparam("plan_id"), _agrees("team"))
_EXTENT = select(
    *(select(func.count()).select_from(table).scalar_subquery() for table in (_plans, tables.models)),
    select(func.max(_plans.c.created_at)).scalar_subquery(),
)


def put(connection: Connection, plan: Plan, run: Run | None = None, *, now: datetime | None = None) -> bool:
    """Stores the plan unless it exists (then False). Plans never change.

    `run` is the claim under which a worker writes; its team owns the plan. Raises LeaseLostError when the claim no
    longer holds. None: the plan is not from a run, but from a file, for example.
    """
    row = _to_row(plan, run.team if run else DEFAULT_TEAM, now or utcnow())
    return insert_once(connection, _plans, row) if run is None else insert_if_held(connection, run, _plans, row)


def get(connection: Connection, plan_id: str, *, team: str | None = None) -> Plan | None:
    """The plan if this team owns it; `team` None means any team.

    Raises PlanError when the stored plan was altered.
    """
    is_asked = and_(_plans.c.plan_id == plan_id, *tables.of_team(_plans, team))
    row = connection.execute(select(_plans).where(is_asked)).one_or_none()
    return None if row is None else _from_row(row)


def get_readable(connection: Connection, plan_ids: Sequence[str], *, team: str | None = None) -> dict[str, Plan]:
    """Like `get` for several plans: id -> plan. Missing and unreadable plans are left out."""
    rows = connection.execute(select(_plans).where(_plans.c.plan_id.in_(plan_ids), *tables.of_team(_plans, team)))
    return {row.plan_id: plan for row in rows if (plan := _readable(row)) is not None}


def get_document(connection: Connection, plan_id: str, *, team: str | None = None) -> str | None:
    """The stored canonical JSON of a plan, without parsing it. Raises PlanError when it was altered."""
    found: str | None = connection.scalar(_DOCUMENT, {"plan_id": plan_id, "team": team})
    if found is not None:
        _check_text(plan_id, found)
    return found


def delete_of(connection: Connection, plan_ids: Sequence[str]) -> int:
    """Deletes those of these plans that no run refers to; returns how many."""
    is_had = exists().where(tables.runs.c.plan_id == _plans.c.plan_id)
    gone = delete(_plans).where(_plans.c.plan_id.in_(plan_ids), ~is_had).returning(_plans.c.plan_id)
    return len(connection.execute(gone).all())


def extent(connection: Connection) -> PlansVersion:
    return PlansVersion._make(connection.execute(_EXTENT).one())


def find(
    connection: Connection,
    fingerprint: str,
    environment: Environment,
    *,
    team: str | None = None,
    batch: str | None = None,
    limit: int = 20,
) -> list[Plan]:
    """Plans of a workload for this type of device, best first.

    Sorted by: measured with `batch` (Plan.batch) before other sizes; exactly this environment, then the same torch and
    triton, then the rest; the gain over the step as given, a baseline that is the same in every run; newest first.
    Plans that this version cannot read are left out with a warning.
    """
    software = {name: getattr(environment, name) for name in _EXACT}
    rows = _found(connection, fingerprint, team, batch, environment.device, environment.gpu, software, limit)
    return [plan for plan in map(_readable, rows) if plan is not None]


def find_documents(
    connection: Connection,
    fingerprint: str,
    *,
    team: str | None = None,
    batch: str | None = None,
    device: str | None = None,
    gpu: str | None = None,
    software: Mapping[str, str | int] | None = None,
    limit: int = 20,
) -> list[StoredPlan]:
    """Like `find`, without parsing the plans. None means any batch, device or GPU.

    `software`: the known ones of compute_capability, memory_bytes, torch, triton, cuda and driver.
    """

    def sound(most: int) -> tuple[int, list[StoredPlan]]:
        rows = _found(connection, fingerprint, team, batch, device, gpu, software or {}, most)
        return len(rows), [StoredPlan._make(row) for row in rows if _is_sound(row)]

    number, plans = sound(limit)
    return plans if len(plans) == number else sound(limit + _IN_RESERVE)[1][:limit]


def _found(
    connection: Connection,
    fingerprint: str,
    team: str | None,
    batch: str | None,
    device: str | None,
    gpu: str | None,
    software: Mapping[str, str | int],
    limit: int,
) -> Sequence[Row[Any]]:
    machine = {"device": device, "gpu": gpu, **{name: software.get(name) for name in _EXACT}}
    asked = {"fingerprint": fingerprint, "team": team, "batch": batch, **machine, "limit": limit}
    return connection.execute(_BEST_FIRST, asked).all()


def _to_row(plan: Plan, team: str, now: datetime) -> dict[str, Any]:
    machine = to_row(plan.environment) if plan.environment else {}
    evidence = plan.evidence
    return {
        "plan_id": plan.plan_id,
        "team": team,
        "fingerprint": plan.fingerprint,
        "batch": plan.batch,
        **{name: machine.get(name) for name in _OF_ENVIRONMENT},
        "run_id": evidence.run_id if evidence else None,
        "verdict": evidence.verdict if evidence else None,
        "speedup": evidence.speedup.median if evidence else None,
        "speedup_over_eager": evidence.speedup_over_eager.median if evidence else None,
        "created_at": now,
        "document": plan,
    }


def _check_text(plan_id: str, document: str) -> None:
    """Raises PlanError unless the text has this digest. Even equivalent JSON counts as damage."""
    if digest_of(document) != plan_id:
        raise PlanError("plan", f"{plan_id} was altered after it was written; restore the database from a backup")


def _is_sound(row: Row[Any]) -> bool:
    """Whether the plan's text is unaltered and the search columns agree with it."""
    try:
        _check_text(row.plan_id, row.document)
    except PlanError as error:
        _log.warning("plan %s is left out: %s", row.plan_id, error)
        return False
    content = json.loads(row.document)
    environment = content["environment"] or {}
    said = {name: content[name] for name in _OF_PLAN} | {name: environment.get(name) for name in _OF_ENVIRONMENT}
    wrong = [name for name, value in said.items() if getattr(row, name) != value]
    if wrong:
        _log.warning("plan %s is left out: these columns differ from its document: %s", row.plan_id, ", ".join(wrong))
    return not wrong


def _from_row(row: Row[Any]) -> Plan:
    _check_text(row.plan_id, row.document)
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
