import pytest
from hypothesis import given, settings

from kitsune.knobs import KNOBS, Choice
from tests.unit.tuner.machine import failure
from tests.unit.tuner.search.test_space import CPU, EVERYTHING, WAITS, configurations, differing, spaces
from tests.unit.tuner.simulation import trial
from tuner.records import FailureKind, Trial
from tuner.search.presets import (
    COMPILE,
    EAGER_BF16,
    LATER,
    MAX_AUTOTUNE,
    OPENING,
    REDUCE_OVERHEAD,
    RIVAL,
    SLOW,
    STOCK,
    STOCK_VARIANTS,
    TIGHT_OPENING,
    is_stock,
    resolved,
    stock_variants,
)
from tuner.search.space import Item, Space
from tuner.search.strategy import propose

ALL = (*OPENING, *LATER, *SLOW)
quick = settings(max_examples=80)


def of(space: Space, *presets, avoid: tuple[Item, ...] = ()) -> dict[str, dict[str, Choice]]:
    return {found.name: dict(found.knobs) for found in resolved(presets, space, avoid)}


def test_presets_name_only_what_is_in_the_table() -> None:
    for preset in (*ALL, *STOCK):
        assert all(choice in KNOBS[knob].choices for knob, choice in preset.needs.items())
        assert all(set(choices) <= set(KNOBS[knob].choices) for knob, choices in preset.wishes.items())
    for knob, alternatives in STOCK_VARIANTS.items():
        assert all(set(choices) <= set(KNOBS[knob].choices) for choices in alternatives)


def test_all_that_plain_torch_offers_is_tried() -> None:
    assert of(EVERYTHING, *STOCK).items() <= of(EVERYTHING, *ALL).items()
    avoid = (("compile", "reduce-overhead"),)
    assert of(EVERYTHING, *STOCK, avoid=avoid).items() <= of(EVERYTHING, *ALL, avoid=avoid).items()


def test_only_what_is_called_slow_is_slow_and_the_last_of_the_opening() -> None:
    *first, last = resolved(OPENING, EVERYTHING)
    assert not any(EVERYTHING.is_slow(found.knobs) for found in (*first, *resolved(LATER, EVERYTHING)))
    assert EVERYTHING.is_slow(last.knobs)
    assert all(EVERYTHING.is_slow(found.knobs) for found in resolved(SLOW, EVERYTHING))


def test_the_best_guess_and_the_strongest_rival_come_first() -> None:
    guess, rival, unordered, fused, attention, not_compiled, fp16, descent = resolved(OPENING, EVERYTHING)
    half = {"layout": "channels_last", "precision": "bf16"}
    ours = {
        "weights": "bf16_copies",
        "activations": "bf16",
        "masks": "dropped",
        "fusion": "products",
        "update": "kitsune",
    }
    assert guess.knobs == {**half, **ours, "compile": "default", "capture": "step", "streams": 4}
    assert (rival.name, rival.knobs) == (
        "reduce_overhead",
        {**half, "compile": "reduce-overhead", "update": "fused"},
    )
    assert not_compiled.knobs == {**half, "update": "kitsune", "capture": "step", "streams": 4}
    assert unordered.knobs == {**guess.knobs, "inductor": "no_mix_order"}
    assert fused.knobs == {**guess.knobs, "fusion": "kitsune"}
    assert attention.knobs == {**guess.knobs, "attention": "cudnn"}
    in_bf16 = {"precision": "bf16", "weights": "bf16_copies", "activations": "bf16"}
    assert Space.of().canonical({**fp16.knobs, **in_bf16}) == guess.knobs
    assert descent.knobs == {**guess.knobs, "compile": "coordinate-descent"}


@pytest.mark.parametrize("lacking", [{"layout=channels_last": "no convolutions"}, CPU.inapplicable])
def test_coordinate_descent_is_tried_early_for_convolutions_on_a_gpu_alone(lacking: dict[str, str]) -> None:
    assert "best guess, coordinate descent" not in of(Space.of(lacking), *OPENING)


def test_where_time_is_tight_what_is_not_compiled_comes_before_what_else_is() -> None:
    usual, tight = (resolved(presets, EVERYTHING) for presets in (OPENING, TIGHT_OPENING))
    assert [each.name for each in tight[:3]] == ["best guess", "reduce_overhead", "best guess, not compiled"]
    assert sorted(each.name for each in tight) == sorted(each.name for each in usual)


def test_the_rival_is_compiled_without_graphs_where_those_of_torch_do_not_work() -> None:
    plain = {"layout": "channels_last", "precision": "bf16", "compile": "default", "update": "fused"}
    assert of(EVERYTHING, RIVAL, avoid=(("compile", "reduce-overhead"),)) == {"compile": plain}
    assert of(CPU, RIVAL)["compile"]["compile"] == "default"


def test_where_streams_or_graphs_do_not_apply_the_best_guess_does_without() -> None:
    no_streams = {f"streams={count}": "no" for count in KNOBS["streams"].choices}
    guess = resolved(OPENING, Space.of(no_streams))[0].knobs
    assert guess["capture"] == "step"
    assert "streams" not in guess
    no_graphs = {f"capture={choice}": "no" for choice in KNOBS["capture"].choices}
    guess = resolved(OPENING, Space.of(no_graphs))[0].knobs
    assert guess["compile"] == "default"
    assert not {"capture", "streams"} & set(guess)


