"""Translates the drop-in's documented options into knobs of a plan."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from kitsune.amp import SCALING, AMPConfig
from kitsune.base.byte_sizes import parse_bytes
from kitsune.errors import SettingsError
from kitsune.fusion.config import FusionConfig
from kitsune.knobs import KNOBS, Choice
from kitsune.plan import Plan
from kitsune.streams import ROLES, StreamConfig, check_count

HALF = ("bf16", "fp16")
STEP_NOTE = "capture=step became segments: the loop is yours, so its step cannot be one graph; TrainStep makes it one"
POOL_NOTE = "memory_pool_size limits what launches on several streams need: on one it has nothing to limit"
POOL_SIZES = tuple(int(choice) for choice in KNOBS["pool_bytes"].choices if choice)
MOST_STREAMS = max(map(int, KNOBS["streams"].choices))
UNSAID_STREAMS = StreamConfig().num_streams
SCHEDULED = "what runs on which stream, and which of them goes first, is found out by measuring"
OWN_LOADER = "the batches are those of your loop; wrap its loader in kitsune.memory.Prefetcher"
NO_FUSION = "nothing is fused without enable_fusion=True"
NO_AMP = "mixed precision is off without enable_amp=True"
NOT_SCALED = "bfloat16 needs no loss scaling"
KINDS: Mapping[str, type | tuple[type, ...]] = {
    "num_streams": int,
    "enable_fusion": bool,
    "enable_amp": bool,
    "memory_pool_size": (int, str),
    "capture_graph": bool,
    "profile": bool,
    "amp_config": AMPConfig,
    "fusion_config": FusionConfig,
    "stream_config": StreamConfig,
    "plan": Plan,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """The options that the user gave; `None` where they gave none. Raises SettingsError."""

    num_streams: int | None = None
    enable_fusion: bool | None = None
    enable_amp: bool | None = None
    memory_pool_size: int | str | None = None
    capture_graph: bool | None = None
    profile: bool | None = None
    amp_config: AMPConfig | None = None
    fusion_config: FusionConfig | None = None
    stream_config: StreamConfig | None = None
    plan: Plan | None = None

    def __post_init__(self) -> None:
        for name, kinds in KINDS.items():
            value = getattr(self, name)
            if value is not None and not isinstance(value, kinds):
                names = [kind.__name__ for kind in (kinds if isinstance(kinds, tuple) else (kinds,))]
                raise SettingsError(f"{name} is {value!r}; it takes {' or '.join(names)}")
        if self.num_streams is not None:
            check_count("num_streams", self.num_streams)
            self._check_one_count(self.num_streams)

    def _check_one_count(self, asked: int) -> None:
        """A configuration that holds the usual count may be there for its other fields."""
        configured = asked if self.stream_config is None else self.stream_config.num_streams
        if configured not in (asked, UNSAID_STREAMS):
            raise SettingsError(f"num_streams is {asked}, but StreamConfig.num_streams is {configured}; give one")

    @property
    def streams(self) -> int | None:
        if self.num_streams is not None or self.stream_config is None:
            return self.num_streams
        return self.stream_config.num_streams


@dataclass(frozen=True, kw_only=True, slots=True)
class Wish:
    """The options as a plan, with what a plan cannot hold.

    `by_hand` are the knobs that the user chose explicitly; `overruled` those of the plan that they replaced
    (knob -> reason); `declined` what cannot be honoured (option -> reason).
    """

    plan: Plan
    by_hand: Mapping[str, Choice] = field(default_factory=dict)
    overruled: Mapping[str, str] = field(default_factory=dict)
    declined: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    loss_scaling: Mapping[str, Any] = field(default_factory=dict)
    fusion_config: FusionConfig | None = None
    profile: bool = False


def wish_of(options: Options, has_bf16: bool) -> Wish:
    """The plan, with every explicit option put over it. Without a plan, graphs are captured unless told otherwise."""
    given = dict(options.plan.knobs) if options.plan is not None else {}
    unheeded = {"prefetch": OWN_LOADER} if given.get("prefetch") else {}
    given = {knob: choice for knob, choice in given.items() if knob not in unheeded}
    by_hand = _by_hand(options, given, has_bf16)
    knobs = {"capture": "segments", **by_hand} if options.plan is None else {**given, **by_hand}
    notes: tuple[str, ...] = ()
    if knobs.get("capture") == "step":
        knobs["capture"], notes = "segments", (STEP_NOTE,)
    if by_hand.get("pool_bytes") and int(knobs.get("streams", 1)) == 1:
        notes = (*notes, POOL_NOTE)
    notes += _note_of_pool(parse_bytes(options.memory_pool_size or 0))
    plan = Plan.by_hand(**knobs)
    if options.plan is not None:
        plan = options.plan.model_copy(update={"knobs": plan.knobs})
    return Wish(
        plan=plan,
        by_hand=by_hand,
        overruled=unheeded
        | {knob: f"{knob}={by_hand[knob]} was asked for by hand" for knob in given if knob not in plan.knobs},
        declined=_declined(options, plan),
        notes=notes,
        loss_scaling=_loss_scaling(options.amp_config) if plan.choice("precision") == "fp16" else {},
        fusion_config=options.fusion_config,
        profile=bool(options.profile),
    )


def _by_hand(options: Options, given: Mapping[str, Choice], has_bf16: bool) -> dict[str, Choice]:
    """The knobs that the options speak of. Configurations refine what is on; they turn nothing on."""
    knobs: dict[str, Choice] = {}
    amp = options.amp_config or AMPConfig()
    enable_amp = options.enable_amp
    if enable_amp is None and options.amp_config is not None and given.get("precision") in HALF:
        enable_amp = True
    if enable_amp is not None:
        knobs["precision"] = _precision(amp, given, has_bf16) if enable_amp and amp.enabled else "fp32"
    if options.enable_fusion is not None:
        # A compiled plan is fused already: enable_fusion=True has nothing to add to its mode.
        knobs["compile"] = given.get("compile", "default") if options.enable_fusion else KNOBS["compile"].default
        if not options.enable_fusion:
            knobs["fusion"] = KNOBS["fusion"].default
        elif options.fusion_config is not None:
            knobs["fusion"] = given.get("fusion", "kitsune")
    if options.capture_graph is not None:
        knobs["capture"] = "segments" if options.capture_graph else "none"
    if options.streams is not None:
        knobs["streams"] = min(options.streams, MOST_STREAMS)
    if options.memory_pool_size is not None:
        knobs["pool_bytes"] = pool_of(parse_bytes(options.memory_pool_size))
    return knobs


def _precision(amp: AMPConfig, given: Mapping[str, Choice], has_bf16: bool) -> Choice:
    if amp.dtype is not None:
        return "bf16" if amp.dtype is torch.bfloat16 else "fp16"
    if given.get("precision") in HALF:
        return given["precision"]
    return "bf16" if has_bf16 else "fp16"


def _loss_scaling(amp: AMPConfig | None) -> dict[str, Any]:
    return {} if amp is None else {name: getattr(amp, name) for name in SCALING}


def _note_of_pool(size: int) -> tuple[str, ...]:
    pool = pool_of(size)
    told = f"of the {size:,} bytes of memory_pool_size {pool:,} are used: pools go by doubling"
    return (told,) if pool < size else ()


def _declined(options: Options, plan: Plan) -> dict[str, str]:
    declined = {**_declined_amp(options, plan), **_declined_fusion(options, plan), **_declined_streams(options)}
    size = parse_bytes(options.memory_pool_size or 0)
    if pool_of(size) > size:
        declined["memory_pool_size"] = f"the smallest pool is {POOL_SIZES[0]:,} bytes; {size:,} are less"
    return declined


def _declined_streams(options: Options) -> dict[str, str]:
    declined = {}
    if options.streams is not None and options.streams > MOST_STREAMS:
        declined["num_streams"] = f"launches are scheduled on {MOST_STREAMS} streams at most"
    asked = (role for role in ROLES if getattr(options.stream_config, role, ()))
    return {**declined, **{f"stream_config.{role}": SCHEDULED for role in asked}}


def _declined_amp(options: Options, plan: Plan) -> dict[str, str]:
    amp, precision = options.amp_config, plan.choice("precision")
    if amp is None or not amp.enabled or precision == "fp16":
        return {}
    if precision != "bf16":
        return {"amp_config": NO_AMP}
    usual = AMPConfig()
    return {f"amp_config.{name}": NOT_SCALED for name in SCALING if getattr(amp, name) != getattr(usual, name)}


def _declined_fusion(options: Options, plan: Plan) -> dict[str, str]:
    is_fused = any(plan.choice(knob) != KNOBS[knob].default for knob in ("compile", "fusion"))
    return {"fusion_config": NO_FUSION} if options.fusion_config is not None and not is_fused else {}


def pool_of(size: int) -> int:
    """The largest pool of the knobs table that takes no more than so many bytes; the smallest where all take more."""
    return max((each for each in POOL_SIZES if each <= size), default=POOL_SIZES[0]) if size else 0
