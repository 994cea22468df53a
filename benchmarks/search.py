"""Suite search, replayed: strategies on recorded spaces, without a device.

    python -m benchmarks.search benchmarks/results/spaces/*.jsonl
    python -m benchmarks.search --at-once 4

For each space and strategy the trials until what is best so far is within 3 % of the best of the space, median of 50
seeds, and the regret after 5, 6, 9, 12 and 25 trials. A trial gives the median of blocks drawn from those that were
recorded, so that each seed has noise of its own. Strategies may try what was recorded: Kitsune's takes the first of its
proposals that was; TPE, which knows no order beyond its proposal, what is nearest to it. With `--at-once` so many are
at work, as on a GPU; they end in the order in which they were begun, and Kitsune's strategy alone is replayed, since
the others know of no such trials.
"""

import argparse
import random
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean, median

from benchmarks import results_file
from benchmarks.recorded import Key, Outcome, Recorded
from kitsune.plan import Interval
from tuner.records import Comparison, Source, Trial, Verdict
from tuner.search.outcomes import best
from tuner.search.proposal import Proposal
from tuner.search.space import Configuration, Space
from tuner.search.strategy import derived_seed, estimated, proposals

SPACES = results_file.RESULTS / "spaces"
LEAST = 20  # configurations; a space with fewer is still being recorded
SEEDS = 50
WITHIN = 0.03
COUNTS = (5, 6, 9, 12, 25)
EPOCH = datetime.fromtimestamp(0, UTC)

#: The last: what is at work, and has no result yet.
Strategy = Callable[[Recorded, list[Trial], int, Sequence[Configuration]], Proposal | None]


def committed(folder: Path = SPACES) -> list[Path]:
    """The spaces that have been recorded, at least in part."""
    return [path for path in sorted(folder.glob("*.jsonl")) if len(Recorded.load(path).outcomes) >= LEAST]


def ours(recorded: Recorded, trials: list[Trial], seed: int, pending: Sequence[Configuration] = ()) -> Proposal | None:
    left = untried(recorded, trials, pending)
    found = proposals(recorded.space, trials, seed, pending)
    return next((proposal for proposal in found if frozenset(proposal.knobs.items()) in left), None)


def tpe(recorded: Recorded, trials: list[Trial], seed: int, _: Sequence[Configuration] = ()) -> Proposal | None:
    if not trials:
        return Proposal({}, Source.BASELINE)
    left = [outcome.knobs for outcome in untried(recorded, trials).values()]
    asked = next(estimated(recorded.space, trials, derived_seed(seed, len(trials))))
    return Proposal(min(left, key=lambda knobs: distance(recorded.space, knobs, asked)), Source.TPE) if left else None


def chance(recorded: Recorded, trials: list[Trial], seed: int, _: Sequence[Configuration] = ()) -> Proposal | None:
    if not trials:
        return Proposal({}, Source.BASELINE)
    left = [outcome.knobs for outcome in untried(recorded, trials).values()]
    return Proposal(random.Random(f"{seed}:{len(trials)}").choice(left), Source.TPE) if left else None


STRATEGIES: dict[str, Strategy] = {"kitsune": ours, "tpe": tpe, "chance": chance}


def untried(recorded: Recorded, trials: Sequence[Trial], pending: Sequence[Configuration] = ()) -> dict[Key, Outcome]:
    tried = {frozenset(knobs.items()) for knobs in (*(trial.knobs for trial in trials), *pending)}
    return {key: outcome for key, outcome in recorded.outcomes.items() if key not in tried}


def distance(space: Space, one: Configuration, other: Configuration) -> int:
    """The number of knobs that differ."""
    return sum(one.get(name, knob.default) != other.get(name, knob.default) for name, knob in space.table.items())


def replayed(recorded: Recorded, strategy: Strategy, count: int, seed: int, at_once: int = 1) -> Iterator[Trial]:
    """In the order in which they end, which is that in which they were begun."""
    chance_of = random.Random(seed)
    trials: list[Trial] = []
    at_work: list[Proposal] = []
    while True:
        while len(at_work) < at_once and len(trials) + len(at_work) < count:
            proposal = strategy(recorded, trials, seed, [each.knobs for each in at_work])
            if proposal is None:
                break
            at_work.append(proposal)
        if not at_work:
            return
        trials.append(trial_of(recorded, at_work.pop(0), len(trials), chance_of))
        yield trials[-1]


def trial_of(recorded: Recorded, proposal: Proposal, number: int, chance_of: random.Random) -> Trial:
    outcome = recorded.outcomes[frozenset(proposal.knobs.items())]
    comparison = None
    if outcome.failure is None:
        drawn = median(chance_of.choices(outcome.ratios, k=len(outcome.ratios)))
        speedup = recorded.outcomes[frozenset()].ratio / drawn
        interval = Interval(median=speedup, low=speedup, high=speedup)
        comparison = Comparison(speedup=interval, p_value=0.0, verdict=Verdict.AMBIGUOUS, blocks=len(outcome.ratios))
    return Trial(
        run_id="replayed",
        number=number,
        source=proposal.source,
        knobs=dict(proposal.knobs),
        comparison=comparison,
        failure=outcome.failure,
        started_at=EPOCH,
        finished_at=EPOCH,
    )


def regrets(recorded: Recorded, strategy: Strategy, count: int, seed: int, at_once: int = 1) -> list[float]:
    """After each trial: how much longer what seems best so far takes than the best of the space, as a part of that."""
    found: list[float] = []
    trials: list[Trial] = []
    optimum = recorded.optimum()
    for trial in replayed(recorded, strategy, count, seed, at_once):
        trials.append(trial)
        leader = best(trials)
        found.append(optimum / recorded.speedup(leader.knobs) - 1 if leader else float("inf"))
    return found


def trials_within(curve: Sequence[float], within: float = WITHIN) -> int:
    """The number of trials from which on the regret stays so small; one more than there are where it never does."""
    above = [number for number, regret in enumerate(curve, start=1) if regret > within]
    return max(above, default=0) + 1


def figures(name: str, recorded: Recorded, seeds: int = SEEDS, at_once: int = 1) -> Iterator[results_file.Figure]:
    count = len(recorded.outcomes)
    for strategy, function in STRATEGIES.items():
        if at_once > 1 and function is not ours:
            continue
        curves = [regrets(recorded, function, count, seed, at_once) for seed in range(seeds)]
        case = f"{name}/{strategy}" + (f"-{at_once}-at-once" if at_once > 1 else "")
        yield f"{case}:trials-within-3%", median(map(trials_within, curves)), "trials", seeds
        for after in COUNTS:
            if after <= count:
                yield f"{case}:regret@{after}", round(mean(curve[after - 1] for curve in curves), 4), "ratio", seeds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("spaces", nargs="*", type=Path, help="recorded by benchmarks.spaces; all that are committed")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument(
        "--at-once", type=int, default=1, choices=range(1, 9), metavar="N", help="trials at work at once (%(default)s)"
    )
    parser.add_argument("--out", type=Path, help="a new file under benchmarks/results/search otherwise")
    given = parser.parse_args()
    out = given.out or results_file.free_path("search")
    paths = given.spaces or committed()
    found = (figure for path in paths for figure in figures(path.stem, Recorded.load(path), given.seeds, given.at_once))
    results_file.write_figures(out, "search", found)


if __name__ == "__main__":
    main()
