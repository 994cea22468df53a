"""Evaluates trials: which succeeded, which is best, and which choices caused failures and are avoided."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations
from typing import Final

from kitsune.knobs import OWN_GRAPHS
from tuner.records import FailureKind, Trial
from tuner.search.presets import is_stock
from tuner.search.space import Configuration, Item, Space

TAKES_MEMORY: Final = ("streams", "capture")  # knobs that need extra memory, the most demanding first
TORCHS_GRAPHS: Final = frozenset(("compile", choice) for choice in OWN_GRAPHS)


def is_late(trial: Trial) -> bool:
    """Whether it timed out."""
    return trial.failure is not None and trial.failure.kind is FailureKind.TIMEOUT


def is_too_large(trial: Trial) -> bool:
    """Whether it ran out of memory, or needed more than the limit of its run."""
    return trial.failure is not None and trial.failure.kind in (FailureKind.OUT_OF_MEMORY, FailureKind.TOO_LARGE)


def is_success(trial: Trial) -> bool:
    return trial.failure is None and trial.comparison is not None


def best(trials: Iterable[Trial]) -> Trial | None:
    """The successful search trial with the highest median speedup over its own baseline; the first of equals.

    Confirmations are ignored: they measure a configuration that was already chosen, maybe against another baseline.
    """
    return max(
        (trial for trial in trials if is_success(trial) and trial.source.is_search),
        key=lambda trial: (speedup(trial), -trial.number),
        default=None,
    )


def best_stock(trials: Iterable[Trial]) -> Trial | None:
    """The best configuration of plain torch, whoever proposed it, or the step as given: the baseline of gains."""
    return best(trial for trial in trials if is_stock(trial.knobs))


def speedup(trial: Trial) -> float:
    """Median speedup of a successful trial over its own baseline."""
    assert trial.comparison is not None
    return trial.comparison.speedup.median


def blamed(trials: Sequence[Trial]) -> frozenset[Item]:
    """Choices that certainly cause a failure: all other choices of the failed trial worked in another trial."""
    return frozenset(item for suspects in suspects_of(trials) if len(suspects) == 1 for item in suspects)


def blamed_pairs(trials: Sequence[Trial]) -> frozenset[frozenset[Item]]:
    """Pairs of choices that failed together in two trials and never worked together, though each choice worked alone.

    An example is TF32 with several streams, where a library launches kernels that cannot be scheduled.
    """
    cleared = {pair for trial in trials if is_success(trial) for pair in pairs_of(trial.knobs)}
    caused = list(filter(is_caused_by_choices, trials))
    unexplained = [trial for trial, suspects in zip(caused, suspects_of(trials), strict=True) if not suspects]
    counted = Counter(pair for trial in unexplained for pair in pairs_of(trial.knobs))
    return frozenset(pair for pair, count in counted.items() if count > 1) - cleared


def pairs_of(knobs: Configuration) -> Iterator[frozenset[Item]]:
    return map(frozenset, combinations(knobs.items(), 2))


def suspected(space: Space, trials: Sequence[Trial]) -> frozenset[Item]:
    """All choices of the knobs to leave out of the next presets, by bisection over the possible causes of failures.

    Presets share most of their choices, so one failing choice would make all of them fail. Candidates are choices that
    failed at least twice and never worked. Half of them are left out: those that failed most often, then those that
    are applied last. A trial that works clears the choices that it has; one that fails again raises the count of its
    own. The whole knob is left out, because if one half precision fails the other often does too.
    """
    counted = Counter(item for suspects in suspects_of(trials) for item in suspects)
    # Others depend on what compiles, so that comes first and is left out last.
    order = sorted(space.table, key=lambda name: not space.table[name].compiles)
    ranked = [(count, order.index(item[0]), item) for item, count in counted.items() if item[0] in order and count > 1]
    at_fault = sorted(ranked, key=lambda each: each[:2])
    return all_choices(space, {item[0] for _, _, item in at_fault[len(at_fault) // 2 :]})


def items_out_of_memory(space: Space, trials: Sequence[Trial]) -> frozenset[Item]:
    """All choices of the knobs to leave out after trials ran out of memory: several streams, or else the graph.

    A graph has its own memory pool, and several streams need a larger one.
    """
    worked = {knob for trial in trials if is_success(trial) for knob in trial.knobs}
    failed = [trial for trial in trials if trial.failure and trial.failure.kind is FailureKind.OUT_OF_MEMORY]
    largest = {next((knob for knob in TAKES_MEMORY if knob in trial.knobs), "") for trial in failed} - worked
    return all_choices(space, largest)


def failed_graphs(trials: Sequence[Trial]) -> frozenset[Item]:
    """Torch's own CUDA graphs, if a trial with them failed for any reason and none worked.

    One failure is enough: the rival of plain torch is needed soon, so it is tried next without them.
    """
    worked = {item for trial in trials if is_success(trial) for item in trial.knobs.items()}
    failed = {item for trial in trials if trial.failure is not None for item in trial.knobs.items()}
    return TORCHS_GRAPHS & failed - worked


def all_choices(space: Space, knobs: Iterable[str]) -> frozenset[Item]:
    """Every choice of these knobs, as far as the space has them."""
    return frozenset((knob, choice) for knob in knobs if knob in space.table for choice in space.table[knob].choices)


def items_to_avoid(space: Space, trials: Sequence[Trial]) -> frozenset[Item]:
    """Choices that presets avoid because of failed trials."""
    return blamed(trials) | suspected(space, trials) | items_out_of_memory(space, trials) | failed_graphs(trials)


def suspects_of(trials: Sequence[Trial]) -> list[set[Item]]:
    """For each failed trial: its choices that worked in no other trial."""
    cleared = {item for trial in trials if is_success(trial) for item in trial.knobs.items()}
    return [set(trial.knobs.items()) - cleared for trial in filter(is_caused_by_choices, trials)]


def is_caused_by_choices(trial: Trial) -> bool:
    """Whether its choices caused the failure. Not if it needed too much memory, which depends on all of them."""
    return trial.failure is not None and not is_too_large(trial)
