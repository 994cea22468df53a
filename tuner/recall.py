"""The store and a first look at a step in, what earlier runs tell of it out."""

from sqlalchemy import Connection

from kitsune.plan import Match, Plan
from tuner.knowledge import Knowledge, Proven
from tuner.outcomes import best, best_stock
from tuner.protocol import Inspection
from tuner.records import Run, RunStatus, Verdict
from tuner.standings import unrefused
from tuner.store import known, plans, runs, trials
from tuner.verdicts import prior_of

WINNERS = 3  # that are tried first
DECIDED = (Verdict.FASTER, Verdict.SAME)


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
    return Knowledge(winners, proven_before(connection, run, found))


def proven_before(connection: Connection, run: Run, found: Inspection) -> Proven | None:
    """Of this very step, in an equal environment, what a run came to that had at least the time of this one.

    A run that only measured again what an earlier one had found has no trials of its own, and is passed over; so is one
    that was left open, which to measure again decides nothing.
    """
    for plan in plans.find(connection, found.fingerprint, found.environment, team=run.team, batch=found.batch):
        evidence = plan.evidence
        if evidence is None or evidence.verdict not in DECIDED or not is_of(plan, found):
            continue
        earlier = runs.get(connection, evidence.run_id)
        if earlier is None or earlier.id == run.id or not is_as_long(earlier, run):
            continue
        left = unrefused(trials.list_of(connection, earlier.id))
        first = best(trial for trial in left if trial.knobs == plan.knobs)
        if first is not None:
            return Proven(earlier.id, first, best_stock(left), prior_of(evidence), evidence.proof)
    return None


def is_of(plan: Plan, found: Inspection) -> bool:
    """Whether it was made for this very step, with an equal torch, driver and GPU."""
    is_equal = plan.fingerprint == found.fingerprint and plan.batch == found.batch
    return is_equal and plan.environment is not None and plan.environment.match(found.environment)[0] is Match.EXACT


def is_as_long(earlier: Run, run: Run) -> bool:
    """Whether the earlier run has ended, and was given as much as this one, in time or in trials."""
    if earlier.status is not RunStatus.FINISHED:
        return False
    pairs = ((earlier.budget_s, run.budget_s), (earlier.budget_trials, run.budget_trials))
    return all(had is None if asked is None else had is None or had >= asked for had, asked in pairs)
