"""Loads results of earlier runs that help a new run: winning configurations, and a plan of the same step."""

from sqlalchemy import Connection

from kitsune.plan import Evidence, Match, Plan
from tuner.measuring.protocol import Inspection
from tuner.planning.prior_runs import Knowledge, Proven
from tuner.planning.standings import unrefused
from tuner.records import Run, RunStatus, Verdict
from tuner.search.outcomes import best, best_stock
from tuner.statistics.plan_evidence import prior_of
from tuner.store.queries import known, plans, runs, trials

WINNERS = 3  # earlier winners that are tried first
DECIDED = (Verdict.FASTER, Verdict.SAME)
SUGGESTED_ALIKE = 1.5  # an earlier budget may be smaller than a suggested one by at most this factor


def knowledge_of(connection: Connection, run: Run, found: Inspection, budget_s: float | None) -> Knowledge:
    """What earlier runs of this team found on this GPU model. `budget_s`: the run's budget, given or suggested."""
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
    """The result of an earlier run of the same step in an equal environment, with at least the budget of this run.

    Skipped are runs that only repeated an earlier plan and so have no search trials, runs without a decided verdict,
    which another measurement would not decide, and runs whose search the user interrupted.
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
    """Whether the plan was made for the same step, with an equal torch, driver and GPU."""
    is_equal = plan.fingerprint == found.fingerprint and plan.batch == found.batch
    return is_equal and plan.environment is not None and plan.environment.match(found.environment)[0] is Match.EXACT


def is_as_long(earlier: Run, evidence: Evidence, run: Run, budget_s: float | None) -> bool:
    """Whether the earlier run has finished, with the same memory limit and at least the budget in time and in trials.

    A suggested budget may be up to `SUGGESTED_ALIKE` times larger, because it varies between inspections.
    """
    if earlier.status is not RunStatus.FINISHED or earlier.memory_limit_bytes != run.memory_limit_bytes:
        return False
    had_s = evidence.budget_s if earlier.budget_s is None else earlier.budget_s
    asked_s = budget_s if budget_s is None or run.budget_s is not None else budget_s / SUGGESTED_ALIKE
    is_unknown = had_s is None and earlier.budget_trials is None
    pairs = ((had_s, asked_s), (earlier.budget_trials, run.budget_trials))
    return not is_unknown and all(had is None or (asked is not None and had >= asked) for had, asked in pairs)
