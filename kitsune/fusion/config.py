"""FusionConfig: kernel fusion chosen by the user."""

import math
from dataclasses import dataclass
from numbers import Integral, Real

from kitsune.errors import SettingsError

FLAGS = ("enable_elementwise", "enable_reduction", "enable_matmul", "enable_pooling")


@dataclass(frozen=True, kw_only=True, slots=True)
class FusionConfig:
    """Which of Kitsune's fusion patterns are searched for, and which matches are replaced.

    Each flag disables the patterns of its kind; Inductor's own fusion does not depend on them. A kernel replaces at
    most `max_fusion_size` operations; this limit is passed to Inductor too. A match is replaced if its kernel is
    measured to be at least `min_fusion_benefit` times as fast. Raises SettingsError unless the flags are booleans, the
    size is an integer from 1 on and the benefit a finite number from 0 on.
    """

    enable_elementwise: bool = True
    enable_reduction: bool = True
    enable_matmul: bool = True
    enable_pooling: bool = True
    max_fusion_size: int = 64
    min_fusion_benefit: float = 1.0

    def __post_init__(self) -> None:
        for name in FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise SettingsError(f"FusionConfig.{name} is {getattr(self, name)!r}; it must be True or False")
        size, benefit = self.max_fusion_size, self.min_fusion_benefit
        if not isinstance(size, Integral) or isinstance(size, bool) or size < 1:
            raise SettingsError(f"FusionConfig.max_fusion_size is {size!r}; it must be a whole number from 1")
        if not isinstance(benefit, Real) or isinstance(benefit, bool) or not 0 <= benefit < math.inf:
            raise SettingsError(f"FusionConfig.min_fusion_benefit is {benefit!r}; it must be a finite number from 0")
