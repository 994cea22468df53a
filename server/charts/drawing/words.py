"""Formats numbers, durations and times for pages and charts. Most functions are also filters of the templates."""

import math
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any, Final

from markupsafe import Markup

from kitsune.base.text_format import step_time
from kitsune.cli import output
from kitsune.plan import Interval

_NO_BREAK: Final = "\N{NO-BREAK SPACE}"
_MINUS: Final = "\N{MINUS SIGN}"
_TIMES: Final = "\N{MULTIPLICATION SIGN}"
#: (Upper limit in seconds, seconds in a unit, the unit.)
_UNITS: Final = ((90, 1, "s"), (60 * 60, 60, "min"), (48 * 3600, 3600, "h"), (60 * 86400, 86400, "days"))
_SHORT: Final = 12

_MANY: Final = 1e6
_FINE: Final = 1e-6
_UNEVEN: Final = 1.5  # larger ratios of tick steps mean a logarithmic axis
_ROUNDING: Final = 1e-6


def ago(moment: datetime, now: datetime) -> str:
    """The age of `moment`: "12 s ago", "3 days ago"; a date from 60 days on."""
    seconds = (now - moment).total_seconds()
    if seconds < 1:  # may be negative: clocks of several machines differ
        return "just now"
    for most, size, unit in _UNITS:
        if seconds < most:
            return f"{int(seconds / size)}{_NO_BREAK}{unit} ago"
    return f"{moment.astimezone(UTC):%Y-%m-%d}"


def lasted(seconds: float) -> str:
    """A duration: "9.3 s", "4 min 10 s", "2 h 5 min"."""
    if seconds < 60:
        return f"{seconds:.1f}{_NO_BREAK}s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    parts = ((hours, "h"), (minutes, "min")) if hours else ((minutes, "min"), (rest, "s"))
    return " ".join(f"{number}{_NO_BREAK}{unit}" for number, unit in parts if number)


def moment(at: datetime) -> str:
    """In UTC, to the second."""
    return f"{at.astimezone(UTC):%Y-%m-%d %H:%M:%S}{_NO_BREAK}UTC"


def ms(value: float) -> str:
    """A time per step, with three significant digits."""
    return f"{step_time(value)}{_NO_BREAK}ms"


def gain(value: Interval | float) -> str:
    """A speedup with a multiplication sign; of an interval its median."""
    factor = value.median if isinstance(value, Interval) else value
    return f"{factor:.2f}{_TIMES}" if factor < 10 else f"{factor:.1f}{_TIMES}"


def spread(interval: Interval) -> str:
    """The 95 % confidence interval of a gain: "1.38 to 1.46"."""
    return output.spread(interval, " to ")


def percent(share: float) -> str:
    """A fraction as a percentage: 0.0123 is "1.2 %"; from 10 % on without decimals."""
    value = 100 * share
    text = f"{abs(value):.1f}" if 0 < abs(value) < 9.95 else f"{abs(value):.0f}"
    return f"{_MINUS if value < 0 and float(text) else ''}{text}{_NO_BREAK}%"


def change(ratio: float) -> str:
    """A ratio as a signed change in per cent, without decimals from 1 % on: 0.88 is minus 12 %."""
    value = 100 * (ratio - 1)
    text = f"{abs(value):.0f}" if abs(value) >= 1 else f"{abs(value):.1f}"
    return f"{sign(value, text)}{text.removesuffix('.0')}{_NO_BREAK}%"


def mebibytes(size: int) -> str:
    """ "1,234 MiB"; with a decimal below 10."""
    value = size / 2**20
    return f"{value:,.1f}{_NO_BREAK}MiB" if value < 10 else f"{value:,.0f}{_NO_BREAK}MiB"


def short(name: str) -> str:
    """The first 12 characters of an id or a digest, enough to identify it."""
    return name[:_SHORT]


def count(number: int, one: str, many: str = "") -> str:
    """ "1 run", "2 runs", "10,000 runs"."""
    return f"{number:,}{_NO_BREAK}{one if number == 1 else many or f'{one}s'}"


def marked(text: str) -> Markup:
    """Text with parts between backticks as <code>."""
    parts = text.split("`")
    return Markup("").join(Markup("<code>{}</code>").format(part) if i % 2 else part for i, part in enumerate(parts))


def change_ms(value: float) -> str:
    """With its sign: 0.12 is "+0.120 ms"."""
    return f"{sign(value, text := ms(abs(value)))}{text}"


def change_percent(share: float) -> str:
    """With its sign: 0.123 is "+12 %"."""
    return f"{sign(share, text := percent(abs(share)))}{text}"


def microseconds(value: float) -> str:
    """With one decimal, without the unit."""
    return f"{value:,.1f}".replace("-", _MINUS)


def sign(value: float, text: str) -> str:
    """The sign of `value`; "" if `text` shows only zeros."""
    if not any(digit in text for digit in "123456789"):
        return ""
    return _MINUS if value < 0 else "+"


def interval(low: float | None, high: float | None, formatted: Callable[[float], str]) -> str:
    """ "; 95 % interval 1.02 to 1.08"; "" if it is unknown."""
    if low is None or high is None:
        return ""
    return f"; 95 % interval {formatted(low)} to {formatted(high)}"


def round_numbers(values: Sequence[float]) -> list[str]:
    """Tick labels with enough digits to tell neighbours apart: "1.0", "1.2"; "0.01", "0.1"; "2,000"."""
    steps = [after - before for before, after in pairwise(values)]
    largest, smallest = max(map(abs, values), default=0.0), min(steps, default=1.0)
    is_even = max(steps, default=1.0) < smallest * _UNEVEN
    if is_even and largest < _MANY and smallest > _FINE:
        decimals = max(0, math.ceil(-math.log10(smallest) - _ROUNDING))
        labels = [f"{value:,.{decimals}f}" for value in values]
    else:
        labels = [f"{value:.12g}" for value in values]
    return [each.replace("-", _MINUS) for each in labels]


def listed(texts: Sequence[str], at_most: int = 40) -> str:
    """The first `at_most` texts as sentences, and how many more there are."""
    more = len(texts) - at_most
    return joined(*(f"{each}." for each in texts[:at_most]), f"And {more:,} more." if more > 0 else "")


def joined(*sentences: str) -> str:
    """The sentences that are not empty, separated by spaces."""
    return " ".join(filter(None, sentences))


FILTERS: Final[Mapping[str, Callable[..., Any]]] = {
    word.__name__: word
    for word in (ago, lasted, moment, ms, gain, spread, percent, change, mebibytes, short, count, marked)
}
