"""The drop-in's documented options as knobs, and what becomes of those that cannot be honoured."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kitsune.amp import AMPConfig
from kitsune.errors import SettingsError
from kitsune.fusion import FusionConfig
from kitsune.knobs import KNOBS
from kitsune.plan import Plan
from kitsune.runtime.user_options import (
    NO_AMP,
    NO_FUSION,
    NOT_SCALED,
    OWN_LOADER,
    POOL_NOTE,
    Options,
    Wish,
    wish_of,
)
from kitsune.streams import StreamConfig


def wish(*, has_bf16: bool = True, **options: Any) -> Wish:
    return wish_of(Options(**options), has_bf16)


def test_nothing_said_means_capture() -> None:
    assert wish() == Wish(plan=Plan.by_hand(capture="segments"))


def test_a_plan_stands_as_it_is() -> None:
    plan = Plan.by_hand(precision="bf16", compile="default")
    assert wish(plan=plan) == Wish(plan=plan)


@pytest.mark.parametrize(
    ("options", "knobs"),
    [
        ({"enable_amp": True}, {"precision": "bf16", "capture": "segments"}),
        ({"enable_amp": False}, {"capture": "segments"}),
        ({"enable_fusion": True}, {"compile": "default", "capture": "segments"}),
        ({"enable_fusion": False}, {"capture": "segments"}),
        (
            {"enable_fusion": True, "fusion_config": FusionConfig()},
            {"fusion": "kitsune", "compile": "default", "capture": "segments"},
        ),
        ({"capture_graph": False}, {}),
        ({"capture_graph": True}, {"capture": "segments"}),
        (
            {"enable_amp": True, "amp_config": AMPConfig(dtype=torch.float16)},
            {"precision": "fp16", "capture": "segments"},
        ),
        ({"enable_amp": True, "amp_config": AMPConfig(enabled=False)}, {"capture": "segments"}),
        ({"amp_config": AMPConfig(dtype=torch.float16)}, {"capture": "segments"}),
    ],
)
def test_options_are_knobs(options: dict[str, Any], knobs: dict[str, str]) -> None:
    assert wish(**options).plan == Plan.by_hand(**knobs)


def test_amp_takes_fp16_where_there_is_no_bf16() -> None:
    assert wish(has_bf16=False, enable_amp=True).plan.choice("precision") == "fp16"
    config = AMPConfig(dtype=torch.bfloat16)
    assert wish(has_bf16=False, enable_amp=True, amp_config=config).plan.choice("precision") == "bf16"


@pytest.mark.parametrize(
    ("options", "knob", "choice"),
    [
        ({"enable_amp": False}, "precision", "fp32"),
        ({"amp_config": AMPConfig(enabled=False)}, "precision", "fp32"),
        ({"enable_fusion": False}, "compile", "off"),
        ({"capture_graph": False}, "capture", "none"),
    ],
)
def test_what_is_chosen_by_hand_goes_over_the_plan(options: dict[str, Any], knob: str, choice: str) -> None:
    plan = Plan.by_hand(precision="bf16", compile="max-autotune-no-cudagraphs", capture="segments")
    found = wish(plan=plan, **options)
    assert found.plan.choice(knob) == choice
    assert found.plan.knobs == {name: value for name, value in plan.knobs.items() if name != knob}
    assert found.overruled == {knob: f"{knob}={choice} was asked for by hand"}


def test_options_that_agree_with_the_plan_change_nothing() -> None:
    plan = Plan.by_hand(precision="fp16", compile="max-autotune-no-cudagraphs", capture="segments")
    found = wish(plan=plan, enable_amp=True, enable_fusion=True, capture_graph=True)
    assert found.plan == plan
    assert not found.overruled


def test_a_dtype_by_hand_goes_over_that_of_the_plan() -> None:
    plan = Plan.by_hand(precision="bf16")
    assert wish(plan=plan, amp_config=AMPConfig(dtype=torch.float16)).plan.choice("precision") == "fp16"


def test_a_plan_keeps_its_environment_under_options() -> None:
    plan = Plan.by_hand(precision="bf16").model_copy(update={"fingerprint": "f" * 8})
    assert wish(plan=plan, capture_graph=True).plan.fingerprint == plan.fingerprint


def test_a_whole_step_becomes_segments_with_a_note() -> None:
    found = wish(plan=Plan.by_hand(capture="step"))
    assert found.plan.choice("capture") == "segments"
    assert any("capture=step became segments" in note for note in found.notes)


def test_the_streams_of_a_plan_stay() -> None:
    found = wish(plan=Plan.by_hand(capture="step", streams=4, pool_bytes=2**30))
    assert found.plan.knobs == {"capture": "segments", "streams": 4, "pool_bytes": 2**30}
    assert not found.declined
    assert not found.overruled


@pytest.mark.parametrize(
    ("options", "knobs"),
    [
        ({"num_streams": 3}, {"streams": 3}),
        ({"stream_config": StreamConfig(num_streams=6)}, {"streams": 6}),
        ({"stream_config": StreamConfig(num_streams=6), "num_streams": 6}, {"streams": 6}),
        ({"stream_config": StreamConfig(priority_streams=[0]), "num_streams": 2}, {"streams": 2}),
        ({"num_streams": 12}, {"streams": 8}),
        ({"num_streams": 1}, {}),
        ({"memory_pool_size": "2GB"}, {"pool_bytes": 2**31}),
        ({"memory_pool_size": "3GB"}, {"pool_bytes": 2**31}),
        ({"memory_pool_size": 512 * 1024 * 1024}, {"pool_bytes": 2**29}),
        ({"memory_pool_size": 1}, {"pool_bytes": 2**24}),
        ({"memory_pool_size": 0}, {}),
    ],
)
def test_streams_and_pool_by_hand(options: dict[str, Any], knobs: dict[str, Any]) -> None:
    assert wish(**options).plan.knobs == {"capture": "segments", **knobs}


@given(st.integers(1, 64), st.integers(1, 64))
def test_no_count_of_streams_is_dropped_in_silence(asked: int, configured: int) -> None:
    options = {"num_streams": asked, "stream_config": StreamConfig(num_streams=configured)}
    if configured in (asked, StreamConfig().num_streams):
        assert wish(**options).plan == wish(num_streams=asked).plan
    else:
        with pytest.raises(SettingsError, match=rf"is {asked}, but StreamConfig\.num_streams is {configured};"):
            wish(**options)


@pytest.mark.parametrize(
    ("options", "declined"),
    [
        ({"num_streams": 8}, set()),
        ({"num_streams": 9}, {"num_streams"}),
        ({"stream_config": StreamConfig(num_streams=12)}, {"num_streams"}),
        ({"stream_config": StreamConfig(priority_streams=[0])}, {"stream_config.priority_streams"}),
        ({"stream_config": StreamConfig(num_streams=2, memory_streams=(1,))}, {"stream_config.memory_streams"}),
        ({"memory_pool_size": "2GB"}, set()),
        ({"memory_pool_size": 512}, {"memory_pool_size"}),
        ({"profile": True}, set()),
    ],
)
def test_options_that_cannot_be_honoured_yet(options: dict[str, Any], declined: set[str]) -> None:
    found = wish(**options)
    assert found.declined.keys() == declined
    assert all(found.declined.values())


@pytest.mark.parametrize(
    ("options", "declined"),
    [
        ({"amp_config": AMPConfig()}, {"amp_config": NO_AMP}),
        ({"amp_config": AMPConfig(), "enable_amp": True}, {}),
        ({"amp_config": AMPConfig(init_scale=1.0), "enable_amp": True}, {"amp_config.init_scale": NOT_SCALED}),
        ({"amp_config": AMPConfig(init_scale=1.0, dtype=torch.float16), "enable_amp": True}, {}),
        ({"fusion_config": FusionConfig()}, {"fusion_config": NO_FUSION}),
        ({"fusion_config": FusionConfig(), "enable_fusion": True}, {}),
        (
            {"fusion_config": FusionConfig(enable_matmul=False, min_fusion_benefit=1.5), "enable_fusion": True},
            {},
        ),
        ({"fusion_config": FusionConfig(), "plan": Plan.by_hand(fusion="kitsune")}, {}),
    ],
)
def test_configurations_that_refine_nothing_are_declined(options: dict[str, Any], declined: dict[str, str]) -> None:
    assert wish(**options).declined == declined


def test_configurations_go_along_with_the_plan() -> None:
    amp = AMPConfig(dtype=torch.float16, init_scale=8.0, growth_factor=3.0, backoff_factor=0.25, growth_interval=5)
    fusion = FusionConfig(max_fusion_size=8)
    found = wish(enable_amp=True, amp_config=amp, enable_fusion=True, fusion_config=fusion)
    assert found.loss_scaling == {
        "init_scale": 8.0,
        "growth_factor": 3.0,
        "backoff_factor": 0.25,
        "growth_interval": 5,
    }
    assert found.fusion_config == fusion


@pytest.mark.parametrize(
    ("options", "is_noted"),
    [
        ({"memory_pool_size": "2GB"}, True),
        ({"memory_pool_size": "2GB", "num_streams": 1}, True),
        ({"memory_pool_size": "2GB", "plan": Plan.by_hand(precision="bf16")}, True),
        ({"memory_pool_size": "2GB", "num_streams": 4}, False),
        ({"memory_pool_size": "2GB", "plan": Plan.by_hand(capture="segments", streams=2)}, False),
        ({"memory_pool_size": 0}, False),
        ({}, False),
    ],
)
def test_a_pool_without_streams_leaves_a_note(options: dict[str, Any], is_noted: bool) -> None:
    assert (POOL_NOTE in wish(**options).notes) == is_noted


@pytest.mark.parametrize(("size", "is_noted"), [("300MB", True), ("256MB", False), (1, False), (0, False)])
def test_a_pool_between_two_sizes_leaves_a_note(size: int | str, is_noted: bool) -> None:
    note = "of the 314,572,800 bytes of memory_pool_size 268,435,456 are used: pools go by doubling"
    assert (note in wish(memory_pool_size=size, num_streams=2).notes) == is_noted


@pytest.mark.parametrize("count", [0, 65, True])
def test_a_number_of_streams_that_is_none_is_told_by_its_own_name(count: int) -> None:
    with pytest.raises(SettingsError, match=r"^num_streams must be an integer between 1 and 64"):
        Options(num_streams=count)


def test_lists_of_streams_may_be_lists_or_tuples() -> None:
    assert StreamConfig(priority_streams=[0, 3]) == StreamConfig(priority_streams=(0, 3))
    assert hash(StreamConfig(priority_streams=[0]))


def test_no_fusion_by_hand_goes_over_both_knobs_of_the_plan() -> None:
    found = wish(plan=Plan.by_hand(fusion="kitsune", compile="default"), enable_fusion=False)
    assert found.plan.knobs == {}
    assert found.overruled.keys() == {"fusion", "compile"}


@pytest.mark.parametrize(
    "options",
    [
        {"num_streams": 0},
        {"num_streams": 65},
        {"num_streams": "8"},
        {"num_streams": 2.0},
        {"enable_amp": "yes"},
        {"enable_fusion": 1},
        {"capture_graph": "segments"},
        {"profile": "profile.json"},
        {"memory_pool_size": 1.5},
        {"memory_pool_size": "lots"},
        {"memory_pool_size": "9" * 320},
        {"memory_pool_size": "0.1B"},
        {"amp_config": {"dtype": torch.float16}},
        {"fusion_config": True},
        {"stream_config": 4},
        {"plan": {"capture": "segments"}},
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match=next(iter(options))):
        wish(**options)


@pytest.mark.parametrize(
    ("config", "arguments"),
    [
        (AMPConfig, {"dtype": torch.float64}),
        (AMPConfig, {"backoff_factor": 1.5}),
        (AMPConfig, {"growth_factor": 0.5}),
        (AMPConfig, {"growth_interval": 0}),
        (AMPConfig, {"init_scale": 0.0}),
        (FusionConfig, {"max_fusion_size": 0}),
        (AMPConfig, {"enabled": "no"}),
        (AMPConfig, {"enabled": 1}),
        (StreamConfig, {"num_streams": 0}),
        (StreamConfig, {"priority_streams": "abc"}),
        (StreamConfig, {"priority_streams": 0}),
        (StreamConfig, {"compute_streams": [9]}),
        (StreamConfig, {"compute_streams": [-1]}),
        (StreamConfig, {"memory_streams": (0, 1.0)}),
        (StreamConfig, {"memory_streams": (True,)}),
    ],
)
def test_configurations_that_make_no_sense(config: Any, arguments: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match=config.__name__):
        config(**arguments)


@pytest.mark.parametrize("name", ["growth_interval", "backoff_factor", "growth_factor", "init_scale"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), "a", None, [1.0], True])
def test_what_is_no_number_of_loss_scaling_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(SettingsError, match=rf"AMPConfig\.{name} is "):
        AMPConfig(**{name: value})


def test_the_growth_interval_counts_steps() -> None:
    with pytest.raises(SettingsError, match=r"AMPConfig\.growth_interval is 2\.5; it must be a whole number"):
        AMPConfig(growth_interval=2.5)  # type: ignore[arg-type]


@given(
    knobs=st.fixed_dictionaries(
        {}, optional={name: st.sampled_from(list(knob.choices)) for name, knob in KNOBS.items()}
    ),
    switches=st.fixed_dictionaries(
        {}, optional={name: st.booleans() for name in ("enable_amp", "enable_fusion", "capture_graph")}
    ),
)
def test_every_knob_of_a_plan_is_kept_or_overruled(knobs: dict[str, Any], switches: dict[str, bool]) -> None:
    plan = Plan.by_hand(**knobs)
    found = wish(plan=plan, **switches)
    assert plan.knobs.keys() <= found.plan.knobs.keys() | found.overruled.keys()
    assert not found.plan.knobs.keys() & found.overruled.keys()
    assert found.plan.choice("capture") != "step"
    assert found.overruled.keys() - found.by_hand.keys() <= {"prefetch"}
    for name in plan.knobs.keys() - found.by_hand.keys() - {"capture", "prefetch"}:
        assert found.plan.knobs[name] == plan.knobs[name]


def test_a_loop_of_ones_own_has_its_own_loader():
    plan = Plan.by_hand(precision="bf16", prefetch=2)
    found = wish(plan=plan)
    assert "prefetch" not in found.plan.knobs
    assert found.overruled == {"prefetch": OWN_LOADER}
