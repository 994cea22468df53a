"""Linear and logarithmic scales from values to pixels, and their round ticks."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from kitsune.errors import ChartError

LARGEST: Final = 1e15  # far above all measurements; beyond it neighbouring ticks are the same float
SMALLEST_SPAN: Final = 1e-9  # relative to the largest value; a smaller span is drawn as if all values were equal
STEPS: Final = (1.0, 2.0, 5.0, 10.0)
PADDING: Final = 0.05  # of the span, on both sides
LOG_FROM: Final = 20.0  # ratio of largest to smallest value from which on a scale is logarithmic
FEW_DECADES: Final = 2.0


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps `low` to `start_px` and `high` to `end_px`. On a vertical axis `start_px` is larger: y grows downwards."""

    low: float
    high: float
    start_px: float
    end_px: float
    is_log: bool = False

    def place(self, value: float) -> float:
        low, high, here = (self._measure(each) for each in (self.low, self.high, value))
        return self.start_px + (here - low) / (high - low) * (self.end_px - self.start_px)

    def ticks(self, count: int) -> list[float]:
        """About `count` round numbers between low and high."""
        return log_ticks(self.low, self.high) if self.is_log else nice_ticks(self.low, self.high, count)

    def _measure(self, value: float) -> float:
        return math.log(value) if self.is_log else value


def linear(values: Iterable[float], start_px: float, end_px: float) -> Scale:
    """A linear scale over the values, with padding. Raises ChartError."""
    low, high = span(values)
    air = (high - low) * PADDING
    return Scale(low - air, high + air, start_px, end_px)


def from_zero(values: Iterable[float], start_px: float, end_px: float) -> Scale:
    """A linear scale that includes zero, for bars. Raises ChartError."""
    low, high = span([0.0, *values])
    return Scale(low, high, start_px, end_px)


def fitting(values: Iterable[float], start_px: float, end_px: float) -> Scale:
    """A logarithmic scale if all values are positive and their ratio is large, else linear. Raises ChartError."""
    low, high = span(known := list(values))
    if not known or min(known) <= 0 or high / low < LOG_FROM:
        return linear(known, start_px, end_px)
    air = (high / low) ** PADDING
    return Scale(low / air, high * air, start_px, end_px, is_log=True)


def span(values: Iterable[float]) -> tuple[float, float]:
    """The smallest and the largest value; widened if they are equal, (0, 1) widened without values."""
    known = [finite(value, "a value") for value in values] or [0.0, 1.0]
    low, high = min(known), max(known)
    largest = max(abs(low), abs(high))
    if high - low > largest * SMALLEST_SPAN:
        return low, high
    air = largest / 10 or 1.0
    return low - air, high + air


def finite(value: float, what: str) -> float:
    """The value itself. Raises ChartError if it is not finite, or too large for a scale."""
    if not math.isfinite(value) or abs(value) > LARGEST:
        raise ChartError(what, f"is {value}; only numbers between -{LARGEST:g} and {LARGEST:g} have a place on a scale")
    return value


def nice_step(rough: float) -> float:
    """The number 1, 2 or 5 times a power of ten with the smallest ratio to `rough`."""
    power = 10.0 ** math.floor(math.log10(rough))
    return power * min(STEPS, key=lambda step: abs(math.log(step * power / rough)))


def nice_ticks(low: float, high: float, count: int) -> list[float]:
    step = nice_step((high - low) / max(1, count))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


def whole_ticks(low: float, high: float, count: int) -> list[float]:
    """Like `nice_ticks`, but integers."""
    step = nice_step(max(1.0, (high - low) / max(1, count)))
    return [index * step for index in range(math.ceil(low / step), math.floor(high / step) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten; over few decades also 2 and 5 times these."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    steps = (1.0, 2.0, 5.0) if math.log10(high / low) <= FEW_DECADES else (1.0,)
    every = (step * 10.0**power for power in range(first, last + 1) for step in steps)
    return [value for value in every if low <= value <= high]
