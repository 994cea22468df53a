"""Suite knobs: the plans that it times."""

import argparse

import pytest

from benchmarks.knobs import plans_of
from benchmarks.pairs import item_of

KNOBS = {"precision": "bf16", "compile": "default", "capture": "step", "streams": 4, "weights": "bf16_copies"}


def test_each_choice_is_left_out_by_itself_unless_another_needs_it():
    found = plans_of(KNOBS, KNOBS)
    assert list(found) == ["plan", "without streams", "without weights"]
    assert dict(found["plan"].knobs) == KNOBS
    assert dict(found["without streams"].knobs) == {name: KNOBS[name] for name in KNOBS if name != "streams"}


def test_choices_are_read_as_the_table_has_them():
    assert item_of("streams=4") == ("streams", 4)
    assert item_of("precision=bf16") == ("precision", "bf16")
    for wrong in ("streams=9", "nonsense=1", "precision"):
        with pytest.raises(argparse.ArgumentTypeError):
            item_of(wrong)
