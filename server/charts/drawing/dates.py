"""Ticks of a time axis at full minutes, hours, days, months or years."""

import math
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Final

from server.charts.drawing.axes import Tick

MINUTE, HOUR, DAY = 60, 3600, 86_400
MONTH: Final = 30 * DAY
#: Steps in seconds for ticks at full minutes, hours or days.
STEPS: Final = (
    *(n * MINUTE for n in (1, 5, 15, 30)),
    *(n * HOUR for n in (1, 3, 6, 12)),
    *(n * DAY for n in (1, 2, 7, 14)),
)
MONTH_STEPS: Final = (1, 3, 6, 12, 24, 60, 120, 240, 600, 1200)


def in_utc(at: datetime) -> datetime:
    """In UTC. A time without a zone is UTC already, as the database stores it."""
    return at.replace(tzinfo=UTC) if at.tzinfo is None else at.astimezone(UTC)


def date_ticks(low_s: float, high_s: float, count: int) -> list[Tick]:
    """About `count` ticks between two times in seconds since 1970."""
    rough_s = (high_s - low_s) / max(1, count)
    every_s = (*STEPS, *(months * MONTH for months in MONTH_STEPS))
    nearest = min(range(len(every_s)), key=lambda index: abs(math.log(every_s[index] / rough_s)))
    if nearest >= len(STEPS):
        return list(month_ticks(low_s, high_s, MONTH_STEPS[nearest - len(STEPS)]))
    step = STEPS[nearest]
    first, last = math.ceil(low_s / step), math.floor(high_s / step)
    moments = (datetime.fromtimestamp(index * step, UTC) for index in range(first, last + 1))
    return [(moment.timestamp(), f"{moment:%d %b}" if step >= DAY else hour(moment)) for moment in moments]


def hour(moment: datetime) -> str:
    """The time of day; for midnight the date."""
    return f"{moment:%H:%M}" if moment.hour or moment.minute else f"{moment:%d %b}"


def month_ticks(low_s: float, high_s: float, step: int) -> Iterator[Tick]:
    """Ticks every `step` months, counted from the year 0; labelled with the year alone from twelve months on."""
    low, high = (datetime.fromtimestamp(each, UTC) for each in (low_s, high_s))
    for months in range(low.year * 12 // step * step, high.year * 12 + 12, step):
        moment = datetime(months // 12, months % 12 + 1, 1, tzinfo=UTC)
        if low <= moment <= high:
            yield moment.timestamp(), f"{moment:%Y}" if step >= 12 else f"{moment:%b %Y}"
