from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kitsune.knobs import KNOBS, Choice, Exclusion, Knob, clashes
from tuner.search.space import Space, item_of

ITEMS = [(name, choice) for name, knob in KNOBS.items() for choice in knob.choices]
EVERYTHING = Space.of()
CPU = Space.of(
    {
        **{f"precision={choice}": "no such hardware" for choice in ("tf32", "fp16")},
        **{f"attention={choice}": "no attention in the model" for choice in KNOBS["attention"].choices},
        **{f"capture={choice}": "no CUDA" for choice in ("segments", "step")},
        **{f"compile={choice}": "no CUDA" for choice in ("reduce-overhead", "max-autotune", "coordinate-descent")},
        **{f"streams={choice}": "no CUDA" for choice in range(2, 9)},
        **{f"fusion={choice}": "no CUDA" for choice in ("products", "kitsune")},
        "inductor=no_mix_order": "no CUDA",
        "layout=channels_last": "no convolution in the model",
    }
)

names = st.sampled_from(
    [f"{knob}={choice}" for knob, choice in ITEMS]
    + [f"capture={choice}, compile=off" for choice in ("segments", "step")]
)
spaces = st.sets(names).map(lambda found: Space.of({name: f"no {name} here" for name in found}))
#: Choices that are like others of their knob: to list all 36 648 configurations takes seconds.
ALIKE = {
    *(f"streams={count}" for count in (2, 8)),
    *(f"attention={choice}" for choice in ("flash", "efficient", "math")),
    *(f"compile={choice}" for choice in ("max-autotune-no-cudagraphs", "coordinate-descent")),
}
small_spaces = st.sets(names).map(lambda found: Space.of({name: f"no {name} here" for name in found | ALIKE}))
configurations = st.fixed_dictionaries(
    {}, optional={name: st.sampled_from(list(knob.choices)) for name, knob in KNOBS.items()}
)
quick = settings(max_examples=80)


def differing(space: Space, ours: dict[str, Choice], theirs: dict[str, Choice]) -> set[str]:
    ours, theirs = space.canonical(ours), space.canonical(theirs)
    return {knob for knob in space.table if ours.get(knob) != theirs.get(knob)}


def test_the_table_declares_only_exclusions_that_can_be_obeyed() -> None:
    for knob in KNOBS.values():
        for exclusion in knob.excludes:
            other = KNOBS[exclusion.other]
            assert other.name != knob.name
            assert set(exclusion.choices) <= set(knob.choices) - {knob.default}
            assert set(exclusion.other_choices) < set(other.choices)
            assert exclusion.reason


def test_everything_applies_when_nothing_speaks_against_it() -> None:
    assert {name: EVERYTHING.choices(name) for name in KNOBS} == {k: tuple(v.choices) for k, v in KNOBS.items()}


def test_a_choice_that_does_not_apply_is_left_out_with_its_reason() -> None:
    assert CPU.choices("precision") == ("fp32", "bf16")
    assert CPU.choices("capture") == ("none",)
    assert CPU.allows({"capture": "step"}) == "no CUDA"
    assert list(CPU.searchable()) == ["precision", "weights", "activations", "masks", "compile", "update"]


def test_the_default_always_applies() -> None:
    space = Space.of({"layout=contiguous": "nonsense", "update=given": "nonsense"})
    assert space.choices("layout")[0] == "contiguous"
    assert space.allows({}) is space.allows({"update": "given"}) is None


def test_reasons_for_choices_that_no_longer_exist_are_of_no_effect() -> None:
    assert list(Space.of({"telepathy=on": "gone", "layout=spiral": "gone"}).configurations()) == list(
        EVERYTHING.configurations()
    )


WAITS = Space.of({f"capture={choice}, compile=off": "it waits" for choice in ("segments", "step")})


def test_a_choice_that_does_not_apply_beside_one_of_another_knob_is_excluded_there_only() -> None:
    assert WAITS.choices("capture") == ("none", "segments", "step")
    assert WAITS.allows({"capture": "step"}) == "capture=step beside compile=off: it waits"
    assert WAITS.allows({"capture": "step", "compile": "default"}) is None
    assert WAITS.repair({"capture": "step", "precision": "bf16"}) == {"precision": "bf16"}
    assert WAITS.repair({"capture": "step"}, keep="capture") == {"capture": "step", "compile": "default"}
    crossed = WAITS.repair({"capture": "step", "compile": "reduce-overhead"}, keep="capture")
    assert crossed == {"capture": "step", "compile": "default"}
    moves = dict(WAITS.neighbours({"capture": "step", "compile": "default"}))
    assert moves["compile", "off"] == {}
    assert not any("capture" in knobs and "compile" not in knobs for knobs in WAITS.configurations())
    assert len(list(WAITS.configurations())) < len(list(EVERYTHING.configurations()))
    assert "compile" not in Space.of({"capture=step": "no"}).repair({"capture": "segments"}, keep="capture")


@pytest.mark.parametrize(
    "name", ["capture=step, telepathy=off", "telepathy=on, compile=off", "capture=none, compile=off", "capture=step, "]
)
def test_conditions_of_what_is_not_in_the_table_or_is_the_default_are_of_no_effect(name: str) -> None:
    assert Space.of({name: "gone"}).table == KNOBS


