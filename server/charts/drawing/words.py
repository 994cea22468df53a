"""Formats numbers, durations and times for pages and charts. The functions are also filters of the templates."""

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
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
    sign = "" if float(text) == 0 else _MINUS if value < 0 else "+"
    return f"{sign}{text.removesuffix('.0')}{_NO_BREAK}%"


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


FILTERS: Final[Mapping[str, Callable[..., Any]]] = {
    word.__name__: word
    for word in (ago, lasted, moment, ms, gain, spread, percent, change, mebibytes, short, count, marked)
}
