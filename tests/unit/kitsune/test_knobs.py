"""The table of knobs, and the clashes between choices."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kitsune.knobs import KNOBS, Exclusion, Knob, clashes
from kitsune.techniques import TECHNIQUES

CHOICES = st.fixed_dictionaries(
    {}, optional={name: st.sampled_from(list(knob.choices)) for name, knob in KNOBS.items()}
)


@pytest.mark.parametrize("knob", KNOBS.values(), ids=lambda knob: knob.name)
def test_a_row_is_complete(knob):
    assert KNOBS[knob.name] is knob
    assert knob.default == next(iter(knob.choices))
    assert len(knob.choices) > 1
    assert all([knob.meaning, knob.needs, *knob.choices.values()])
    assert TECHNIQUES[knob.name].name == knob.name


def test_every_technique_has_a_row_and_the_order_is_the_tables():
    assert list(TECHNIQUES) == list(KNOBS)


@pytest.mark.parametrize("exclusion", [exclusion for knob in KNOBS.values() for exclusion in knob.excludes])
def test_an_exclusion_speaks_of_choices_that_exist(exclusion):
    owner = next(knob for knob in KNOBS.values() if exclusion in knob.excludes)
    assert set(exclusion.choices) <= set(owner.choices) - {owner.default}
    assert set(exclusion.other_choices) <= set(KNOBS[exclusion.other].choices)
    assert exclusion.other != owner.name
    assert exclusion.reason


@given(CHOICES)
def test_going_back_to_the_default_ends_every_clash(knobs):
    for _ in KNOBS:  # what goes back may be what another one needs
        for knob, _ in list(clashes(knobs)):
            knobs[knob.name] = knob.default
    assert list(clashes(knobs)) == []


@given(CHOICES)
def test_leaving_a_knob_out_is_choosing_its_default(knobs):
    full = {name: knobs.get(name, knob.default) for name, knob in KNOBS.items()}
    assert list(clashes(knobs)) == list(clashes(full))


def test_clashes_are_the_declared_pairs():
    found = {
        (knob.name, chosen[knob.name], exclusion.other, chosen.get(exclusion.other, KNOBS[exclusion.other].default))
        for one, other in itertools.permutations(KNOBS.values(), 2)
        for chosen in ({one.name: a, other.name: b} for a in one.choices for b in other.choices)
        for knob, exclusion in clashes(chosen)
    }
    graphs = itertools.product(["segments", "step"], ["reduce-overhead", "max-autotune"])
    assert found >= {("capture", a, "compile", b) for a, b in graphs}
    assert ("attention", "flash", "precision", "tf32") in found
    assert {found for found in found if found[0] == "streams"} == {
        ("streams", count, "capture", "none") for count in range(2, 9)
    }
    pools = [choice for choice in KNOBS["pool_bytes"].choices if choice]
    assert {found for found in found if found[0] == "pool_bytes"} == {("pool_bytes", n, "streams", 1) for n in pools}
    assert {name for name, *_ in found} == {
        *("capture", "attention", "streams", "pool_bytes", "weights", "activations", "masks", "inductor", "recompute")
    }


def test_a_table_of_ones_own():
    def knob(name, *excludes):
        return Knob(name=name, meaning="m", choices={"off": "o", "on": "o"}, needs="n", excludes=excludes)

    rule = Exclusion(choices=("on",), other="b", other_choices=("off",), reason="because")
    table = {"a": knob("a", rule), "b": knob("b")}
    assert [exclusion for _, exclusion in clashes({"a": "on"}, table)] == [rule]
    assert list(clashes({"a": "on", "b": "on"}, table)) == []
