"""Proposals that need no surrogate model: presets, and winning configurations of earlier runs."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from tuner.records import Source, Trial
from tuner.search.outcomes import best_stock
from tuner.search.presets import LATER, SLOW, Preset, is_stock, resolved, stock_variants
from tuner.search.space import Configuration, Item, Space


@dataclass(frozen=True, slots=True)
class Proposal:
    """A configuration to try, the source that proposed it, and its name if it has one."""

    knobs: Configuration
    source: Source
    name: str = ""


def opening(
    space: Space, presets: Iterable[Preset], known: Sequence[Configuration], avoid: frozenset[Item]
) -> list[Proposal]:
    """The first trials: the most similar earlier winner, the best guess, a rival; then other winners and presets."""
    learned = [Proposal(space.repair(space.searched(knobs)), Source.KNOWN) for knobs in known]
    first = named(presets, space, avoid)
    return [*learned[:1], *first[:2], *learned[1:], *first[2:]]


def by_hand(space: Space, trials: Sequence[Trial], avoid: frozenset[Item]) -> Iterator[Proposal]:
    """Further presets: the quick ones, variants of the best rival, and last those that take minutes to compile."""
    yield from named(LATER, space, avoid)
    leader = best_stock(trials)
    for variant in stock_variants(space, leader.knobs if leader else {}, avoid):
        yield Proposal(variant, Source.STOCK)
    yield from named(SLOW, space, avoid)


def named(presets: Iterable[Preset], space: Space, avoid: frozenset[Item]) -> list[Proposal]:
    return [
        Proposal(found.knobs, Source.STOCK if is_stock(found.knobs) else Source.SEED, found.name)
        for found in resolved(presets, space, avoid)
    ]
