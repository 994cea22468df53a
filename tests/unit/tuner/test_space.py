from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kitsune.knobs import KNOBS, Choice, Exclusion, Knob, clashes
from tuner.space import SEEDS, STOCK, STOCK_VARIANTS, Space, expert_seeds, stock_rivals, stock_variants

ITEMS = [(name, choice) for name, knob in KNOBS.items() for choice in knob.choices]
EVERYTHING = Space.of()
CPU = Space.of(
    {
        **{f"precision={choice}": "no such hardware" for choice in ("tf32", "fp16")},
        **{f"attention={choice}": "no attention in the model" for choice in KNOBS["attention"].choices},
        **{f"capture={choice}": "no CUDA" for choice in ("segments", "step")},
        **{f"compile={choice}": "no CUDA" for choice in ("reduce-overhead", "max-autotune", "coordinate-descent")},
        **{f"streams={choice}": "no CUDA" for choice in range(2, 9)},
        "fusion=kitsune": "no CUDA",
        "layout=channels_last": "no convolution in the model",
    }
)

spaces = st.sets(st.sampled_from(ITEMS)).map(
    lambda items: Space.of({f"{knob}={choice}": f"no {choice} here" for knob, choice in items})
)
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


def test_presets_name_only_what_is_in_the_table() -> None:
    for preset in (*STOCK, *SEEDS):
        assert all(choice in KNOBS[knob].choices for knob, choice in preset.needs.items())
        assert all(set(choices) <= set(KNOBS[knob].choices) for knob, choices in preset.wishes.items())
    for knob, alternatives in STOCK_VARIANTS.items():
        assert all(set(choices) <= set(KNOBS[knob].choices) for choices in alternatives)


def test_everything_applies_when_nothing_speaks_against_it() -> None:
    assert {name: EVERYTHING.choices(name) for name in KNOBS} == {k: tuple(v.choices) for k, v in KNOBS.items()}


def test_a_choice_that_does_not_apply_is_left_out_with_its_reason() -> None:
    assert CPU.choices("precision") == ("fp32", "bf16")
    assert CPU.choices("capture") == ("none",)
    assert CPU.allows({"capture": "step"}) == "no CUDA"
    assert list(CPU.searchable()) == ["precision", "compile", "update"]


def test_the_default_always_applies() -> None:
    space = Space.of({"layout=contiguous": "nonsense", "update=given": "nonsense"})
    assert space.choices("layout")[0] == "contiguous"
    assert space.allows({}) is space.allows({"update": "given"}) is None


def test_reasons_for_choices_that_no_longer_exist_are_of_no_effect() -> None:
    assert list(Space.of({"telepathy=on": "gone", "layout=spiral": "gone"}).configurations()) == list(
        EVERYTHING.configurations()
    )


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
        if c != here.get(k, KNOBS[k].default) and space.repair({k: c}, keep=k).get(k, KNOBS[k].default) == c
    }
    assert {item for item, _ in found} == wanted
    for (knob, choice), there in found:
        assert space.allows(there) is None
        assert there.get(knob, KNOBS[knob].default) == choice
        changed = differing(space, here, there)
        assert changed == {knob} or space.allows({**here, knob: choice}) is not None


@settings(max_examples=15)  # up to 17 280 configurations each
@given(spaces)
def test_every_allowed_configuration_is_listed_once_beginning_with_the_default(space: Space) -> None:
    found = [frozenset(knobs.items()) for knobs in space.configurations()]
    assert found[0] == frozenset()
    assert len(found) == len(set(found))
    searchable = space.searchable()
    everything = [dict(zip(searchable, chosen, strict=True)) for chosen in product(*searchable.values())]
    assert len(found) == sum(not list(clashes(knobs)) for knobs in everything)


@quick
@given(spaces)
def test_presets_are_allowed_distinct_and_need_what_they_say(space: Space) -> None:
    for presets in (stock_rivals(space), expert_seeds(space)):
        assert all(space.allows(preset.knobs) is None for preset in presets)
        assert len({frozenset(preset.knobs.items()) for preset in presets}) == len(presets)
    rivals = {rival.name: rival.knobs for rival in stock_rivals(space)}
    assert rivals["eager"] == {}
    assert ("compile" in rivals) == ("default" in space.choices("compile"))
    assert all("capture" not in knobs for knobs in rivals.values())


