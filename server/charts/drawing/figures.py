"""Formats numbers for charts only. What pages use too is in server/charts/drawing/words.py."""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Final

from server.charts.drawing import words

MANY: Final = 1e6
FINE: Final = 1e-6
UNEVEN: Final = 1.5  # larger ratios of tick steps mean a logarithmic axis
ROUNDING: Final = 1e-6
MINUS: Final = "\N{MINUS SIGN}"


def round_numbers(values: Sequence[float]) -> list[str]:
    """Tick labels with enough digits to tell neighbours apart: "1.0", "1.2"; "0.01", "0.1"; "2,000"."""
    steps = [after - before for before, after in pairwise(values)]
    largest, smallest = max(map(abs, values), default=0.0), min(steps, default=1.0)
    is_even = max(steps, default=1.0) < smallest * UNEVEN
    if is_even and largest < MANY and smallest > FINE:
        decimals = max(0, math.ceil(-math.log10(smallest) - ROUNDING))
        labels = [f"{value:,.{decimals}f}" for value in values]
    else:
        labels = [f"{value:.12g}" for value in values]
    return [each.replace("-", MINUS) for each in labels]


def change_ms(value: float) -> str:
    """With its sign: 0.12 is "+0.120 ms"."""
    return f"{sign(value, text := words.ms(abs(value)))}{text}"


def change_percent(share: float) -> str:
    """With its sign: 0.123 is "+12 %"."""
    return f"{sign(share, text := words.percent(abs(share)))}{text}"


def microseconds(value: float) -> str:
    """With one decimal, without the unit."""
    return f"{value:,.1f}".replace("-", MINUS)


def sign(value: float, text: str) -> str:
    """The sign of `value`; "" if `text` shows only zeros."""
    if not any(digit in text for digit in "123456789"):
        return ""
    return MINUS if value < 0 else "+"


def interval(low: float | None, high: float | None, formatted: Callable[[float], str]) -> str:
    """ "; 95 % interval 1.02 to 1.08"; "" if it is unknown."""
    if low is None or high is None:
        return ""
    return f"; 95 % interval {formatted(low)} to {formatted(high)}"


def listed(texts: Sequence[str], at_most: int = 40) -> str:
    """The first `at_most` texts as sentences, and how many more there are."""
    more = len(texts) - at_most
    return joined(*(f"{each}." for each in texts[:at_most]), f"And {more:,} more." if more > 0 else "")


def joined(*sentences: str) -> str:
    """The sentences that are not empty, separated by spaces."""
    return " ".join(filter(None, sentences))
