"""Pattern: what a kernel of ours replaces, found node by node; and the table of ours, in the order they are tried."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

from torch.fx import Node

from kitsune.errors import SettingsError
from kitsune.fusion import elementwise, losses, norms
from kitsune.fusion.config import FusionConfig
from kitsune.fusion.match import Match

Kind = Literal["elementwise", "reduction", "matmul"]
KINDS: Final = ("elementwise", "reduction", "matmul")


@dataclass(frozen=True, slots=True)
class Pattern:
    """`find` takes a node and says how the pattern ends there: the match; or why it is a near miss; or None.

    `kind` is the switch of FusionConfig that turns it off.
    """

    name: str
    kind: Kind
    find: Callable[[Node], Match | str | None]

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise SettingsError(f"Pattern.kind is {self.kind!r}; use one of {', '.join(KINDS)}")

    def is_enabled(self, config: FusionConfig) -> bool:
        return bool(getattr(config, f"enable_{self.kind}"))


PATTERNS: Final = (
    Pattern("linear_cross_entropy", "matmul", losses.linear_cross_entropy),
    Pattern("add_layer_norm", "reduction", norms.add_layer_norm),
    Pattern("add_rms_norm", "reduction", norms.add_rms_norm),
    Pattern("layer_norm", "reduction", norms.layer_norm),
    Pattern("rms_norm", "reduction", norms.rms_norm),
    Pattern("linear_activation", "matmul", elementwise.linear_activation),
    Pattern("swiglu", "elementwise", elementwise.swiglu),
    Pattern("dropout_add", "elementwise", elementwise.dropout_add),
    Pattern("batch_norm_relu", "reduction", elementwise.batch_norm_relu),
    Pattern("softmax", "reduction", elementwise.softmax),
    Pattern("cross_entropy", "reduction", losses.cross_entropy),
)
