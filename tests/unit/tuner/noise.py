"""Noise models of a machine: the blocks of two arms that were never run, process by process. Sizes are in per cent.

The rows of the audit that found what one process cannot see. A model is a function of a random source and the order
of the arms in each round, and gives the log of the factor on each block, `[arm][round]`.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from random import Random
from typing import Final

from tuner.statistics.block_statistics import order

Order = Sequence[Sequence[int]]
Noise = Callable[[Random, Order], list[list[float]]]

#: Of bursts: how much of the time they take, and by how much a block in one is slower, at most.
BURST_SHARE: Final = 0.3
BURST_HEIGHT: Final = 0.2
QUIET: Final = 0.003


def in_time(draws: Iterator[float], turns: Order) -> list[list[float]]:
    """Values that follow each other in time, handed to the arms as they come to run."""
    rounds = [dict.fromkeys(turn, 0.0) | {arm: next(draws) for arm in turn} for turn in turns]
    return [[values[arm] for values in rounds] for arm in sorted(turns[0])]


def iid(deviation: float) -> Noise:
    return lambda rng, turns: in_time(iter(lambda: rng.gauss(0, deviation / 100), None), turns)


def autoregressive(memory: float, deviation: float) -> Noise:
    """AR(1) from block to block, of this marginal deviation."""

    def draws(rng: Random) -> Iterator[float]:
        value = rng.gauss(0, deviation / 100)
        while True:
            yield value
            value = memory * value + rng.gauss(0, deviation / 100 * math.sqrt(1 - memory**2))

    return lambda rng, turns: in_time(draws(rng), turns)


def bursts(blocks: float) -> Noise:
    """A neighbour that comes and goes: on for so many blocks in the mean, 30 % of the time."""
    leaves = 1 / blocks
    comes = leaves * BURST_SHARE / (1 - BURST_SHARE)

    def draws(rng: Random) -> Iterator[float]:
        is_on = rng.random() < BURST_SHARE
        while True:
            yield rng.gauss(0, QUIET) + (rng.uniform(0, BURST_HEIGHT) if is_on else 0.0)
            is_on = rng.random() >= leaves if is_on else rng.random() < comes

    return lambda rng, turns: in_time(draws(rng), turns)


def heavy_tailed(scale: float) -> Noise:
    """Student's t with two degrees of freedom, which has no variance."""

    def draws(rng: Random) -> Iterator[float]:
        while True:
            yield scale / 100 * rng.gauss(0, 1) / math.sqrt(rng.expovariate(1.0))

    return lambda rng, turns: in_time(draws(rng), turns)


def offset(deviation: float) -> Noise:
    """Each arm of each process is faster or slower throughout, beside what varies from block to block."""
    return _shifted(lambda rng: rng.gauss(0, deviation / 100))


def bimodal(height: float) -> Noise:
    """Each arm of each process is slower by this, or is not, with even chances."""
    return _shifted(lambda rng: height / 100 * rng.randint(0, 1))


def _shifted(shift: Callable[[Random], float]) -> Noise:
    def blocks(rng: Random, turns: Order) -> list[list[float]]:
        return [[by + value for value in arm] for arm in iid(100 * QUIET)(rng, turns) for by in [shift(rng)]]

    return blocks


MODELS: Final[Mapping[str, Noise]] = {
    "iid 0.3 %": iid(0.3),
    "iid 1 %": iid(1),
    "iid 3 %": iid(3),
    "AR(1) 0.5, 1 %": autoregressive(0.5, 1),
    "AR(1) 0.9, 1 %": autoregressive(0.9, 1),
    "bursts of 10 blocks": bursts(10),
    "bursts of 2 blocks": bursts(2),
    "t(2), 0.5 %": heavy_tailed(0.5),
    "offset by process, 0.2 %": offset(0.2),
    "offset by process, 0.5 %": offset(0.5),
    "offset by process, 1 %": offset(1),
    "bimodal by process, 4 %": bimodal(4),
}


def process(
    noise: Noise, rng: Random, speedup: float, rounds: int, step_ms: float = 10.0
) -> tuple[list[float], list[float]]:
    """ms per step of the blocks of a baseline and of a candidate that is so many times as fast."""
    base, candidate = noise(rng, order(rounds, 2, rng.getrandbits(32)))
    return (
        [step_ms * math.exp(value) for value in base],
        [step_ms / speedup * math.exp(value) for value in candidate],
    )


def processes(
    noise: Noise, rng: Random, speedup: float, rounds: int, count: int
) -> tuple[list[list[float]], list[list[float]]]:
    """Of so many: (baseline, candidate), each by process."""
    found = [process(noise, rng, speedup, rounds) for _ in range(count)]
    return [base for base, _ in found], [candidate for _, candidate in found]
