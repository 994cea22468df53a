"""AMPConfig: mixed precision as the user asks for it by hand."""

import math
from dataclasses import dataclass
from numbers import Integral, Real

import torch

from kitsune.errors import SettingsError


@dataclass(frozen=True, kw_only=True, slots=True)
class AMPConfig:
    """`dtype` None takes bfloat16 where the device has it, float16 with loss scaling elsewhere.

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