def test_rivals_stand_at_their_best_where_everything_applies() -> None:
    best = {"layout": "channels_last", "precision": "bf16", "update": "fused"}
    assert {rival.name: rival.knobs for rival in stock_rivals(EVERYTHING)} == {
        "eager": {},
        "eager_bf16": {"precision": "bf16"},
        "compile": {**best, "compile": "default"},
        "reduce_overhead": {**best, "compile": "reduce-overhead"},
        "max_autotune": {**best, "compile": "max-autotune"},
    }


def test_rivals_do_without_what_does_not_apply() -> None:
    assert {rival.name: rival.knobs for rival in stock_rivals(CPU)} == {
        "eager": {},
        "eager_bf16": {"precision": "bf16"},
        "compile": {"precision": "bf16", "compile": "default", "update": "fused"},
    }
    assert [rival.name for rival in stock_rivals(Space.of(table={}))] == ["eager"]


def test_rivals_do_without_what_is_known_to_fail() -> None:
    rivals = {rival.name: rival.knobs for rival in stock_rivals(EVERYTHING, avoid=[("precision", "bf16")])}
    assert "eager_bf16" not in rivals
    assert rivals["compile"]["precision"] == "tf32"


def test_the_first_seed_is_everything_at_once() -> None:
    first, second, third, *_ = [seed.knobs for seed in expert_seeds(EVERYTHING)]
    assert first == {
        "layout": "channels_last",
        "precision": "bf16",
        "compile": "default",
        "update": "kitsune",
        "capture": "step",
    }
    assert second == {**first, "streams": 4}
    assert third == {knob: choice for knob, choice in first.items() if knob != "compile"}
    assert {**first, "fusion": "kitsune"} in [seed.knobs for seed in expert_seeds(EVERYTHING)]


def test_seeds_fall_back_choice_by_choice() -> None:
    without = {"precision=bf16": "old card", "update=kitsune": "not this optimizer", "capture=step": "host sync"}
    first = expert_seeds(Space.of(without))[0].knobs
    assert (first["precision"], first["update"], first["capture"]) == ("fp16", "fused", "segments")
    first = expert_seeds(Space.of({**without, "update=fused": "nor here"}))[0].knobs
    assert "update" not in first


def test_variants_of_a_rival_are_the_other_layout_and_the_other_precision() -> None:
    rival = {"layout": "channels_last", "precision": "bf16", "compile": "default", "update": "fused"}
    assert list(stock_variants(EVERYTHING, rival)) == [
        {"precision": "bf16", "compile": "default", "update": "fused"},
        {**rival, "precision": "tf32"},
    ]
    assert list(stock_variants(CPU, {"precision": "bf16", "compile": "default"})) == [{"compile": "default"}]
    assert stock_variants(EVERYTHING, {}, avoid=[("precision", "bf16"), ("precision", "tf32")]) == (
        {"layout": "channels_last"},
    )
    assert stock_variants(Space.of(table={}), {}) == ()


@quick
@given(spaces, configurations)
def test_variants_of_a_rival_are_allowed_and_differ_in_one_knob(space: Space, knobs: dict[str, Choice]) -> None:
    rival = space.repair(knobs)
    for variant in stock_variants(space, rival):
        assert space.allows(variant) is None
        assert len(differing(space, rival, variant)) == 1


def test_two_exclusions_that_chase_each_other_end_at_the_default() -> None:
    def knob(name: str, other: str) -> Knob:
        clash = Exclusion(choices=("b",), other=other, other_choices=("a",), reason="needs b")
        return Knob(name=name, meaning="", choices={"a": "", "b": ""}, needs="", excludes=(clash,))

    space = Space.of(table={"one": knob("one", "two"), "two": knob("two", "one")})
    assert space.repair({"one": "b", "two": "b"}) == {"one": "b", "two": "b"}
    assert space.repair({"one": "b"}) == {}
    assert space.repair({"one": "b"}, keep="one") == {"one": "b", "two": "b"}
    assert list(space.configurations()) == [{}, {"one": "b", "two": "b"}]
