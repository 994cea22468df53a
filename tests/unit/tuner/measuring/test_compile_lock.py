"""The lock by which several processes compile the same code once."""

import pytest

from kitsune.knobs import KNOBS
from tuner.measuring.compile_lock import code_of, sharing, turn_for
from tuner.records import Phase

KNOBS_A = {"precision": "bf16", "compile": "default"}


def test_choices_that_only_change_launches_have_the_same_code():
    same = [{}, {"update": "kitsune"}, {"capture": "step"}, {"prefetch": 2}]
    assert len({code_of(KNOBS_A | more, randomness=True) for more in same}) == 1
    others = [{}, {"precision": "fp16"}, {"layout": "channels_last"}, {"fusion": "kitsune"}, {"streams": 4}]
    assert len({code_of(KNOBS_A | more, randomness=True) for more in others}) == len(others)
    assert code_of(KNOBS_A, randomness=True) != code_of(KNOBS_A, randomness=False)
    assert code_of({"capture": "step", "precision": "bf16"}, randomness=True) is None, "nothing is compiled"
    assert {name for name, knob in KNOBS.items() if not knob.changes_code} >= {"update", "capture"}


def test_after_a_failed_compilation_the_next_process_compiles(tmp_path):
    with sharing(str(tmp_path), lambda: Phase.NUMERICS):
        with pytest.raises(ValueError, match="broke"), turn_for(KNOBS_A, randomness=True):
            raise ValueError("it broke")
        assert not list(tmp_path.glob("*.compiled"))
        with turn_for(KNOBS_A, randomness=True):
            pass
        assert len(list(tmp_path.glob("*.compiled"))) == 1


def test_without_a_folder_or_without_compiling_nobody_waits(tmp_path):
    with sharing(None, lambda: Phase.NUMERICS) as queued, turn_for(KNOBS_A, randomness=True):
        assert queued == {}
    with sharing(str(tmp_path), lambda: Phase.NUMERICS), turn_for({"precision": "bf16"}, randomness=True):
        assert list(tmp_path.iterdir()) == []
