"""Presets: configurations that an expert would try by hand, in order, and which of them plain torch offers.

The order: the best guess for the device (half precision, compiled, captured, several streams); the strongest
configuration of plain torch, so that a search that is cut short has a rival; then variants that most often improve the
best guess. Choices that do not apply (no graphs on the device, no convolutions in the model) are dropped from a preset;
of presets that become equal, the first stays.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from kitsune.knobs import KNOBS, Choice
from tuner.search.space import Configuration, Item, Space

#: Wished for beside a compiler only: what fails of the compiler may fail of them, too.
BESIDE_COMPILE: Final = frozenset({"fusion"})


@dataclass(frozen=True, slots=True)
class Named:
    """A configuration with the name under which it is reported."""

    name: str
    knobs: Configuration


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """A configuration template that is resolved on a space.

    It is dropped if one of its `needs` does not apply. For each of its `wishes`, the first choice that applies is taken
    unless `needs` sets the knob.
    """

    name: str
    needs: Mapping[str, Choice]
    wishes: Mapping[str, tuple[Choice, ...]]

    def resolve(self, space: Space, avoid: Iterable[Item] = ()) -> dict[str, Choice] | None:
        """The configuration on this space without the choices to avoid, or None."""
        avoided = frozenset(avoid)
        if avoided & set(space.canonical(self.needs).items()):
            return None
        knobs = dict(self.needs)
        for knob, choices in self.wishes.items():
            if knob not in self.needs and ("compile" in knobs or knob not in BESIDE_COMPILE):
                knobs |= first_allowed(space, knobs, knob, choices, avoided)
        return space.canonical(knobs) if space.allows(knobs) is None else None


def first_allowed(
    space: Space, knobs: Configuration, knob: str, choices: Iterable[Choice], avoid: frozenset[Item]
) -> dict[str, Choice]:
    """{knob: the first choice that adds no objection to the configuration}, or {}."""
    before = set(space.objections(knobs))
    allowed = (c for c in choices if (knob, c) not in avoid and before.issuperset(space.objections({**knobs, knob: c})))
    choice = next(allowed, None)
    return {} if choice is None else {knob: choice}


HALF: Final[Mapping[str, tuple[Choice, ...]]] = {
    "layout": ("channels_last",),
    "precision": ("bf16", "fp16", "tf32"),
    "update": ("kitsune", "fused"),
}
FULL: Final[Mapping[str, tuple[Choice, ...]]] = {**HALF, "precision": ("tf32",)}
#: What full GPUs gain most from. On an H200 the kernels around products took 12 % off the step of a ViT-B/16 with 64
#: images and 5 % off GPT-2's at 8x512, and the copies 1 and 2 % (results/knobs/2026-11-29-h200-3.jsonl). Rounded
#: activations took another 6 % off the ViT's (results/knobs/2026-11-30-h200-2.jsonl).
PRODUCTS: Final[Mapping[str, tuple[Choice, ...]]] = {
    "compile": ("default",),
    "fusion": ("products",),
    "weights": ("bf16_copies",),
    "activations": ("bf16",),
    "masks": ("dropped",),
}
GRAPHS: Final[Mapping[str, tuple[Choice, ...]]] = {"capture": ("step", "segments")}
#: Recorded spaces of five models hold 25 pairs that differ only in one or four streams, one of each pair near the best.
#: Four streams were faster in all pairs, by 4 to 26 % in the median of a space (python -m benchmarks.pairs). An MLP
#: gained nothing; its comparison of schedules keeps one stream.
ON_STREAMS: Final[Mapping[str, tuple[Choice, ...]]] = {**HALF, **PRODUCTS, **GRAPHS, "streams": (4,)}
AT_ITS_BEST: Final[Mapping[str, tuple[Choice, ...]]] = {
    "layout": ("channels_last",),
    "precision": ("bf16", "tf32"),
    "update": ("fused",),
}

REDUCE_OVERHEAD: Final = Preset(name="reduce_overhead", needs={"compile": "reduce-overhead"}, wishes=AT_ITS_BEST)
COMPILE: Final = Preset(name="compile", needs={"compile": "default"}, wishes=AT_ITS_BEST)
EAGER_BF16: Final = Preset(name="eager_bf16", needs={"precision": "bf16"}, wishes={})
MAX_AUTOTUNE: Final = Preset(name="max_autotune", needs={"compile": "max-autotune"}, wishes=AT_ITS_BEST)
ONE_GRAPH: Final = Preset(name="best guess, one stream", needs={}, wishes={**HALF, **PRODUCTS, **GRAPHS})
STOCK: Final = (REDUCE_OVERHEAD, COMPILE, EAGER_BF16, MAX_AUTOTUNE)

#: The strongest configuration of plain torch. Without graphs, `compile` took 1.01 to 5 times as long in each of 47 runs
#: of eight models on H100s and H200s, and compiled for 20 to 180 s of their five minutes.
RIVAL: Final = Preset(
    name="rival of plain torch", needs={}, wishes={"compile": ("reduce-overhead", "default"), **AT_ITS_BEST}
)

BEST_GUESS: Final = Preset(name="best guess", needs={}, wishes=ON_STREAMS)
NOT_COMPILED: Final = Preset(
    name="best guess, not compiled", needs={}, wishes={**HALF, **GRAPHS, "streams": ON_STREAMS["streams"]}
)
# Without Inductor's mix-order reduction a ViT-B/16 is 3 % faster on an H200. Near the best of recorded spaces, all of
# Kitsune's kernels were faster than none in 9 of 10 pairs (1 to 2 %; an MLP and a DLRM lost 2 to 4 %), cuDNN's
# attention in 14 of 15 (2 to 3 %), and fp16 in convolutional models (2 % and more). With coordinate descent a ResNet-50
# is 8 % (H200) and 3 % (H100) faster than without, and 5 and 0.1 % faster than the best without; it compiled for
# 345 and 413 s when all kernels were tuned (decision 0097). Transformers, an MLP, a DLRM and a LeNet-5 gained nothing.
OPENING: Final = (
    BEST_GUESS,
    RIVAL,
    Preset(
        name="best guess, no mix-order reduction",
        needs={"compile": "default", "inductor": "no_mix_order"},
        wishes=ON_STREAMS,
    ),
    Preset(name="best guess, our kernels", needs={"fusion": "kitsune", "compile": "default"}, wishes=ON_STREAMS),
    Preset(name="best guess, cuDNN's attention", needs={"attention": "cudnn"}, wishes=ON_STREAMS),
    NOT_COMPILED,
    Preset(name="best guess, fp16", needs={"precision": "fp16"}, wishes=ON_STREAMS),
    Preset(
        name="best guess, coordinate descent",
        needs={"layout": "channels_last", "compile": "coordinate-descent", "capture": "step"},
        wishes=ON_STREAMS,
    ),
)
#: The opening if there is time for only a few trials that compile. For a GoogLeNet on an H200 none of these ended in
#: two minutes; the trial that does not compile took 32 s, and its step took 0.62 times that of `reduce-overhead`
#: (results/search/2026-11-28-h200-12.jsonl).
TIGHT_OPENING: Final = (BEST_GUESS, RIVAL, NOT_COMPILED, *OPENING[2:])
LATER: Final = (
    Preset(name="best guess, full precision", needs={}, wishes={**ON_STREAMS, **FULL}),
    COMPILE,
    Preset(
        name="best guess, Inductor's kernels only",
        needs={"fusion": "off", "weights": "given", "activations": "given", "compile": "default"},
        wishes={**HALF, **GRAPHS, "streams": ON_STREAMS["streams"]},
    ),
    ONE_GRAPH,
    Preset(name="one stream, not compiled", needs={}, wishes={**HALF, **GRAPHS}),
    EAGER_BF16,
    Preset(name="full precision, not compiled", needs={}, wishes={**FULL, **GRAPHS}),
)
SLOW: Final = (
    MAX_AUTOTUNE,
    Preset(
        name="best guess, autotuned",
        needs={"compile": "max-autotune-no-cudagraphs"},
        wishes={**HALF, **GRAPHS},
    ),
)
# Variants of the best rival in the other precision and the other layout. AMP alone slows launch-bound steps down (eager
# MLP on an H200: 1.08 ms in fp32, 1.28 ms in bf16), so a rival in bf16 only would be too weak.
STOCK_VARIANTS: Final[Mapping[str, tuple[tuple[Choice, ...], ...]]] = {
    "precision": (("bf16",), ("tf32", "fp32")),
    "layout": (("channels_last",), ("contiguous",)),
}


def is_stock(knobs: Configuration) -> bool:
    """Whether a configuration without defaults is one that plain torch offers."""
    return all(knob in KNOBS and choice in KNOBS[knob].stock for knob, choice in knobs.items())


def resolved(presets: Iterable[Preset], space: Space, avoid: Iterable[Item] = ()) -> tuple[Named, ...]:
    """The presets resolved on this space without duplicates; one equal to a stock preset has the stock preset's name.

    Choices in `avoid` (known to fail here) are replaced by the next choice, if there is one.
    """
    avoided = frozenset(avoid)
    rivals = [(preset.name, preset.resolve(space, avoided)) for preset in STOCK]
    found: list[Named] = []
    for preset in presets:
        knobs = preset.resolve(space, avoided)
        if knobs is not None and all(knobs != other.knobs for other in found):
            found.append(Named(next((name for name, rival in rivals if rival == knobs), preset.name), knobs))
    return tuple(found)


def stock_variants(space: Space, knobs: Configuration, avoid: Iterable[Item] = ()) -> tuple[dict[str, Choice], ...]:
    """A stock rival in the other precision and in the other layout, where they apply."""
    avoided = frozenset(avoid)
    variants: list[dict[str, Choice]] = []
    for knob, alternatives in STOCK_VARIANTS.items():
        for choices in alternatives:
            variant = space.canonical({**knobs, **first_allowed(space, knobs, knob, choices, avoided)})
            if variant != space.canonical(knobs):
                variants.append(variant)
    return tuple(variants)
