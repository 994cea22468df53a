"""Trials in; which of them worked, which is the best, and which choices made others fail, out. Pure."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations
from typing import Final

from kitsune.knobs import OWN_GRAPHS
from tuner.records import FailureKind, Trial
from tuner.search.presets import is_stock
from tuner.search.space import Configuration, Item, Space

TAKES_MEMORY: Final = ("streams", "capture")  # the most first
TORCHS_GRAPHS: Final = frozenset(("compile", choice) for choice in OWN_GRAPHS)


def is_late(trial: Trial) -> bool:
    """Whether its time was over before it came to something."""
    return trial.failure is not None and trial.failure.kind is FailureKind.TIMEOUT


def is_success(trial: Trial) -> bool:
    return trial.failure is None and trial.comparison is not None


def best(trials: Iterable[Trial]) -> Trial | None:
    """The successful trial with the highest median speedup over its own baseline; of equals the first.

    Confirmations are left out: they measure a choice that was made already, and may be against another baseline.
    """
    return max(
        (trial for trial in trials if is_success(trial) and trial.source.is_search),
        key=lambda trial: (speedup(trial), -trial.number),
        default=None,
    )


def best_stock(trials: Iterable[Trial]) -> Trial | None:
    """The best of what plain torch offers, whoever proposed it, the step as given included: gains are over this one."""
    return best(trial for trial in trials if is_stock(trial.knobs))


def speedup(trial: Trial) -> float:
    """Median speedup of a successful trial over its own baseline."""
    assert trial.comparison is not None
    return trial.comparison.speedup.median


def blamed(trials: Sequence[Trial]) -> frozenset[Item]:
    """Choices that a failed trial leaves as its only suspect, since all its others were seen to work elsewhere."""
    return frozenset(item for suspects in suspects_of(trials) if len(suspects) == 1 for item in suspects)


def blamed_pairs(trials: Sequence[Trial]) -> frozenset[frozenset[Item]]:
    """Pairs of choices that failed together in two trials and worked together in none, where each choice did work.

    As TF32 on several streams, where a library launches what cannot be planned.
    """
    cleared = {pair for trial in trials if is_success(trial) for pair in pairs_of(trial.knobs)}
    unexplained = [
        trial for trial, suspects in zip(filter(blames, trials), suspects_of(trials), strict=True) if not suspects
    ]
    counted = Counter(pair for trial in unexplained for pair in pairs_of(trial.knobs))
    return frozenset(pair for pair, count in counted.items() if count > 1) - cleared


def pairs_of(knobs: Configuration) -> Iterator[frozenset[Item]]:
    return map(frozenset, combinations(knobs.items(), 2))


def suspected(space: Space, trials: Sequence[Trial]) -> frozenset[Item]:
    """What the next presets do without: the knobs of half of the choices that failed at least twice and never worked.

    Presets share most of their choices, so that one which fails would fail all of them. It is found as by bisection:
    what works without it clears the others, and what fails again ranks its own first. The whole knob is left out, as
    the other half precision often fails with the one. The half: what failed most often, of equals what is applied last.
    """
    counted = Counter(item for suspects in suspects_of(trials) for item in suspects)
    order = list(space.table)
    ranked = [(count, order.index(item[0]), item) for item, count in counted.items() if item[0] in order and count > 1]
    at_fault = sorted(ranked, key=lambda each: each[:2])
    return all_choices(space, {item[0] for _, _, item in at_fault[len(at_fault) // 2 :]})


def outgrown(space: Space, trials: Sequence[Trial]) -> frozenset[Item]:
    """What the next presets do without where trials ran out of memory: several streams, or else the graph.

    A graph has a pool of its own, and several streams a larger one.
    """
    worked = {knob for trial in trials if is_success(trial) for knob in trial.knobs}
    failed = [trial for trial in trials if trial.failure and trial.failure.kind is FailureKind.OUT_OF_MEMORY]
    largest = {next((knob for knob in TAKES_MEMORY if knob in trial.knobs), "") for trial in failed} - worked
    return all_choices(space, largest)


def failed_graphs(trials: Sequence[Trial]) -> frozenset[Item]:
    """Torch's own graphs, where a trial with them failed, for whatever reason, and none worked.

    One failure is enough: the rival of plain torch is needed, and does without them next.
    """
    worked = {item for trial in trials if is_success(trial) for item in trial.knobs.items()}
    failed = {item for trial in trials if trial.failure is not None for item in trial.knobs.items()}
    return TORCHS_GRAPHS & failed - worked


def all_choices(space: Space, knobs: Iterable[str]) -> frozenset[Item]:
    """Of those knobs that the space has."""
    return frozenset((knob, choice) for knob in knobs if knob in space.table for choice in space.table[knob].choices)


def shunned(space: Space, trials: Sequence[Trial]) -> frozenset[Item]:
    """Choices that presets do without, by what has failed."""
    return blamed(trials) | suspected(space, trials) | outgrown(space, trials) | failed_graphs(trials)


def suspects_of(trials: Sequence[Trial]) -> list[set[Item]]:
    """Of each failed trial the choices that worked in no other."""
    cleared = {item for trial in trials if is_success(trial) for item in trial.knobs.items()}
    return [set(trial.knobs.items()) - cleared for trial in filter(blames, trials)]


def blames(trial: Trial) -> bool:
    """Whether it failed for its choices. Running out of memory blames nobody: it depends on everything at once."""
    return trial.failure is not None and trial.failure.kind is not FailureKind.OUT_OF_MEMORY
