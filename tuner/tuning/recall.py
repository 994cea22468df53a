"""The store and a first look at a step in, what earlier runs tell of it out."""

from sqlalchemy import Connection

from kitsune.plan import Evidence, Match, Plan
from tuner.measuring.protocol import Inspection
from tuner.planning.prior_runs import Knowledge, Proven
from tuner.planning.standings import unrefused
from tuner.records import Run, RunStatus, Verdict
from tuner.search.outcomes import best, best_stock
from tuner.statistics.plan_evidence import prior_of
from tuner.store.queries import known, plans, runs, trials

WINNERS = 3  # that are tried first
DECIDED = (Verdict.FASTER, Verdict.SAME)
SUGGESTED_ALIKE = 1.5  # a suggested budget is met by an earlier one that is no more than so many times smaller


def knowledge_of(connection: Connection, run: Run, found: Inspection, budget_s: float | None) -> Knowledge:
    """Of the runs of this team, on this model of GPU. `budget_s`: what the run has, asked for or suggested."""
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
    return Knowledge(winners, proven_before(connection, run, found, budget_s))


def proven_before(connection: Connection, run: Run, found: Inspection, budget_s: float | None) -> Proven | None:
    """Of this very step, in an equal environment, what a run came to that had at least the time of this one.

    A run that only measured again what an earlier one had found has no trials of its own, and is passed over; so is one
    that was left open, which to measure again decides nothing, and one whose search the user ended.
    """
    for plan in plans.find(connection, found.fingerprint, found.environment, team=run.team, batch=found.batch):
        evidence = plan.evidence
        if evidence is None or evidence.verdict not in DECIDED or evidence.interrupted or not is_of(plan, found):
            continue
        earlier = runs.get(connection, evidence.run_id)
        if earlier is None or earlier.id == run.id or not is_as_long(earlier, evidence, run, budget_s):
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


def is_as_long(earlier: Run, evidence: Evidence, run: Run, budget_s: float | None) -> bool:
    """Whether the earlier run has ended, and was given as much as this one, in time and in trials.

    A budget that was suggested differs a little from one look at the step to the next.
    """
    if earlier.status is not RunStatus.FINISHED:
        return False
    had_s = evidence.budget_s if earlier.budget_s is None else earlier.budget_s
    asked_s = budget_s if budget_s is None or run.budget_s is not None else budget_s / SUGGESTED_ALIKE
    is_unknown = had_s is None and earlier.budget_trials is None
    pairs = ((had_s, asked_s), (earlier.budget_trials, run.budget_trials))
    return not is_unknown and all(had is None or (asked is not None and had >= asked) for had, asked in pairs)
