"""Pattern: what a kernel replaces; and the table of built-in patterns, in the order in which they are tried."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch.fx import Node

from kitsune.errors import SettingsError
from kitsune.fusion import attentions, convolutions, elementwise, losses, mlps, norms, pools, rotary
from kitsune.fusion.config import FusionConfig
from kitsune.fusion.match import Found, Match
from kitsune.kernels.dtypes import DTYPES

Kind = Literal["elementwise", "reduction", "matmul", "pooling"]
KINDS: Final = ("elementwise", "reduction", "matmul", "pooling")
NAMES: Final[Mapping[torch.dtype, str]] = dict(zip(DTYPES, ("fp32", "bf16", "fp16"), strict=True))
#: Dtypes of kernels that were faster than Inductor's, in at least one shape, in these only (on an H200, by
#: `python -m benchmarks.kernel_table`). Also for compiler="eager", since Inductor is available wherever kernels are.
BF16: Final = (torch.bfloat16,)
HALF: Final = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Pattern:
    """A pattern to replace.

    `find` takes the last node of a possible match and returns the match; or, for a near miss, the reason why it is
    none; or None. `kind`: the flag of FusionConfig that disables it. `dtypes`: those in which it is offered. It is not
    offered where its kernel was never measured to be faster than Inductor's.
    """

    name: str
    kind: Kind
    find: Callable[[Node], Found]
    dtypes: Collection[torch.dtype] = DTYPES

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise SettingsError(f"Pattern.kind is {self.kind!r}; use one of {', '.join(KINDS)}")

    def is_enabled(self, config: FusionConfig) -> bool:
        return bool(getattr(config, f"enable_{self.kind}"))

    def why_not(self, match: Match) -> str | None:
        """The reason why it is not offered for a match, or None."""
        if match.runs_in in self.dtypes or match.runs_in not in NAMES:
            return None
        if not self.dtypes:
            return "not offered: its kernel was not measured yet"
        return f"not offered in {NAMES[match.runs_in]}: measured never faster than Inductor, see docs/benchmarks.md"


PATTERNS: Final = (
    Pattern("linear_cross_entropy", "matmul", losses.linear_cross_entropy, HALF),
    Pattern("add_layer_norm", "reduction", norms.add_layer_norm),
    Pattern("add_rms_norm", "reduction", norms.add_rms_norm),
    Pattern("layer_norm", "reduction", norms.layer_norm),
    Pattern("rms_norm", "reduction", norms.rms_norm),
    Pattern("gated_mlp", "matmul", mlps.gated_mlp, BF16),
    Pattern("mlp", "matmul", mlps.mlp, HALF),
    Pattern("linear_activation", "elementwise", elementwise.linear_activation),
    Pattern("patch_convolution", "matmul", convolutions.patch_convolution),
    Pattern("stem_convolution", "matmul", convolutions.stem_convolution, BF16),
    Pattern("pointwise_convolution", "matmul", convolutions.pointwise_convolution, BF16),
    Pattern("projected_attention", "matmul", attentions.projected_attention, BF16),
    Pattern("multi_head_attention", "matmul", attentions.multi_head_attention, HALF),
    Pattern("attention", "matmul", attentions.attention, HALF),
    Pattern("swiglu", "elementwise", elementwise.swiglu, BF16),
    Pattern("rope", "elementwise", rotary.rope),
    Pattern("dropout_add", "elementwise", elementwise.dropout_add),
    Pattern("batch_norm_relu", "reduction", elementwise.batch_norm_relu),
    Pattern("max_pool", "pooling", pools.max_pool),
    Pattern("softmax", "reduction", elementwise.softmax),
    Pattern("cross_entropy", "reduction", losses.cross_entropy),
)