def test_without_graphs_what_plain_torch_offers_goes_by_its_name() -> None:
    half, fused, masks = {"precision": "bf16"}, {"update": "fused"}, {"masks": "dropped"}
    copies = {"weights": "bf16_copies", "activations": "bf16"}
    space = Space.of({**CPU.inapplicable, "update=kitsune": "no CUDA"})
    assert of(space, *ALL) == {
        "best guess": {**half, "compile": "default", **fused, **masks, **copies},
        "compile": {**half, "compile": "default", **fused},
        "best guess, full precision": {"compile": "default", **fused, **masks},
        "best guess, not compiled": {**half, **fused},
        "eager_bf16": half,
        "full precision, not compiled": fused,
        "best guess, autotuned": {**half, "compile": "max-autotune-no-cudagraphs", **fused},
    }
    assert [found.knobs for found in resolved(ALL, Space.of(table={}))] == [{}]


def test_where_the_step_as_given_waits_only_what_is_compiled_is_captured() -> None:
    found = of(WAITS, *ALL)
    assert {name for name, knobs in found.items() if "capture" in knobs} == {
        "best guess",
        "best guess, no mix-order reduction",
        "best guess, our kernels",
        "best guess, cuDNN's attention",
        "best guess, fp16",
        "best guess, coordinate descent",
        "best guess, full precision",
        "best guess, Inductor's kernels only",
        "best guess, one stream",
        "best guess, autotuned",
    }
    assert all("compile" in knobs for knobs in found.values() if "capture" in knobs)


def test_rivals_stand_at_their_best_where_everything_applies() -> None:
    best = {"layout": "channels_last", "precision": "bf16", "update": "fused"}
    assert of(EVERYTHING, *STOCK) == {
        "reduce_overhead": {**best, "compile": "reduce-overhead"},
        "compile": {**best, "compile": "default"},
        "eager_bf16": {"precision": "bf16"},
        "max_autotune": {**best, "compile": "max-autotune"},
    }


def test_rivals_do_without_what_does_not_apply() -> None:
    assert of(CPU, *STOCK) == {
        "compile": {"precision": "bf16", "compile": "default", "update": "fused"},
        "eager_bf16": {"precision": "bf16"},
    }
    assert of(Space.of(table={}), REDUCE_OVERHEAD, COMPILE, EAGER_BF16, MAX_AUTOTUNE) == {}


def test_rivals_do_without_what_is_known_to_fail() -> None:
    rivals = of(EVERYTHING, *STOCK, avoid=(("precision", "bf16"),))
    assert "eager_bf16" not in rivals
    assert rivals["compile"]["precision"] == "tf32"


def test_seeds_fall_back_choice_by_choice() -> None:
    without = {"precision=bf16": "old card", "update=kitsune": "not this optimizer", "capture=step": "host sync"}
    first = resolved(OPENING, Space.of(without))[0].knobs
    assert (first["precision"], first["update"], first["capture"]) == ("fp16", "fused", "segments")
    first = resolved(OPENING, Space.of({**without, "update=fused": "nor here"}))[0].knobs
    assert "update" not in first


@quick
@given(spaces)
def test_presets_are_allowed_and_distinct(space: Space) -> None:
    found = resolved(ALL, space)
    assert all(space.allows(preset.knobs) is None for preset in found)
    assert len({frozenset(preset.knobs.items()) for preset in found}) == len(found)
    rivals = {rival.name: rival.knobs for rival in resolved(STOCK, space)}
    assert ("compile" in rivals) == ("default" in space.choices("compile"))
    assert all(is_stock(knobs) for knobs in rivals.values())


def test_stock_is_what_plain_torch_offers() -> None:
    assert is_stock({})
    assert is_stock({"layout": "channels_last", "precision": "tf32", "compile": "max-autotune", "update": "fused"})
    for ours in ({"capture": "step"}, {"update": "kitsune"}, {"fusion": "kitsune"}, {"capture": "step", "streams": 2}):
        assert not is_stock({"precision": "bf16", **ours})


def test_variants_of_a_rival_are_the_other_precision_and_the_other_layout() -> None:
    rival = {"layout": "channels_last", "precision": "bf16", "compile": "default", "update": "fused"}
    assert list(stock_variants(EVERYTHING, rival)) == [
        {**rival, "precision": "tf32"},
        {"precision": "bf16", "compile": "default", "update": "fused"},
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


def test_where_fusion_is_avoided_what_does_without_it_is_still_there() -> None:
    avoided = tuple(("fusion", choice) for choice in KNOBS["fusion"].choices)
    assert "best guess, Inductor's kernels only" in of(EVERYTHING, *LATER, avoid=avoided)


def test_where_nothing_compiles_the_best_guess_has_no_kernels_that_need_the_compiler() -> None:
    avoided = tuple(("compile", choice) for choice in KNOBS["compile"].choices)
    assert "fusion" not in resolved(OPENING, EVERYTHING, avoided)[0].knobs


@pytest.mark.parametrize(
    "item", [("fusion", "products"), ("weights", "bf16_copies"), ("activations", "bf16"), ("streams", 4)]
)
def test_where_one_choice_of_the_best_guess_fails_a_compiled_graph_is_still_found(item: tuple[str, Choice]) -> None:
    trials: list[Trial] = []
    while len(trials) < 8:
        proposal = propose(EVERYTHING, trials)
        assert proposal is not None
        failed = failure("it fails", FailureKind.CRASHED) if item in proposal.knobs.items() else None
        trials.append(trial(len(trials), proposal.knobs, proposal.source, failure=failed))
    worked = [each.knobs for each in trials if each.failure is None]
    assert any((knobs.get("compile"), knobs.get("capture")) == ("default", "step") for knobs in worked)
