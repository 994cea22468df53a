"""Kernel classes: the time of a step by class of launch, against the least that the device allows. Pure.

The class comes from the name of a launch alone: of an operation of torch's, or of a kernel that Inductor has made.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from kitsune.timeline import ClassTime

MATRIX: Final = "matrix products"
ATTENTION: Final = "attention"
CONVOLUTION: Final = "convolutions"
ELEMENTWISE: Final = "norms and element-wise"
REDUCTION: Final = "reductions"
OPTIMIZER: Final = "optimizer"
COPY: Final = "copies and casts"
GAP: Final = "gaps"

#: Inductor names a kernel triton_<kind>_fused_<operations>_<number>; `for` is a loop over a list, as in an update.
FUSED: Final = re.compile(r"triton_(?P<kind>[a-z]+)_(?:fused_)?(?P<operations>.*?)_?\d*$")
KINDS: Final = {"for": OPTIMIZER, "tem": MATRIX, "red": REDUCTION, "per": REDUCTION, "poi": ELEMENTWISE}
#: The first class of which a word is in the operation's name, as a part between `_` or digits; all else is
#: element-wise. What is done to lists of tensors (`_foreach_`), also clipping, counts as the optimizer's.
WORDS: Final = {
    OPTIMIZER: "adam adamw adagrad sgd lion lamb foreach update_kernel",
    ATTENTION: "attention scaled_dot_product flash",
    CONVOLUTION: "convolution conv",
    MATRIX: "mm addmm bmm baddbmm linear matmul gemm",
    ELEMENTWISE: "layer_norm batch_norm group_norm rms_norm add_norm instance_norm dropout masked_fill",
    REDUCTION: "softmax log_softmax loss cross_entropy sum cumsum logsumexp mean norm var amax amin argmax topk pool "
    "embedding_dense_backward nll",
    COPY: "copy cast clone cat fill zero zeros ones full contiguous convert",
}
PATTERNS: Final = {
    name: re.compile(rf"(?<![a-z])({'|'.join(words.split())})(?![a-z])") for name, words in WORDS.items()
}
#: Words of a fused kernel that only moves or casts. A kernel without any word copies too.
MOVES: Final = frozenset(
    ("", *"to copy clone view t transpose permute expand slice cat stack convert element type squeeze".split())  # noqa: SIM905
)


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What the device was measured to do at best: bytes of memory in a us, and operations in a us by dtype."""

    bytes_per_us: float
    flops_per_us: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Work:
    """What a launch has to do at least: `nbytes` that it reads and writes once, and `flops` in `dtype`."""

    nbytes: int
    flops: int = 0
    dtype: str = ""


def class_times(
    names: Sequence[str], costs_us: Sequence[float], work: Sequence[Work], ceilings: Ceilings, gap_us: float = 0.0
) -> tuple[ClassTime, ...]:
    """The classes by total time, the longest first. `gap_us`: the part of each cost in which nothing runs yet.

    The floor of a class is the sum over its launches, each by the slower of its bytes and its products.
    """
    found: dict[str, list[tuple[float, float]]] = {}
    for name, cost_us, each in zip(names, costs_us, work, strict=True):
        busy_us = max(cost_us - gap_us, 0.0)
        found.setdefault(class_of(name), []).append((busy_us, min(busy_us, floor_us(each, ceilings))))
    if gap_us and found:
        found[GAP] = [(gap_us, 0.0)] * len(costs_us)
    rows = (class_time(name, each) for name, each in found.items())
    return tuple(sorted(rows, key=lambda row: (-row.total_us, row.name)))


def class_time(name: str, times_us: Iterable[tuple[float, float]]) -> ClassTime:
    took_us, floors_us = zip(*times_us, strict=True)
    return ClassTime(name, len(took_us), sum(took_us), sum(floors_us))


def floor_us(work: Work, ceilings: Ceilings) -> float:
    """The time to move the bytes or to compute, whichever is longer. Of an unknown dtype only the bytes count."""
    rate = ceilings.flops_per_us.get(work.dtype, 0.0)
    return max(work.nbytes / ceilings.bytes_per_us, work.flops / rate if rate else 0.0)


def class_of(name: str) -> str:
    """The class of a launch by its name: of an operation, of a kernel of ours, or of one that Inductor made."""
    fused = FUSED.match(name)
    if fused is None:
        return class_of_operation(name)
    kind, operations = fused["kind"], fused["operations"]
    if kind == "tem" and PATTERNS[CONVOLUTION].search(operations):
        return CONVOLUTION
    if kind == "poi" and MOVES.issuperset(operations.split("_")):
        return COPY
    found = KINDS.get(kind, ELEMENTWISE)
    is_norm = found == REDUCTION and PATTERNS[ELEMENTWISE].search(operations)
    return ELEMENTWISE if is_norm else found


def class_of_operation(name: str) -> str:
    return next((each for each, pattern in PATTERNS.items() if pattern.search(name)), ELEMENTWISE)
