"""The store and a first look at a step in, what earlier runs tell of it out."""

from sqlalchemy import Connection

from kitsune.plan import Match, Plan
from tuner.knowledge import Knowledge
from tuner.protocol import Inspection
from tuner.records import Run, RunStatus
from tuner.store import known, plans, runs
from tuner.verdicts import prior_of

WINNERS = 3  # that are tried first


def knowledge_of(connection: Connection, run: Run, found: Inspection) -> Knowledge:
    """Of the runs of this team, on this model of GPU."""
    winners = known.winners(
        connection,
        fingerprint=found.fingerprint,
        model_fingerprint=found.model_fingerprint,
        gpu=found.environment.gpu,
        limit=WINNERS,
        team=run.team,
        batch=found.batch,
        inapplicable=found.inapplicable,
    )
    plan = proven_before(connection, run, found)
    if plan is None or plan.evidence is None:
        return Knowledge(winners)
    return Knowledge(winners, plan.knobs, prior_of(plan.evidence), plan.evidence.proof)


def proven_before(connection: Connection, run: Run, found: Inspection) -> Plan | None:
    """The best plan of this very step, in an equal environment, of a run that had at least the time of this one."""
    for plan in plans.find(connection, found.fingerprint, found.environment, team=run.team, batch=found.batch):
        is_equal = (
            plan.fingerprint == found.fingerprint
            and plan.batch == found.batch
            and plan.environment is not None
            and plan.environment.match(found.environment)[0] is Match.EXACT
        )
        earlier = runs.get(connection, plan.evidence.run_id) if is_equal and plan.evidence is not None else None
        if earlier is not None and earlier.id != run.id and is_as_long(earlier, run):
            return plan
    return None


def is_as_long(earlier: Run, run: Run) -> bool:
    """Whether the earlier run has ended, and was given as much as this one, in time or in trials."""
    if earlier.status is not RunStatus.FINISHED:
        return False
    pairs = ((earlier.budget_s, run.budget_s), (earlier.budget_trials, run.budget_trials))
    return all(had is None if asked is None else had is None or had >= asked for had, asked in pairs)
