"""The search strategy: proposes the next configuration from the trials so far. The same trials give the same proposal.

The order: the step as given, against itself; with a memory limit, what was too large, made smaller; the winner of an
earlier run; the best guess for the device, and the strongest configuration of plain torch; the other winners and
presets of the opening; then proposals of the main-effects model, and every fifth time another preset, with those that
take minutes to compile last (GPT-2 with max-autotune: 171 s on an H200). When the model expects no improvement that is
worth a trial: coordinate descent from the best so far, then TPE, then all remaining configurations.
Mean regret on 40 simulated steps (tests/unit/tuner/simulation.py) after 9, 12 and 25 trials: 27, 17 and 3.4 %. With
presets, descent and TPE alone: 46, 43 and 7.1 %.
"""

import hashlib
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.trial import create_trial

from kitsune.knobs import Choice
from tuner.records import Source, Trial
from tuner.search.fitting import MemoryLimit, fitting, is_known_too_large
from tuner.search.main_effects import promising
from tuner.search.outcomes import best, blamed, blamed_pairs, is_success, items_to_avoid, speedup
from tuner.search.presets import OPENING, Preset
from tuner.search.proposal import Proposal, by_hand, opening
from tuner.search.space import Configuration, Item, Space

ASKS: Final = 10  # proposals of TPE, which may repeat known configurations, before random ones follow
DRAWS: Final = 100
MODEL_AFTER: Final = 4  # minimal number of trials for the main-effects model
OTHERS_TURN: Final = 5  # every fifth proposal is a preset instead of one of the model


def always(_: Configuration) -> bool:
    return True


def propose(
    space: Space,
    trials: Sequence[Trial],
    seed: int = 0,
    *,
    may: Callable[[Configuration], bool] = always,
    pending: Sequence[Configuration] = (),
    known: Sequence[Configuration] = (),
    presets: Sequence[Preset] = OPENING,
    without: frozenset[Item] = frozenset(),
    limit: MemoryLimit | None = None,
) -> Proposal | None:
    """The next allowed configuration that was not tried yet, or None when none is left.

    `may`: whether there is time for a configuration. `seed`: the run's seed; random numbers derive from it and the
    number of trials, so there is no state. `pending`: configurations that other processes are measuring. `known`:
    winners of earlier runs, most similar step first; choices that do not apply here are removed. `presets`: the opening
    of the run, resolved without the choices in `without`. `limit`: with it, what was too large is made smaller, and
    what is known to be too large is left out.
    """
    tried = {space.key(knobs) for knobs in (*(trial.knobs for trial in trials), *pending)}
    for proposal in proposals(space, trials, seed, pending, known, presets, without, limit):
        is_new = space.key(proposal.knobs) not in tried and may(proposal.knobs)
        if is_new and not (limit is not None and is_known_too_large(proposal.knobs, trials)):
            return proposal
    return None


def proposals(
    space: Space,
    trials: Sequence[Trial],
    seed: int,
    pending: Sequence[Configuration] = (),
    known: Sequence[Configuration] = (),
    presets: Sequence[Preset] = OPENING,
    without: frozenset[Item] = frozenset(),
    limit: MemoryLimit | None = None,
) -> Iterator[Proposal]:
    """All proposals in the order of the strategy, including configurations that were tried already. Lazy."""
    avoid = blamed(trials)
    number = len(trials) + len(pending)
    yield Proposal({}, Source.BASELINE, "eager")
    without |= items_to_avoid(space, trials)
    if limit is not None:
        yield from fitting(space, trials, limit)
    yield from opening(space, presets, known, without)
    if len(trials) >= MODEL_AFTER and number % OTHERS_TURN:
        yield from modelled(space, trials, pending, avoid)
    yield from by_hand(space, trials, without)
    if len(trials) >= MODEL_AFTER:
        yield from modelled(space, trials, pending, avoid)
    for knobs in descent(space, trials, avoid, pending):
        yield Proposal(knobs, Source.DESCENT)
    for knobs in estimated(space, trials, derived_seed(seed, number)):
        yield Proposal(knobs, Source.TPE)
    for knobs in space.configurations():
        yield Proposal(knobs, Source.TPE)


