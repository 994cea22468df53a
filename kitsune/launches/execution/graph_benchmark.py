"""Two graphs of one step in, whether the second is faster out. Predictions do not know how kernels share the GPU."""

from collections.abc import Callable, Iterator
from statistics import median
from typing import Final

import torch

from kitsune.device.cuda_graph import Graph

ROUNDS: Final = 10
BY: Final = 0.99  # of the time on one stream: what is within 1 % of it is not worth more streams
BY_AMONG: Final = 0.997  # of the time of another plan on several streams
HOPELESS_ROUNDS: Final = 3  # what is slower in each of the first three does not win by that in six of the ten

Clock = Callable[[Graph], float]


def is_faster(first: Graph, second: Graph, clock: Clock, by: float) -> bool:
    """Whether the second takes less than `by` of the time of the first, by the median of the ratios. Once more than
    half of them are on one side, so is it, and the rest is left out, as where the second is behind in each of the first
    rounds."""
    seen: list[float] = []
    for ratio in ratios(first, second, clock, ROUNDS):
        seen.append(ratio)
        won = sum(each < by for each in seen)
        if max(won, len(seen) - won) > ROUNDS // 2:
            return won > ROUNDS // 2
        if len(seen) == HOPELESS_ROUNDS and min(seen) > 1.0:
            return False
    return median(seen) < by


def ratios(first: Graph, second: Graph, clock: Clock, rounds: int) -> Iterator[float]:
    """How many times as long the second takes, by two replays one after the other. The step's state changes meanwhile.

    The first replays of a graph take longer, and are not counted.
    """
    for number in range(rounds + 1):
        before_ms = clock(first)
        ratio = clock(second) / before_ms
        if number:
            yield ratio


def replay_ms(graph: Graph) -> float:
    """By the GPU's clock, of the second of two replays: the host is ahead of it, as it is in training."""
    graph.replay()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)