def test_items_are_read_as_they_are_written() -> None:
    assert item_of("streams=4") == ("streams", 4)
    assert item_of("compile=off") == ("compile", "off")
    assert item_of("streams=400") is item_of("streams") is item_of("") is None


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
@pytest.mark.parametrize("capture", ["segments", "step"])
def test_graphs_of_ours_do_not_stand_around_graphs_of_inductor(mode: str, capture: str) -> None:
    reason = EVERYTHING.allows({"compile": mode, "capture": capture})
    assert reason is not None
    assert "CUDA graphs of its own" in reason
    assert EVERYTHING.repair({"compile": mode, "capture": capture}) == {"compile": mode}
    kernels = {"reduce-overhead": "default", "max-autotune": "max-autotune-no-cudagraphs"}[mode]
    kept = EVERYTHING.repair({"compile": mode, "capture": capture}, keep="capture")
    assert kept == {"compile": kernels, "capture": capture}


def test_several_streams_bring_along_the_graph_that_they_need() -> None:
    assert "only launches that are captured" in str(EVERYTHING.allows({"streams": 4}))
    assert EVERYTHING.repair({"streams": 4}) == {}
    assert EVERYTHING.repair({"streams": 4}, keep="streams") == {"streams": 4, "capture": "step"}
    crossed = EVERYTHING.repair({"streams": 4, "compile": "reduce-overhead"}, keep="streams")
    assert crossed == {"streams": 4, "compile": "default", "capture": "step"}
    without = Space.of({"capture=step": "the step waits for the device"})
    assert without.repair({"streams": 4}, keep="streams") == {"streams": 4, "capture": "segments"}
    nothing = Space.of({f"capture={choice}": "no CUDA" for choice in ("segments", "step")})
    assert nothing.repair({"streams": 4}, keep="streams") == {}


def test_every_count_of_streams_is_allowed_and_some_are_searched() -> None:
    assert EVERYTHING.allows({"capture": "step", "streams": 5}) is None
    assert EVERYTHING.searchable()["streams"] == (1, 2, 4, 8)
    assert {choice for (knob, choice), _ in EVERYTHING.neighbours({"capture": "step", "streams": 5})} >= {1, 2, 4, 8}


def test_a_limit_is_allowed_and_not_searched() -> None:
    limited = {"capture": "step", "streams": 4, "pool_bytes": 2**30}
    assert EVERYTHING.allows(limited) is None
    assert "on one stream" in str(EVERYTHING.allows({"pool_bytes": 2**30}))
    assert "pool_bytes" not in EVERYTHING.searchable()
    assert all(item[0] != "pool_bytes" for item, _ in EVERYTHING.neighbours(limited))
    assert EVERYTHING.canonical(limited) == limited


def test_unknown_names_are_refused_by_name() -> None:
    assert EVERYTHING.allows({"telepathy": "on"}) == "there is no knob 'telepathy'"
    assert EVERYTHING.allows({"layout": "spiral"}) == "layout has no choice 'spiral'"
    assert EVERYTHING.choices("telepathy") == ()


@quick
@given(spaces, configurations)
def test_repair_gives_something_allowed_and_leaves_the_allowed_alone(space: Space, knobs: dict[str, Choice]) -> None:
    fixed = space.repair(knobs)
    assert space.allows(fixed) is None
    assert set(fixed.items()) <= set(knobs.items())
    if space.allows(knobs) is None:
        assert fixed == space.canonical(knobs)


@quick
@given(spaces, configurations, st.sampled_from(list(KNOBS)))
def test_repair_keeps_the_knob_that_it_is_told_to_keep(space: Space, knobs: dict[str, Choice], keep: str) -> None:
    fixed = space.repair(knobs, keep=keep)
    assert space.allows(fixed) is None
    if space.allows({keep: knobs.get(keep, KNOBS[keep].default)}) is None:
        assert fixed.get(keep, KNOBS[keep].default) == knobs.get(keep, KNOBS[keep].default)


@quick
@given(spaces, configurations)
def test_neighbours_are_allowed_distinct_and_reach_every_choice(space: Space, knobs: dict[str, Choice]) -> None:
    here = space.repair(knobs)
    found = list(space.neighbours(knobs))
    assert len({frozenset(there.items()) for _, there in found}) == len(found)
    wanted = {
        (k, c)
        for k, cs in space.searchable().items()
        for c in cs
        if c != here.get(k, KNOBS[k].default)
        and any(space.repair({**start, k: c}, keep=k).get(k, KNOBS[k].default) == c for start in (here, {}))
    }
    assert {item for item, _ in found} == wanted
    for (knob, choice), there in found:
        assert space.allows(there) is None
        assert there.get(knob, KNOBS[knob].default) == choice
        changed = differing(space, here, there)
        assert changed == {knob} or space.allows({**here, knob: choice}) is not None


@settings(max_examples=15)
@given(small_spaces)
def test_every_allowed_configuration_is_listed_once_beginning_with_the_default(space: Space) -> None:
    found = [frozenset(knobs.items()) for knobs in space.configurations()]
    assert found[0] == frozenset()
    assert len(found) == len(set(found))
    searchable = space.searchable()
    everything = [dict(zip(searchable, chosen, strict=True)) for chosen in product(*searchable.values())]
    assert len(found) == sum(not list(clashes(knobs, space.table)) for knobs in everything)


def test_two_exclusions_that_chase_each_other_end_at_the_default() -> None:
    def knob(name: str, other: str) -> Knob:
        clash = Exclusion(choices=("b",), other=other, other_choices=("a",), reason="needs b")
        return Knob(name=name, meaning="", choices={"a": "", "b": ""}, needs="", excludes=(clash,))

    space = Space.of(table={"one": knob("one", "two"), "two": knob("two", "one")})
    assert space.repair({"one": "b", "two": "b"}) == {"one": "b", "two": "b"}
    assert space.repair({"one": "b"}) == {}
    assert space.repair({"one": "b"}, keep="one") == {"one": "b", "two": "b"}
    assert list(space.configurations()) == [{}, {"one": "b", "two": "b"}]
