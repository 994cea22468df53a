"""Processes that measure what `kitsune doctor --measure` has planted."""

import subprocess
import sys

import pytest

from kitsune.errors import MeasureError, UnfitError
from tuner.timing import checkup
from tuner.timing.checkup import PLANTED, STEP


def test_a_measuring_process_that_fails_says_why(monkeypatch):
    with pytest.raises(UnfitError, match=r"ended with code 1: .*is not a device"):
        checkup.measure("abacus", 0)
    monkeypatch.setattr(checkup, "TIMEOUT_S", 0.01)
    with pytest.raises(UnfitError, match=r"took longer than 0\.01 s"):
        checkup.measure("cpu", 0)


@pytest.mark.parametrize("said", ["", "{}", "warming up"])
def test_an_invalid_answer_of_a_measuring_process_is_an_error(said):
    code = f"import sys; sys.stdin.readline(); print({said!r})"
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", code]
    with pytest.raises(MeasureError, match="cannot be read"):
        checkup.told(subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True))


@pytest.mark.minutes
def test_a_process_of_its_own_measures_when_it_is_told_to():
    process = checkup.started("cpu", 1)
    assert process.poll() is None
    found = checkup.told(process)
    assert [arm.name for arm in found.arms] == [STEP, *PLANTED]
    assert {len(arm.step_ms) for arm in found.arms} == {10}
