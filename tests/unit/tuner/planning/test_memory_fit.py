"""Which processes of a confirmation fit into GPU memory side by side: cases from runs on H100s, in bytes."""

import pytest

from tests.unit.tuner.planning.test_pace import inspection
from tuner.measuring.protocol import ArmSpec, Job
from tuner.planning.memory_fit import MemoryFit
from tuner.statistics.plan_evidence import CANDIDATE, EAGER, STOCK

GB = 10**9
H100 = 85 * GB


def job(*names: str, kind: str = "measure") -> Job:
    return Job(workload="w", device="cuda:0", kind=kind, arms=tuple(ArmSpec(name=name) for name in names))


PROOF = job(EAGER, CANDIDATE, kind="prove")
WITH, WITHOUT = job(EAGER, STOCK, CANDIDATE), job(STOCK, CANDIDATE)


def fit_of(eager_gb: float, stock_gb: float, candidate_gb: float, *, is_random: bool = False) -> MemoryFit:
    peaks = {EAGER: eager_gb, STOCK: stock_gb, CANDIDATE: candidate_gb}
    return MemoryFit(H100, {name: int(gb * GB) for name, gb in peaks.items()}, 1.75 + is_random)


LLAMA, GPT2, NANOGPT = fit_of(11.15, 6.31, 6.07), fit_of(6.57, 4.42, 4.68, is_random=True), fit_of(16.3, 7.9, 9.1)


def test_what_ran_out_of_memory_is_not_begun_together():
    assert not LLAMA.fits(WITH, [PROOF, WITH])
    assert not NANOGPT.fits(WITHOUT, [PROOF, WITH])


@pytest.mark.parametrize("found", [LLAMA, GPT2, NANOGPT])
def test_the_long_look_fits_beside_one_that_is_timed(found):
    assert found.fits(WITH, [PROOF])


def test_more_fit_without_the_step_as_given():
    assert LLAMA.fits(WITHOUT, [PROOF, WITH])
    assert NANOGPT.fits(WITHOUT, [WITHOUT, WITH])
    assert not NANOGPT.fits(WITH, [WITH, WITHOUT])
    assert GPT2.fits(WITHOUT, [PROOF, WITH, WITH])


def test_dropout_is_looked_at_with_more():
    alike = fit_of(6.57, 4.42, 4.68)
    beside = [PROOF, WITH, WITH, WITHOUT]
    assert alike.fits(WITHOUT, beside)
    assert not GPT2.fits(WITHOUT, beside)


def test_on_a_cpu_memory_is_not_counted():
    found = inspection("cpu", 1, 10 * GB)
    assert MemoryFit.of(found, None, None).fits(WITH, [WITH] * 10)
    assert not MemoryFit.of(inspection("cuda", 1, 10 * GB), None, None).fits(WITH, [])
