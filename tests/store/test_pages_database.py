"""The database of benchmarks/pages_load.py: what is copied in it reads as what was stored one by one."""

from benchmarks.pages_database import GPUS, MODELS, TRIALS, fill
from tuner.records import RunStatus
from tuner.store.database import Database
from tuner.store.queries import plans, runs, trials


def test_every_run_has_its_trials_and_its_plan(database: Database) -> None:
    number = 2 * len(MODELS) * len(GPUS)
    ended = fill(database, number, queued=3)
    with database.read() as connection:
        counts = runs.count(connection)
        assert (sum(counts.values()), counts[RunStatus.QUEUED]) == (number + 3, 3)
        first, *others = (trials.list_of(connection, run.id) for run in ended)
        assert [trial.number for trial in first] == [*range(TRIALS)]
        for run, copied in zip(ended[1:], others, strict=True):
            assert copied == [trial.model_copy(update={"run_id": run.id}) for trial in first]
        planned = [run for run in ended if run.plan_id is not None]
        readable = plans.get_readable(connection, [str(run.plan_id) for run in planned])
        assert {run.plan_id: run.id for run in planned} == {
            plan.plan_id: plan.evidence.run_id for plan in readable.values() if plan.evidence
        }
