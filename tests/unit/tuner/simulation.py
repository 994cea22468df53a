"""A training step that exists only on paper: replays what a tuner would have measured, without a device or a clock.

Time is what the GPU and the host need, whichever is longer, as on a real machine: graphs help a step that waits for
its launches and do nothing for one that fills the card. Effects multiply, pairs of choices interact a little, some
regions run out of memory or give wrong numbers, and every measurement carries noise.
"""

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import combinations

from kitsune.knobs import Choice
from kitsune.plan import Interval
from tuner.records import Comparison, Failure, FailureKind, Phase, Source, Trial, Verdict
from tuner.search.proposal import Proposal
from tuner.search.space import Space

NOW = datetime(2026, 1, 1, tzinfo=UTC)

# (lowest, highest) factor on the time of the GPU and of the host: made up, of the order of what was seen on an H200.
Factor = Mapping[tuple[str, Choice], tuple[float, float]]
GPU: Factor = {
    ("layout", "channels_last"): (0.6, 1.1),
    ("precision", "tf32"): (0.6, 1.0),
    ("precision", "bf16"): (0.35, 1.05),
    ("precision", "fp16"): (0.35, 1.1),
    ("compile", "default"): (0.97, 1.03),
    ("compile", "coordinate-descent"): (0.93, 1.02),
    ("compile", "max-autotune-no-cudagraphs"): (0.9, 1.03),
    ("compile", "reduce-overhead"): (0.97, 1.03),
    ("compile", "max-autotune"): (0.9, 1.03),
    ("update", "fused"): (0.9, 1.0),
    ("update", "kitsune"): (0.88, 1.0),
    ("fusion", "products"): (0.88, 1.01),
    ("weights", "bf16_copies"): (0.94, 1.01),
    ("activations", "bf16"): (0.93, 1.01),
    ("masks", "dropped"): (0.85, 1.0),
    ("inductor", "no_mix_order"): (0.97, 1.02),
    ("streams", 2): (0.85, 1.0),
    ("streams", 4): (0.75, 1.0),
    ("streams", 8): (0.75, 1.02),
}
HOST: Factor = {
    ("precision", "bf16"): (1.1, 1.3),
    ("precision", "fp16"): (1.15, 1.4),
    ("compile", "default"): (0.7, 1.1),
    ("compile", "coordinate-descent"): (0.7, 1.1),
    ("compile", "max-autotune-no-cudagraphs"): (0.7, 1.1),
    ("compile", "reduce-overhead"): (0.3, 0.5),
    ("compile", "max-autotune"): (0.3, 0.5),
    ("update", "fused"): (0.6, 0.8),
    ("update", "kitsune"): (0.65, 0.9),
    ("capture", "segments"): (0.15, 0.3),
    ("capture", "step"): (0.02, 0.05),
}
# Factor on peak memory; choices that are not named change nothing.
MEMORY: Mapping[tuple[str, Choice], float] = {
    ("activations", "bf16"): 0.9,
    ("precision", "bf16"): 0.6,
    ("precision", "fp16"): 0.6,
    ("attention", "math"): 1.5,
    ("compile", "default"): 0.8,
    ("compile", "coordinate-descent"): 0.8,
    ("compile", "max-autotune-no-cudagraphs"): 0.85,
    ("compile", "reduce-overhead"): 0.95,
    ("compile", "max-autotune"): 1.0,
    ("capture", "segments"): 1.25,
    ("capture", "step"): 1.15,
}


