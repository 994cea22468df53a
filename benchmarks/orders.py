"""Suite orders: whether an order of the launches that chance finds is faster than the planner's.

    python -m benchmarks.orders --case bert_base/2x128 --seconds 60

Beginning with the plan that the planner chooses on up to eight streams, orders are drawn and tried on the GPU one after
the other: by the planner's rules or by bands of slack, with the cost of each launch changed by chance. One that is half
a percent faster in two races takes the place of the best, and its costs are changed further. `graph`, `planned` and
`searched` are then timed interleaved.
"""

import argparse
import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Final

import torch

from benchmarks.engine import ENGINE_CASES, facts, graph_step, step_of
from benchmarks.plans import recording_of
from benchmarks.rivals import Step
from benchmarks.training_step import DEVICE, race, write
from kitsune.device.backend import few_multiprocessors
from kitsune.device.cuda_graph import Recorder
from kitsune.launches.captured import Captured
from kitsune.launches.execution.graph_benchmark import ratios, replay_ms
from kitsune.launches.model.recording import Recording
from kitsune.launches.pipeline import Planner
from kitsune.launches.planning.candidates import WAIT_US, Rules, candidates
from kitsune.launches.planning.schedule import Schedule, critical_path, earliest_us, listed, upward_ranks, with_waits
from kitsune.launches.plans import WORKSPACES_OF_STEP, Planned, budget_of, most_taken, plans
from kitsune.workload import Workload

STREAMS: Final = 8
ROUNDS: Final = 20
BY: Final = 0.995
#: The most urgent part of the work off the critical path, then the next, by how long it may wait: each part has
#: streams of its own, of a priority of their own.
BANDS: Final = ((0.5,), (0.3, 0.7), (0.4, 0.8))
SPREADS: Final = (0.1, 0.25, 0.5)  # standard deviations of the logarithm of a cost


def is_faster(best: Captured, other: Captured) -> bool:
    return median(ratios(best.graph, other.graph, replay_ms, ROUNDS)) < BY


def slacks_us(way: Recording, costs_us: Sequence[float]) -> list[float]:
    """How much later each launch may begin than it could, without a longer step on streams without end."""
    ready_us = earliest_us(way.graph, costs_us)
    through_us = [ready + rank for ready, rank in zip(ready_us, upward_ranks(way.graph, costs_us, 0.0), strict=True)]
    return [max(through_us, default=0.0) - one_us for one_us in through_us]


def banded(way: Recording, costs_us: Sequence[float], shares: Sequence[float]) -> Planned:
    """The critical path on a stream of its own; the rest on two streams for each band of slack, the least one first."""
    slack_us = slacks_us(way, costs_us)
    path = frozenset(critical_path(way.graph, costs_us))
    order = sorted(range(len(costs_us)), key=slack_us.__getitem__)
    done_us = accumulate(costs_us[launch] for launch in order)
    band_of = {
        launch: sum(us > share * sum(costs_us) for share in shares) for launch, us in zip(order, done_us, strict=True)
    }
    choices = [
        range(1) if launch in path else range(1 + 2 * band_of[launch], 3 + 2 * band_of[launch])
        for launch in range(len(costs_us))
    ]
    streams = 3 + 2 * len(shares)
    placed = listed(way.graph, costs_us, streams, WAIT_US, choices)
    priorities = (-3, *(-max(0, len(shares) - band) for band in range(len(shares) + 1) for _ in range(2)))
    schedule = Schedule(streams, with_waits(way.graph, placed, streams))
    return Planned.of(way, Rules(way.graph, costs_us).candidate(f"bands of slack {shares}", schedule, priorities))


def orders(way: Recording, costs_us: Sequence[float]) -> Iterator[Planned]:
    found = candidates(way.graph, costs_us, STREAMS, few_multiprocessors(way.device))
    yield from (Planned.of(way, candidate) for candidate in found)
    yield from (banded(way, costs_us, shares) for shares in BANDS)


@dataclass
class Search:
    """From the planner's own choice on; `tried` counts what was captured and raced, `won` what took the place."""

    workload: Workload
    step: Step
    chance: random.Random = field(default_factory=lambda: random.Random(0))
    tried: int = 0
    won: int = 0

    def __post_init__(self) -> None:
        recording = recording_of(self.workload, self.step)
        self.planner = Planner(Recorder(DEVICE), STREAMS)
        found = plans(recording, STREAMS, None)
        self.budget_bytes = budget_of(found[0], None)
        self.most_bytes = most_taken(recording, self.planner.race.tried(found[0]).taken_bytes, WORKSPACES_OF_STEP)
        self.best = self.planned = self.planner.race.tried(self.planner.race.quickest(found, WORKSPACES_OF_STEP)[0])
        self.ways = {id(plan.recording): plan for plan in found[1:]}

    def run(self, seconds: float) -> None:
        """Each try begins at the costs of the best so far, or at those that were measured."""
        end_s = time.perf_counter() + seconds
        while time.perf_counter() < end_s:
            origin = self.chance.choice([self.best.plan, *self.ways.values()])
            plan = self.chance.choice(list(orders(origin.recording, self._shaken(origin.costs_us))))
            if plan.memory.peak_bytes <= self.budget_bytes:
                self._try(plan)

    def _shaken(self, costs_us: Sequence[float]) -> list[float]:
        share, deviation = self.chance.choice((0.05, 0.2, 1.0)), self.chance.choice(SPREADS)
        return [
            us * self.chance.lognormvariate(0.0, deviation) if self.chance.random() < share else us for us in costs_us
        ]

    def _try(self, plan: Planned) -> None:
        challenger = self.planner.race.tried(plan)
        self.tried += 1
        if challenger.taken_bytes > self.most_bytes:
            return
        if is_faster(self.best, challenger) and is_faster(self.best, challenger):
            self.best = challenger
            self.won += 1


def replayed(captured: Captured, told: dict[str, int]) -> tuple[Step, Callable[[], str]]:
    told = {"taken_bytes": captured.taken_bytes} | told
    return captured.replay, lambda: json.dumps(facts(captured.plan, 0.0) | told)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", required=True, choices=ENGINE_CASES)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long to search")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, help="result file to add to; a new one under benchmarks/results otherwise")
    arguments = parser.parse_args()
    case = ENGINE_CASES[arguments.case]
    torch.cuda.set_device(DEVICE)
    workload, step = step_of(case, STREAMS)
    search = Search(workload, step)
    search.run(arguments.seconds)
    told = {"tried": search.tried, "won": search.won}
    builds = {
        "graph": partial(graph_step, case),
        "planned": partial(replayed, search.planned, {}),
        "searched": partial(replayed, search.best, told),
    }
    arms = race(builds, arguments.rounds)
    for arm in arms[1:]:
        arm.peak_bytes = None  # both were captured before there was anything to compare with
    write("orders", case, arms, "", arguments.out)


if __name__ == "__main__":
    main()
