"""Which choices may be tried on this device and model, which may stand together, and what one would try by hand.

The knobs table and the reasons why some choices do not apply go in; allowed configurations come out. Pure.
A configuration is a mapping from knob to choice; knobs that are left out are at their default.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Final, Self

from kitsune.knobs import KNOBS, Choice, Exclusion, Knob, clashes

Item = tuple[str, Choice]
Configuration = Mapping[str, Choice]


@dataclass(frozen=True, slots=True)
class Space:
    """The knobs table without the choices that do not apply here. The default of a knob always applies."""

    table: Mapping[str, Knob]
    inapplicable: Mapping[str, str]

    @classmethod
    def of(cls, inapplicable: Mapping[str, str] | None = None, table: Mapping[str, Knob] = KNOBS) -> Self:
        """`inapplicable` maps "knob=choice" to the reason; names that are not in the table are of no effect."""
        return cls(dict(table), dict(inapplicable or {}))

    def choices(self, knob: str) -> tuple[Choice, ...]:
        """What may be chosen for the knob, default first; empty when there is no such knob."""
        entry = self.table.get(knob)
        if entry is None:
            return ()
        default = entry.default
        return tuple(
            choice for choice in entry.choices if choice == default or f"{knob}={choice}" not in self.inapplicable
        )

    def searchable(self) -> dict[str, tuple[Choice, ...]]:
        """The knobs that leave a choice, with what a search may choose, in table order."""
        found = {name: tuple(filter(knob.is_searched, self.choices(name))) for name, knob in self.table.items()}
        return {name: choices for name, choices in found.items() if len(choices) > 1}

    def allows(self, knobs: Configuration) -> str | None:
        """None when the configuration may be tried, otherwise the first reason why not."""
        for knob, choice in knobs.items():
            if knob not in self.table:
                return f"there is no knob {knob!r}"
            if choice not in self.table[knob].choices:
                return f"{knob} has no choice {choice!r}"
            reason = self.inapplicable.get(f"{knob}={choice}")
            if reason is not None and choice != self.table[knob].default:
                return reason
        for owner, exclusion in clashes(knobs, self.table):
            other = self.table[exclusion.other]
            pair = f"{owner.name}={knobs[owner.name]} beside {other.name}={knobs.get(other.name, other.default)}"
            return f"{pair}: {exclusion.reason}"
        return None

    def is_slow(self, knobs: Configuration) -> bool:
        """Whether a choice takes minutes to compile."""
        return any(choice in self.table[knob].slow for knob, choice in knobs.items() if knob in self.table)

    def canonical(self, knobs: Configuration) -> dict[str, Choice]:
        """The same configuration without defaults and without unknown knobs, in table order."""
        return {name: knobs[name] for name, knob in self.table.items() if name in knobs and knobs[name] != knob.default}

    def repair(self, knobs: Configuration, keep: str | None = None) -> dict[str, Choice]:
        """The nearest allowed configuration: what does not apply, or clashes, goes back to its default.

        Of two knobs that clash, the one that declares the exclusion gives way, unless it is `keep` or was made to
        serve it.
        """
        fixed = {knob: choice for knob, choice in knobs.items() if choice in self.choices(knob)}
        kept = {keep}
        for _ in range(sum(len(knob.excludes) for knob in self.table.values()) + 1):
            clash = next(clashes(fixed, self.table), None)
            if clash is None:
                return self.canonical(fixed)
            owner, exclusion = clash
            if owner.name not in kept:
                fixed[owner.name] = owner.default
                continue
            served = self._instead(exclusion, fixed)
            if served is None or exclusion.other in kept:
                break
            fixed[exclusion.other] = served
            kept.add(exclusion.other)
        return {}

    def _instead(self, exclusion: Exclusion, knobs: Configuration) -> Choice | None:
        """What the other knob of an exclusion may be so that they do not clash: the nearest, or the first, or None."""
        free = [choice for choice in self.choices(exclusion.other) if choice not in exclusion.other_choices]
        now = knobs.get(exclusion.other, self.table[exclusion.other].default)
        nearest = exclusion.instead.get(now)
        return nearest if nearest in free else next(iter(free), None)

    def neighbours(self, knobs: Configuration) -> Iterator[tuple[Item, dict[str, Choice]]]:
        """Every allowed configuration with one knob changed, in table order, each with the change that made it.

        Where the new choice clashes with another knob, that one gives way as well: otherwise a search could never cross
        from `capture=step` to a compile mode with graphs of its own, or back to the same kernels without.
        """
        here = self.repair(knobs)
        for knob, choices in self.searchable().items():
            current = here.get(knob, self.table[knob].default)
            for choice in choices:
                moved = self.repair({**here, knob: choice}, keep=knob)
                if choice != current and moved.get(knob, self.table[knob].default) == choice:
                    yield (knob, choice), moved

    def configurations(self) -> Iterator[dict[str, Choice]]:
        """Every allowed configuration once, the default first. Lazy: their number is a product."""
        searchable = self.searchable()
        for chosen in product(*searchable.values()):
            knobs = dict(zip(searchable, chosen, strict=True))
            if next(clashes(knobs, self.table), None) is None:
                yield self.canonical(knobs)


@dataclass(frozen=True, slots=True)
class Named:
    """A configuration with the name under which it is reported."""

    name: str
    knobs: Configuration


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """A configuration as one would write it by hand, before it is known what applies.

    It is dropped when something it needs does not apply; of each wish the first choice that applies is taken.
    """

    name: str
    needs: Mapping[str, Choice]
    wishes: Mapping[str, tuple[Choice, ...]]

    def resolve(self, space: Space, avoid: Iterable[Item] = ()) -> dict[str, Choice] | None:
        """The configuration on this space without the choices to avoid, or None."""
        avoided = frozenset(avoid)
        if avoided & set(self.needs.items()) or space.allows(self.needs) is not None:
            return None
        knobs = dict(self.needs)
        for knob, choices in self.wishes.items():
            knobs |= first_allowed(space, knobs, knob, choices, avoided)
        return space.canonical(knobs)


def first_allowed(
    space: Space, knobs: Configuration, knob: str, choices: Iterable[Choice], avoid: frozenset[Item]
) -> dict[str, Choice]:
    """{knob: the first choice that may be added to the configuration}, or {}."""
    allowed = (c for c in choices if (knob, c) not in avoid and space.allows({**knobs, knob: c}) is None)
    choice = next(allowed, None)
    return {} if choice is None else {knob: choice}


AT_ITS_BEST: Final[Mapping[str, tuple[Choice, ...]]] = {
    "layout": ("channels_last",),
    "precision": ("bf16", "tf32"),
    "update": ("fused",),
}
STOCK: Final = (
    Preset(name="eager", needs={}, wishes={}),
    Preset(name="eager_bf16", needs={"precision": "bf16"}, wishes={}),
    Preset(name="compile", needs={"compile": "default"}, wishes=AT_ITS_BEST),
    Preset(name="reduce_overhead", needs={"compile": "reduce-overhead"}, wishes=AT_ITS_BEST),
    Preset(name="max_autotune", needs={"compile": "max-autotune"}, wishes=AT_ITS_BEST),
)
# The other layout and the other precisions of the best rival. AMP alone makes launch-bound steps slower (eager MLP on
# an H200: 1.08 ms in fp32, 1.28 ms in bf16), so a rival in bf16 only would not be at its best.
STOCK_VARIANTS: Final[Mapping[str, tuple[tuple[Choice, ...], ...]]] = {
    "layout": (("channels_last",), ("contiguous",)),
    "precision": (("bf16",), ("tf32", "fp32")),
}

HALF: Final[Mapping[str, tuple[Choice, ...]]] = {
    "layout": ("channels_last",),
    "precision": ("bf16", "fp16", "tf32"),
    "update": ("kitsune", "fused"),
}
FULL: Final[Mapping[str, tuple[Choice, ...]]] = {**HALF, "precision": ("tf32",)}
GRAPHS: Final[Mapping[str, tuple[Choice, ...]]] = {"capture": ("step", "segments")}
INDUCTOR: Final[Mapping[str, tuple[Choice, ...]]] = {"compile": ("default",)}
SEEDS: Final = (
    Preset(name="half, compiled, one graph", needs={}, wishes={**HALF, **INDUCTOR, **GRAPHS}),
    Preset(
        name="half, compiled, one graph on streams",
        needs={"capture": "step", "streams": 4},
        wishes={**HALF, **INDUCTOR},
    ),
    Preset(name="half, one graph", needs={}, wishes={**HALF, **GRAPHS}),
    Preset(
        name="half, fused and compiled, one graph",
        needs={"fusion": "kitsune", "compile": "default"},
        wishes={**HALF, **GRAPHS},
    ),
    Preset(name="full, compiled, one graph", needs={}, wishes={**FULL, **INDUCTOR, **GRAPHS}),
    Preset(name="full, one graph", needs={}, wishes={**FULL, **GRAPHS}),
    Preset(
        name="half, autotuned, one graph",
        needs={"compile": "max-autotune-no-cudagraphs"},
        wishes={**HALF, **GRAPHS},
    ),
)


def stock_rivals(space: Space, avoid: Iterable[Item] = ()) -> tuple[Named, ...]:
    """What a user of plain torch would try by hand, each at its best.

    Choices in `avoid` (known to fail here) are left out where there is another one.
    """
    return resolved(STOCK, space, avoid)


def stock_variants(space: Space, knobs: Configuration, avoid: Iterable[Item] = ()) -> tuple[dict[str, Choice], ...]:
    """A stock rival in the other layout and in the other precision, where they apply."""
    avoided = frozenset(avoid)
    variants: list[dict[str, Choice]] = []
    for knob, alternatives in STOCK_VARIANTS.items():
        for choices in alternatives:
            variant = space.canonical({**knobs, **first_allowed(space, knobs, knob, choices, avoided)})
            if variant != space.canonical(knobs):
                variants.append(variant)
    return tuple(variants)


def expert_seeds(space: Space, avoid: Iterable[Item] = ()) -> tuple[Named, ...]:
    """What an expert would try first, best guess first. Choices in `avoid` are left out."""
    return resolved(SEEDS, space, avoid)


def resolved(presets: Iterable[Preset], space: Space, avoid: Iterable[Item]) -> tuple[Named, ...]:
    """The presets on this space; of two that come to the same configuration, the first."""
    avoided = frozenset(avoid)
    found: list[Named] = []
    for preset in presets:
        knobs = preset.resolve(space, avoided)
        if knobs is not None and all(knobs != other.knobs for other in found):
            found.append(Named(preset.name, knobs))
    return tuple(found)
