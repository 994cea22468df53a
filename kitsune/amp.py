"""Mixed precision by hand: a configuration, torch's autocast by it, and torch's scaler, which counts here."""

import math
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import torch

from kitsune.errors import SettingsError


@dataclass(frozen=True, kw_only=True, slots=True)
class AMPConfig:
    """Mixed precision as the user asks for it by hand; `enabled=False` asks for none.

    `dtype` None takes bfloat16 where the device has it, float16 with loss scaling elsewhere.

    The other numbers are torch.amp.GradScaler's and apply to float16 only.
    """

    dtype: torch.dtype | None = None
    enabled: bool = True
    growth_interval: int = 2000
    backoff_factor: float = 0.5
    growth_factor: float = 2.0
    init_scale: float = 65536.0

    def __post_init__(self) -> None:
        if self.dtype not in (None, torch.float16, torch.bfloat16):
            raise SettingsError(f"AMPConfig.dtype is {self.dtype}; use torch.float16 or torch.bfloat16")
        for name in ("growth_interval", "backoff_factor", "growth_factor", "init_scale"):
            value = getattr(self, name)
            if not isinstance(value, Real) or not 0 < value < math.inf:  # type: ignore[operator]
                raise SettingsError(f"AMPConfig.{name} is {value!r}; it must be a finite number greater than 0")
        if not self.backoff_factor < 1 < self.growth_factor:
            raise SettingsError("AMPConfig needs 0 < backoff_factor < 1 < growth_factor")
        if not isinstance(self.growth_interval, Integral):
            raise SettingsError(f"AMPConfig.growth_interval is {self.growth_interval!r}; it must be a whole number")


def half_of(config: AMPConfig, device_type: str) -> torch.dtype:
    """The dtype that the configuration means on such a device."""
    if config.dtype is not None:
        return config.dtype
    return torch.bfloat16 if device_type != "cuda" or has_bf16() else torch.float16


def has_bf16() -> bool:
    """Whether the current GPU computes in bfloat16 by itself."""
    return bool(torch.cuda.is_bf16_supported(including_emulation=False))


def usual_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def autocast(config: AMPConfig | None = None, *, device_type: str | None = None) -> torch.autocast:
    """torch.autocast by the configuration, as a context or a decorator; on the GPU where there is one.

    Raises SettingsError for what is no AMPConfig.
    """
    if not isinstance(config, AMPConfig | None):
        raise SettingsError(f"autocast() takes an AMPConfig, not {config!r:.100}; a device goes by device_type=")
    config, device_type = config or AMPConfig(), device_type or usual_device()
    return torch.autocast(device_type, dtype=half_of(config, device_type), enabled=config.enabled)


@dataclass(frozen=True, slots=True)
class ScalerStatistics:
    """What a GradScaler has done.

    `steps` so far, of which `skipped` were not taken, since a gradient was not finite. `scale`: as it is now.
    """

    steps: int
    skipped: int
    scale: float


class GradScaler(torch.amp.GradScaler):
    """torch.amp.GradScaler, with numbers from an AMPConfig if one is given, and a count of what it did.

    `numbers` and `arguments` are torch's own; those by name go over the configuration. bfloat16 needs no scaling: with
    that dtype the scaler is disabled, and passes everything through. Counting waits for nothing on the device until
    `statistics` is read.
    """

    def __init__(
        self, device: str | None = None, *numbers: Any, config: AMPConfig | None = None, **arguments: Any
    ) -> None:
        device = device or usual_device()
        if config is not None:
            is_needed = config.enabled and half_of(config, device) is torch.float16
            names = ("init_scale", "growth_factor", "backoff_factor", "growth_interval")
            arguments = {"enabled": is_needed, **{name: getattr(config, name) for name in names}, **arguments}
        super().__init__(device, *numbers, **arguments)
        self._steps = 0
        self._skipped: int | torch.Tensor = 0

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """As torch's, after every optimizer has stepped."""
        states = self._per_optimizer_states.values() if self._enabled else ()
        flags = [flag.reshape(()) for state in states for flag in state["found_inf_per_device"].values()]
        if flags:
            self._steps += 1  # before torch adds to the flags and forgets them
            self._skipped = self._skipped + torch.stack([flag.to(flags[0].device) > 0 for flag in flags]).any().int()
        super().update(new_scale)

    @property
    def statistics(self) -> ScalerStatistics:
        """How many steps there were, and how many of them were skipped. Waits for the device."""
        return ScalerStatistics(self._steps, int(self._skipped), self.get_scale())
