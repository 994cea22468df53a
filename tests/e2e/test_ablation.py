"""A small model is tuned for real, and then it is measured for real what each choice of its plan gives."""

from dataclasses import replace
from functools import partial
from statistics import median

import pytest

from tests.unit.tuner.machine import only
from tuner.api import new_run
from tuner.measuring.child_process import Check
from tuner.measuring.crew import Children, Finished
from tuner.measuring.protocol import Inspection
from tuner.planning.ablation import ablation_of
from tuner.records import RunStatus, Source, Verdict
from tuner.store.engine import open_database
from tuner.store.queries import runs, trials
from tuner.tuning.run import ABLATION_ROUNDS, Tuning
from tuner.worker.run_execution import carry_out

#: A third of its step is the update of 62 tensors by AdamW, one after another; in one kernel that is a certain gain.
WORKLOAD = "zoo:resnet18?size=tiny&batch=1"
NARROW = only("layout=channels_last", "update=fused")


class Narrow(Children):
    """What does not compile takes seconds; the rest of the space is closed."""

    def finished(self, check: Check) -> Finished:
        done = super().finished(check)
        found = done.outcome
        if not isinstance(found, Inspection):
            return done
        narrow = found.model_copy(update={"inapplicable": {**NARROW, **found.inapplicable}})
        return replace(done, outcome=narrow)


@pytest.mark.minutes  # and on busy cores its gain is not certain
@pytest.mark.timeout(400)
def test_a_plan_that_was_tuned_is_taken_apart(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    run = new_run(WORKLOAD, "cpu", trials=2)
    with open_database(f"sqlite:///{tmp_path}/k.db") as database:
        with database.begin() as connection:
            runs.add(connection, run)
            claimed = runs.claim_one(connection, run.id, "here")
        make = partial(Tuning, spec=WORKLOAD, crew=Narrow)
        finished, conclusion = carry_out(database, claimed, make, lambda _: None)
        with database.read() as connection:
            tried = trials.list_of(connection, run.id)
    assert finished.status is RunStatus.FINISHED
    assert conclusion.verdict in (Verdict.SAME, Verdict.TOO_NOISY), "of the best stock configuration over itself"
    assert conclusion.plan.evidence.speedup_over_eager.low > 1
    assert conclusion.plan.knobs == {"layout": "channels_last", "update": "fused"}
    (trial,) = [trial for trial in tried if trial.source is Source.ABLATION]
    assert trial.failure is None
    arms = {arm.name: arm for arm in trial.measurement.arms}
    assert [(name, arm.applied) for name, arm in arms.items()] == [
        ("eager", ()),
        ("without layout", ("update=fused",)),
        ("without update", ("layout=channels_last",)),
        ("candidate", ("layout=channels_last", "update=fused")),
    ]
    assert {len(arm.step_ms) for arm in arms.values()} == {ABLATION_ROUNDS}
    assert trial.measurement.numerics is None, "what was proven is not proven again"

    found = ablation_of(conclusion.plan.knobs, tried, finished.inapplicable)
    layout, update = found.contributions
    assert update.saved_ms.low > 0, "one kernel is quicker than hundreds"
    pairs = zip(arms["without update"].step_ms, arms["candidate"].step_ms, strict=True)
    longer = median([slow_ms / plan_ms - 1 for slow_ms, plan_ms in pairs])
    assert found.plan_ms == median(arms["candidate"].step_ms)
    assert update.saved_ms.median == pytest.approx(longer * found.plan_ms)
    explained = layout.saved_ms.median + update.saved_ms.median + found.interaction_ms.median
    assert found.eager_ms - explained == pytest.approx(found.plan_ms)
    assert found.gain_ms.low > 0
    assert found.unmeasured == {}
