"""Two graphs of one step in, whether the second is faster out. Predictions do not know how kernels share the GPU."""

from collections.abc import Callable
from statistics import median
from typing import Final

import torch

from kitsune.device import Graph

ROUNDS: Final = 10
BY: Final = 0.99  # of the time of the first: what is within 1 % of it is not worth more streams

Clock = Callable[[Graph], float]


def is_faster(first: Graph, second: Graph, clock: Clock) -> bool:
    return ratio_of(first, second, clock) < BY


def ratio_of(first: Graph, second: Graph, clock: Clock, rounds: int = ROUNDS) -> float:
    """How many times as long the second takes: the median of ratios, each of two replays one after the other.

    The step's state changes meanwhile.
    """
    ratios = []
    for _ in range(rounds + 1):
        before_ms = clock(first)
        ratios.append(clock(second) / before_ms)
    return median(ratios[1:])


def replay_ms(graph: Graph) -> float:
    """By the GPU's clock."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)
