"""FusionConfig: kernel fusion as the user asks for it by hand."""

import math
from dataclasses import dataclass
from numbers import Integral, Real

from kitsune.errors import SettingsError

FLAGS = ("enable_elementwise", "enable_reduction", "enable_matmul")


@dataclass(frozen=True, kw_only=True, slots=True)
class FusionConfig:
    """Which patterns of ours are looked for, and which matches are kept.

    The flags turn off our patterns of their kind; Inductor fuses by rules of its own, whatever they say. No kernel
    stands for more than `max_fusion_size` operations, and this Inductor is told, too. A kernel of ours is kept where it
    is measured to be `min_fusion_benefit` times as fast as what it replaces. Raises SettingsError for other values than
    True and False, a whole number from 1, a finite number from 0.
    """

    enable_elementwise: bool = True
    enable_reduction: bool = True
    enable_matmul: bool = True
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