def modelled(
    space: Space, trials: Sequence[Trial], pending: Sequence[Configuration], avoid: frozenset[Item]
) -> Iterator[Proposal]:
    """Proposals of the main-effects model, without choices and pairs that fail here."""
    known = costs(space, trials)
    if known:
        pairs = blamed_pairs(trials)
        for knobs in promising(space, known, pending):
            if not avoid & knobs.items() and not any(pair <= knobs.items() for pair in pairs):
                yield Proposal(knobs, Source.MODEL)


def descent(
    space: Space, trials: Sequence[Trial], avoid: frozenset[Item], pending: Sequence[Configuration]
) -> list[dict[str, Choice]]:
    """The neighbours of the best so far. Changes to `avoid` come last; then the least tried choices come first.

    Among these, the least changed knob comes first, so that a knob that no preset uses is tried at once. Ties are in
    table order.
    """
    leader = best(trials)
    tried = [*(trial.knobs for trial in trials), *pending]
    chosen = Counter((knob, knobs.get(knob, entry.default)) for knobs in tried for knob, entry in space.table.items())
    turned = Counter(knob for knobs in tried for knob in space.canonical(knobs))

    def rank(move: tuple[Item, dict[str, Choice]]) -> tuple[bool, int, int]:
        item, _ = move
        return item in avoid, chosen[item], turned[item[0]]

    return [knobs for _, knobs in sorted(space.neighbours(leader.knobs if leader else {}), key=rank)]


def estimated(space: Space, trials: Sequence[Trial], seed: int) -> Iterator[dict[str, Choice]]:
    """Proposals of the tree-structured Parzen estimator (Bergstra et al. 2011), then random ones; all allowed.

    The study is rebuilt from the trials each time, so there is no second state. Every trial sets every knob, so
    Optuna's `group=True` (for conditional knobs) would change nothing.
    """
    searchable = space.searchable()
    if not searchable:
        return
    study = quiet_study(optuna.samplers.TPESampler(multivariate=True, seed=seed))
    distributions: dict[str, BaseDistribution] = {
        knob: CategoricalDistribution(choices) for knob, choices in searchable.items()
    }
    for knobs, cost in costs(space, trials):
        params = {knob: knobs.get(knob, space.table[knob].default) for knob in searchable}
        study.add_trial(create_trial(params=params, distributions=distributions, value=cost))
    for _ in range(ASKS):
        # An asked trial stays open, and the sampler avoids open trials, so asking again does not repeat it.
        yield space.repair(study.ask(distributions).params)
    rng = random.Random(seed)  # noqa: S311 - a search, not secrets
    for _ in range(DRAWS):
        yield space.repair({knob: rng.choice(choices) for knob, choices in searchable.items()})


def quiet_study(sampler: optuna.samplers.BaseSampler) -> optuna.Study:
    """A new in-memory study, without Optuna's log line for it; the caller's log verbosity is restored."""
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        return optuna.create_study(sampler=sampler)
    finally:
        optuna.logging.set_verbosity(verbosity)


def costs(space: Space, trials: Sequence[Trial]) -> list[tuple[Configuration, float]]:
    """Log of the relative step time of each search trial in this space; a failed trial costs more than any other.

    Trials with a choice that is no longer searched are left out, because the sampler does not know it.

    Failures get a penalty instead of Optuna's FAIL state, which the sampler ignores and so proposes the same failure
    again (on a simulated surface: regret of 21 % with FAIL, 13 % with a penalty, after 60 trials).
    """
    ours = [trial for trial in trials if trial.source.is_search and space.allows(trial.knobs) is None]
    fitting = [trial for trial in ours if all(space.table[knob].is_searched(c) for knob, c in trial.knobs.items())]
    measured = [-math.log(speedup(trial)) for trial in fitting if is_success(trial)]
    penalty = max([0.0, *measured]) + 1.0
    return [(trial.knobs, -math.log(speedup(trial)) if is_success(trial) else penalty) for trial in fitting]


def derived_seed(seed: int, number: int) -> int:
    """A 32-bit seed for the proposal after `number` trials."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{number}".encode()).digest()[:4], "big")
