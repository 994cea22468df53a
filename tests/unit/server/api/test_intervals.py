"""A plan that is its own baseline has no measured interval: exports and comparisons show none."""

import csv
import io

import pytest

from kitsune.plan import Interval
from server.api.compare import Side, compare
from tests.store.samples import a_plan, a_run, a_trial, an_environment
from tuner.records import Arm, Comparison, Measurement, Verdict
from tuner.store.queries import runs, trials

ITSELF = Interval(median=1, low=1, high=1)
MEASURED = Interval(median=1.5, low=1.4, high=1.6)


def test_runs_side_by_side_have_no_interval_of_nothing():
    rows = {row.name: row.values for row in compare([Side(a_run(speedup=s), None) for s in (ITSELF, MEASURED)]).rows}
    assert (rows["gain"], rows["gain_low"], rows["gain_high"]) == ((1, 1.5), (None, 1.4), (None, 1.6))


@pytest.mark.parametrize(("gain", "cells"), [(ITSELF, ["1.0", "", ""]), (MEASURED, ["1.5", "1.4", "1.6"])])
def test_a_file_of_samples_has_no_interval_of_nothing(client, database, gain, cells):
    arm = Arm(name="eager", knobs={}, step_ms=(1.0, 2.0), peak_bytes=7, first_step_s=1)
    measurement = Measurement(arms=(arm,), steps_per_block=(1,), environment=an_environment())
    found = Comparison(speedup=gain, p_value=1, verdict=Verdict.AMBIGUOUS, blocks=2)
    with database.begin() as connection:
        run = runs.add(connection, a_run())
        claimed = runs.claim_one(connection, run.id, "w")
        trials.add(connection, claimed, a_trial(run, 0, failure=None, measurement=measurement, comparison=found))
        runs.finish(connection, claimed, plan=a_plan())
    rows = list(csv.DictReader(io.StringIO(client.get(f"/api/v1/runs/{run.id}/export?format=csv").text, newline="")))
    assert len(rows) == 2
    assert [rows[0][name] for name in ("speedup", "speedup_low", "speedup_high")] == cells
