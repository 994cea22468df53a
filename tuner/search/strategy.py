"""The trials so far in, the next configuration to try out. Pure: the same trials give the same proposal.

The order: the step as given, against itself; the winner of an earlier run; the best guess for the device, with the
strongest rival of plain torch beside it; the other winners and presets of the opening; then a cheap model of what each
choice does, and every fifth time what else one would try by hand, what takes minutes to compile last (GPT-2 with
max-autotune: 171 s on an H200). Where the model expects nothing worth a trial any more: coordinate descent from the
best so far; then TPE; then whatever is left.
Mean regret on 40 simulated steps (tests/unit/tuner/simulation.py) after 9, 12 and 25 trials: 27, 17 and 3.4 %. With
presets, descent and TPE alone, as it was before: 46, 43 and 7.1 %.
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
from tuner.search.main_effects import promising
from tuner.search.outcomes import best, blamed, blamed_pairs, is_success, shunned, speedup
from tuner.search.presets import OPENING, Preset
from tuner.search.proposal import Proposal, by_hand, opening
from tuner.search.space import Configuration, Item, Space

ASKS: Final = 10  # proposals of TPE that may repeat a known configuration before chance takes over
DRAWS: Final = 100
MODEL_AFTER: Final = 4  # trials with a result; fewer say too little about the choices
OTHERS_TURN: Final = 5  # one of so many proposals is not the model's, but what one would try by hand


def anything(_: Configuration) -> bool:
    return True


def propose(
    space: Space,
    trials: Sequence[Trial],
    seed: int = 0,
    *,
    may: Callable[[Configuration], bool] = anything,
    pending: Sequence[Configuration] = (),
    known: Sequence[Configuration] = (),
    presets: Sequence[Preset] = OPENING,
    without: frozenset[Item] = frozenset(),
) -> Proposal | None:
    """The next configuration that is allowed and was not tried yet, or None when there is none left.

    `may` tells which configurations there is time for. `seed` is the run's; chance is drawn from it and from the number
    of trials, so nothing needs to be remembered. `pending` are being measured by other processes: tried, without a
    result. `known` won in earlier runs, the nearest first; what does not apply here is left out of them. A run begins
    with these `presets`, which do `without` some choices.
    """
    tried = {space.key(knobs) for knobs in (*(trial.knobs for trial in trials), *pending)}
    for proposal in proposals(space, trials, seed, pending, known, presets, without):
        if space.key(proposal.knobs) not in tried and may(proposal.knobs):
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
) -> Iterator[Proposal]:
    """Everything worth trying, the best guess first, whether or not it was tried already. Lazy."""
    avoid = blamed(trials)
    number = len(trials) + len(pending)
    yield Proposal({}, Source.BASELINE, "eager")
    without |= shunned(space, trials)
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
    """What the model of effects expects to be better than the best so far, without choices that fail here."""
    known = costs(space, trials)
    if known:
        pairs = blamed_pairs(trials)
        for knobs in promising(space, known, pending):
            if not avoid & knobs.items() and not any(pair <= knobs.items() for pair in pairs):
                yield Proposal(knobs, Source.MODEL)


def descent(
    space: Space, trials: Sequence[Trial], avoid: frozenset[Item], pending: Sequence[Configuration]
) -> list[dict[str, Choice]]:
    """The neighbours of the best so far: those to avoid last, otherwise choices that were tried least come first.

    Of these the ones whose knob was turned least, so that a knob of which the presets know nothing gets its turn at
    once. Ties are in table order.
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

    The study is rebuilt from our trials each time, since they are the only truth. Every trial says something about
    every knob, so Optuna's `group=True` (for conditional knobs) would change nothing.
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
        # An asked trial stays open, and the sampler keeps away from open ones: asking again does not repeat itself.
        yield space.repair(study.ask(distributions).params)
    rng = random.Random(seed)  # noqa: S311 - a search, not secrets
    for _ in range(DRAWS):
        yield space.repair({knob: rng.choice(choices) for knob, choices in searchable.items()})


def quiet_study(sampler: optuna.samplers.BaseSampler) -> optuna.Study:
    """A new study in memory, without the line that Optuna logs for it; the caller's own verbosity stays as it is."""
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        return optuna.create_study(sampler=sampler)
    finally:
        optuna.logging.set_verbosity(verbosity)


def costs(space: Space, trials: Sequence[Trial]) -> list[tuple[Configuration, float]]:
    """Log of the relative step time of each trial of this space; a failed one costs more than any that worked.

    Trials of a choice that is no longer searched are left out: the sampler knows none.

    A penalty and not Optuna's FAIL, which the sampler ignores: it would walk into the same wall again (measured on a
    simulated surface: regret of 21 % with FAIL, 13 % with a penalty, after 60 trials).
    """
    ours = [trial for trial in trials if trial.source.is_search and space.allows(trial.knobs) is None]
    fitting = [trial for trial in ours if all(space.table[knob].is_searched(c) for knob, c in trial.knobs.items())]
    measured = [-math.log(speedup(trial)) for trial in fitting if is_success(trial)]
    penalty = max([0.0, *measured]) + 1.0
    return [(trial.knobs, -math.log(speedup(trial)) if is_success(trial) else penalty) for trial in fitting]


def derived_seed(seed: int, number: int) -> int:
    """A 32-bit seed for the proposal after `number` trials."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{number}".encode()).digest()[:4], "big")