@dataclass
class Surface:
    """One simulated model on one simulated device."""

    space: Space
    seed: int
    noise: float = 0.005
    walls: bool = True
    planted: Mapping[tuple[str, Choice], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rng = random.Random(self.seed)
        table = self.space.table
        items = [(knob, choice) for knob, entry in table.items() for choice in filter(entry.is_searched, entry.choices)]
        changes = [item for item in items if item[1] != self.space.table[item[0]].default]
        self.host_share = rng.choice((0.2, 0.6, 1.5, 5.0))  # host time of the step as given, in units of its GPU time
        self.gpu = {item: rng.uniform(*GPU.get(item, (0.93, 1.1))) for item in changes}
        fusion = rng.uniform(0.55, 1.05)  # what every compile mode gains; the modes differ little among themselves
        self.gpu.update({item: self.gpu[item] * fusion for item in changes if item[0] == "compile"})
        self.gpu.update(self.planted)
        self.host = {item: rng.uniform(*HOST.get(item, (1.0, 1.0))) for item in changes}
        pairs = [pair for pair in combinations(changes, 2) if pair[0][0] != pair[1][0]]
        self.pairs = {pair: rng.lognormvariate(0, 0.02) for pair in pairs}
        self.capacity = rng.choice((1.02, 1.2, 4.0)) if self.walls else math.inf  # in peaks of the step as given
        self.wrong = {("precision", "fp16")} if self.walls and rng.random() < 0.5 else set()

    def failure(self, knobs: Mapping[str, Choice]) -> FailureKind | None:
        if set(knobs.items()) & self.wrong:
            return FailureKind.WRONG
        if math.prod(MEMORY.get(item, 1.0) for item in knobs.items()) > self.capacity:
            return FailureKind.OUT_OF_MEMORY
        return None

    def speedup(self, knobs: Mapping[str, Choice]) -> float:
        """The true speedup over the step as given."""
        items = self.space.canonical(knobs).items()
        gpu = math.prod(self.gpu[item] for item in items)
        gpu *= math.prod(self.pairs.get(pair, 1.0) for pair in combinations(items, 2))
        host = self.host_share * math.prod(self.host[item] for item in items)
        return step_time(1.0, self.host_share) / step_time(gpu, host)

    def optimum(self, configurations: Sequence[dict[str, Choice]] = ()) -> float:
        """Of all configurations, which take a second to list."""
        every = configurations or self.space.configurations()
        return max(self.speedup(knobs) for knobs in every if self.failure(knobs) is None)

    def measure(self, proposal: Proposal, number: int) -> Trial:
        kind = self.failure(proposal.knobs)
        if kind is not None:
            failure = Failure(kind=kind, phase=Phase.NUMERICS, reason="simulated")
            return trial(number, proposal.knobs, proposal.source, failure=failure)
        rng = random.Random(f"{self.seed}:{sorted(proposal.knobs.items())}")
        return trial(
            number, proposal.knobs, proposal.source, self.speedup(proposal.knobs) * rng.lognormvariate(0, self.noise)
        )


def step_time(gpu: float, host: float) -> float:
    """The longer of the two, plus a little of the shorter one, which never hides completely."""
    return max(gpu, host) + 0.05 * min(gpu, host)


def trial(
    number: int,
    knobs: Mapping[str, Choice],
    source: Source = Source.SEED,
    speedup: float = 1.0,
    *,
    failure: Failure | None = None,
) -> Trial:
    comparison = Comparison(
        speedup=Interval(median=speedup, low=speedup * 0.99, high=speedup * 1.01),
        p_value=0.001,
        verdict=Verdict.FASTER if speedup > 1.02 else Verdict.AMBIGUOUS,
        blocks=20,
    )
    return Trial(
        run_id="simulated",
        number=number,
        source=source,
        knobs=dict(knobs),
        comparison=None if failure else comparison,
        failure=failure,
        started_at=NOW,
        finished_at=NOW,
    )


Propose = Callable[[Space, list[Trial], int], Proposal | None]


def replay(surface: Surface, propose: Propose, count: int, seed: int = 0) -> list[Trial]:
    """The trials that a search of at most `count` trials would have made."""
    return list(steps(surface, propose, count, seed))


def steps(surface: Surface, propose: Propose, count: int, seed: int) -> Iterator[Trial]:
    trials: list[Trial] = []
    while len(trials) < count:
        proposal = propose(surface.space, trials, seed)
        if proposal is None:
            return
        trials.append(surface.measure(proposal, len(trials)))
        yield trials[-1]
