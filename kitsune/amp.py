"""AMPConfig: mixed precision as the user asks for it by hand."""

from dataclasses import dataclass

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
        if not 0 < self.backoff_factor < 1 < self.growth_factor:
            raise SettingsError("AMPConfig needs 0 < backoff_factor < 1 < growth_factor")
        if self.growth_interval < 1 or self.init_scale <= 0:
            raise SettingsError("AMPConfig needs growth_interval >= 1 and init_scale > 0")
