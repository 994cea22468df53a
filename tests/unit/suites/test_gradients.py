"""Suite gradients: it names the gradient that is wrong."""

from pathlib import Path
from statistics import fmean

import pytest

from benchmarks.gradients import measured
from tests.unit.tuner import faulty_steps


@pytest.mark.parametrize("double", [True, False])
def test_a_gradient_that_is_one_percent_too_large_comes_first(double):
    workload = f"{Path(faulty_steps.__file__)}:gradient_too_large"
    first, *others = measured(workload, {"layout": "channels_last"}, 3, 0, double=double)
    assert first["parameter"] == "conv2.weight"
    assert len(first["shares"]["plan"]) == len(first["errors"]["eager"]) == 3
    assert fmean(first["shares"]["plan"]) == pytest.approx(0.01, rel=1e-2)
    assert abs(fmean(first["shares"]["eager"])) < 1e-4
    assert all(abs(fmean(each["shares"]["plan"])) < 1e-4 for each in others)
