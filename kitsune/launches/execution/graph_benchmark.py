"""Compares the speed of two graphs of one step on the GPU: a prediction does not know how kernels share it."""

from collections.abc import Callable, Iterator
from statistics import median
from typing import Any, Final

import torch

from kitsune.device.cuda_graph import Graph

ROUNDS: Final = 10
MAX_RATIO: Final = 0.99  # to replace one stream, a plan must be 1 % faster
MAX_RATIO_AMONG: Final = 0.997  # to replace another plan on several streams, 0.3 %
HOPELESS_ROUNDS: Final = 3  # a plan that is slower in each of the first three rounds is out

Clock = Callable[[Graph], float]


def is_faster(first: Graph, second: Graph, clock: Clock, by: float) -> bool:
    """Whether the second takes less than `by` times the time of the first, by the median ratio of ROUNDS rounds.

    Stops as soon as more than half of the ratios decide the median, or the second is slower in each of the first
    HOPELESS_ROUNDS.
    """
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
    """Time of the second divided by that of the first, for each round. The step's state changes.

    The first round is a warm-up and is not counted.
    """
    for number in range(rounds + 1):
        before_ms = clock(first)
        ratio = clock(second) / before_ms
        if number:
            yield ratio


def replay_ms(graph: Graph) -> float:
    """Milliseconds by the GPU's clock for the second of two replays, so that the host is ahead as in training."""
    graph.replay()
    return gpu_ms(graph.replay)


def gpu_ms(run: Callable[[], Any]) -> float:
    """Milliseconds by the GPU's clock. Waits for the GPU."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)
