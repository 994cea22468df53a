"""FusionConfig: kernel fusion as the user asks for it by hand."""

from dataclasses import dataclass

from kitsune.errors import SettingsError


@dataclass(frozen=True, kw_only=True, slots=True)
class FusionConfig:
    """What may be fused: patterns of three kinds, of at most `max_fusion_size` operations (so Inductor is told, too).

    A kernel of ours is kept where it is measured to be `min_fusion_benefit` times as fast as what it replaces.
    """

    enable_elementwise: bool = True
    enable_reduction: bool = True
    enable_matmul: bool = True
    max_fusion_size: int = 64
    min_fusion_benefit: float = 1.0

    def __post_init__(self) -> None:
        if self.max_fusion_size < 1:
            raise SettingsError("FusionConfig.max_fusion_size must be at least 1")
