"""Options given by hand are a plan written by hand: the drop-in's documented options in, knobs out."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from kitsune.amp import AMPConfig
from kitsune.errors import SettingsError
from kitsune.fusion import FusionConfig
from kitsune.knobs import Choice
from kitsune.plan import Plan
from kitsune.streams import StreamConfig

UNITS = {"": 1, "B": 1, "KB": 1 << 10, "MB": 1 << 20, "GB": 1 << 30}
NOT_STEERED = "Inductor decides this itself and offers no switch for it"


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What the user said in so many words; `None` means that they did not say."""

    num_streams: int | None = None
    enable_fusion: bool | None = None
    enable_amp: bool | None = None
    memory_pool_size: int | str | None = None
    capture_graph: bool | None = None
    profile: bool | None = None
    amp_config: AMPConfig | None = None
    fusion_config: FusionConfig | None = None
    stream_config: StreamConfig | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Wish:
    """Options as a plan, with what goes along with it and what cannot be honoured (option -> reason)."""

    plan: Plan
    loss_scaling: Mapping[str, Any] = field(default_factory=dict)
    compile_options: Mapping[str, Any] = field(default_factory=dict)
    declined: Mapping[str, str] = field(default_factory=dict)


def wish_of(options: Options, plan: Plan | None, has_bf16: bool) -> Wish:
    """The plan, with every explicit option put over it. Without a plan, graphs are captured unless told otherwise."""
    knobs: dict[str, Choice] = dict(plan.knobs) if plan is not None else {"capture": "segments"}
    amp = options.amp_config or AMPConfig()
    if options.enable_amp is not None:
        half = (torch.bfloat16 if has_bf16 else torch.float16) if amp.dtype is None else amp.dtype
        wanted = options.enable_amp and amp.enabled
        knobs["precision"] = ("bf16" if half is torch.bfloat16 else "fp16") if wanted else "fp32"
    if options.enable_fusion is not None:
        # A compiled plan is fused already: enable_fusion=True has nothing to add to its mode.
        knobs["compile"] = knobs.get("compile", "default") if options.enable_fusion else "off"
    if options.capture_graph is not None:
        knobs["capture"] = "segments" if options.capture_graph else "none"
    if knobs.get("capture") == "step":
        knobs["capture"] = "segments"
    return Wish(
        plan=_with_knobs(plan, knobs),
        loss_scaling=_loss_scaling(amp) if options.amp_config is not None else {},
        compile_options=_compile_options(options.fusion_config),
        declined=_declined(options),
    )


def _with_knobs(plan: Plan | None, knobs: Mapping[str, Choice]) -> Plan:
    by_hand = Plan.by_hand(**knobs)
    return by_hand if plan is None else plan.model_copy(update={"knobs": by_hand.knobs})


def _loss_scaling(amp: AMPConfig) -> dict[str, Any]:
    names = ("init_scale", "growth_factor", "backoff_factor", "growth_interval")
    return {name: getattr(amp, name) for name in names}


def _compile_options(fusion: FusionConfig | None) -> dict[str, Any]:
    return {} if fusion is None else {"max_fusion_size": fusion.max_fusion_size}


def _declined(options: Options) -> dict[str, str]:
    declined = {}
    if options.num_streams is not None or options.stream_config is not None:
        declined["num_streams"] = "this version issues every launch on one stream"
    if options.memory_pool_size is not None:
        size = parse_bytes(options.memory_pool_size)
        declined["memory_pool_size"] = f"this version leaves memory to torch; a pool of {size} bytes is not reserved"
    if options.profile:
        declined["profile"] = "this version records no profile"
    fusion = options.fusion_config
    if fusion is not None:
        for name in ("enable_elementwise", "enable_reduction", "enable_matmul"):
            if not getattr(fusion, name):
                declined[f"fusion_config.{name}"] = NOT_STEERED
        if fusion.min_fusion_benefit != FusionConfig().min_fusion_benefit:
            declined["fusion_config.min_fusion_benefit"] = NOT_STEERED
    return declined


def parse_bytes(size: int | str) -> int:
    """512, '512MB' or '2GB' (binary units) in bytes. Raises SettingsError."""
    if isinstance(size, int) and not isinstance(size, bool) and size >= 0:
        return size
    text = str(size).strip().upper()
    number = text.rstrip("KMGB")
    factor = UNITS.get(text[len(number) :].strip())
    if factor is None or not number.strip().replace(".", "", 1).isdigit():
        raise SettingsError(f"memory_pool_size is {size!r}; use bytes or a string as '512MB' or '2GB'")
    return int(float(number) * factor)
