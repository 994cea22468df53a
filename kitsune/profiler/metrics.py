"""MetricsCollector: records values and timed regions of a loop, and summarises them."""

import contextlib
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from typing import Final

import torch

from kitsune.errors import SettingsError
from kitsune.profiler.clock import Clock
from kitsune.profiler.columns import columns, shown

SUMMARY_HEADER: Final = ("name", "count", "mean", "median", "p90", "min", "max", "unit")
#: Unit of time -> milliseconds.
TIMES_MS: Final[Mapping[str, float]] = {"ns": 1e-6, "us": 1e-3, "ms": 1.0, "s": 1e3}
LARGEST: Final = sys.float_info.max


@dataclass(frozen=True, slots=True)
class Series:
    """All values of one name, in order. `inside`: for each value the region that was open, or None."""

    unit: str
    values: tuple[float, ...]
    inside: tuple[str | None, ...] = ()


@dataclass(frozen=True, slots=True)
class Summary:
    """Summary statistics of one name, in its unit. `p90` is the 90th percentile."""

    count: int
    mean: float
    median: float
    p90: float
    min: float
    max: float
    unit: str

    @property
    def words(self) -> tuple[str, ...]:
        """The cells of a table row after the name, as in SUMMARY_HEADER."""
        numbers = (self.mean, self.median, self.p90, self.min, self.max)
        return str(self.count), *map(shown, numbers), self.unit


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """One region's share of the time.

    `total_ms` includes nested regions, `own_ms` does not. `share` is `own_ms` over the sum of `own_ms` of all regions,
    so the shares add up to 1.
    """

    name: str
    count: int
    total_ms: float
    own_ms: float
    share: float

    @property
    def sentence(self) -> str:
        """This as a sentence."""
        who = self.name if math.isclose(self.own_ms, self.total_ms) else f"{self.name}, without the regions inside it,"
        times = "once" if self.count == 1 else f"{self.count} times"
        return f"{who} takes {self.share:.1%} of the time: {shown(self.own_ms)} ms in all, {times}."


@dataclass(slots=True)
class _Recorded:
    unit: str
    values: list[float] = field(default_factory=list)
    inside: list[str | None] = field(default_factory=list)

    def add(self, inside: str | None, value: float) -> None:
        self.values.append(value)
        self.inside.append(inside)


class MetricsCollector:
    """Collects values with `record` and times with `measure_time`.

    Times are measured as by CUDATimer: measuring does not wait for the GPU, but reading the times does, once. `device`
    is a device or its name; by default the current GPU, or the CPU. Not thread-safe.
    """

    def __init__(self, device: torch.device | str | None = None) -> None:
        self._device = device
        self._recorded: dict[str, _Recorded] = {}
        self._open: list[str] = []
        self._clock: Clock | None = None  # created with the first region: values need no device

    def record(self, name: str, value: float | torch.Tensor, unit: str = "") -> None:
        """Records a value. A time (unit ns, us, ms or s) counts as part of the region that is open, if any.

        Waits for a tensor on a GPU. Raises SettingsError when the value is not a finite number, or the name already has
        another unit.
        """
        try:
            number = float(value.detach() if isinstance(value, torch.Tensor) else value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise SettingsError(f"the value of {name!r} is {value!r:.100}; it must be a number") from error
        except OverflowError as error:  # not shown: Python cannot print an integer of more than 4300 digits
            raise SettingsError(f"the value of {name!r} is too large: a float holds {LARGEST:.2g} at most") from error
        if not math.isfinite(number):
            raise SettingsError(f"the value of {name!r} is {number}; it must be finite")
        self._of(name, unit).add(self._parent(), number)

    @contextlib.contextmanager
    def measure_time(self, name: str) -> Iterator[None]:
        """Times the block, in ms. A block that raises records no value.

        Raises SettingsError when the name already has another unit.
        """
        recorded, inside = self._of(name, "ms"), self._parent()
        clock = self._clock = self._clock or Clock(self._device)
        self._open.append(name)
        try:
            begin = clock.mark()
            yield
            clock.keep(begin, clock.mark(), partial(recorded.add, inside))
        finally:
            self._open.pop()

    @property
    def series(self) -> dict[str, Series]:
        """The raw values by name, in the order in which the names were first used. Waits for the GPU."""
        if self._clock is not None:
            self._clock.settle()
        kept = {name: one for name, one in self._recorded.items() if one.values}
        return {name: Series(one.unit, tuple(one.values), tuple(one.inside)) for name, one in kept.items()}

    def summary(self) -> dict[str, Summary]:
        """Count, mean, percentiles and extremes of each series, by name."""
        return {name: summarized(series) for name, series in self.series.items()}

    def analyze_bottlenecks(self) -> tuple[Bottleneck, ...]:
        """The regions by share of the time, largest first. Empty when no time was recorded."""
        return bottlenecks(self.series)

    def generate_report(self) -> str:
        """A table of the summary, and a sentence for each region."""
        rows = [(name, *of.words) for name, of in self.summary().items()]
        if not rows:
            return "Nothing was recorded."
        table = columns(SUMMARY_HEADER, rows)
        sentences = [bottleneck.sentence for bottleneck in self.analyze_bottlenecks()]
        return "\n".join([table, *([""] if sentences else []), *sentences])

    def _parent(self) -> str | None:
        return self._open[-1] if self._open else None

    def _of(self, name: str, unit: str) -> _Recorded:
        recorded = self._recorded.setdefault(name, _Recorded(unit))
        if recorded.unit != unit:
            raise SettingsError(f"{name!r} is recorded in {recorded.unit!r}, not in {unit!r}; use another name")
        return recorded


def summarized(series: Series) -> Summary:
    values = sorted(series.values)
    return Summary(
        count=len(values),
        mean=mean(values),
        median=quantile(values, 0.5),
        p90=quantile(values, 0.9),
        min=values[0],
        max=values[-1],
        unit=series.unit,
    )


def mean(values: Sequence[float]) -> float:
    try:
        return statistics.fmean(values)
    except OverflowError:  # the sum overflows; statistics.mean is exact, and slower
        return statistics.mean(values)


def quantile(ordered: Sequence[float], share: float) -> float:
    """A quantile of sorted values, with linear interpolation: definition 7 of Hyndman and Fan 1996, NumPy's default."""
    place = (len(ordered) - 1) * share
    below = math.floor(place)
    low, high = ordered[below], ordered[min(below + 1, len(ordered) - 1)]
    part, step = place - below, high - low
    return low + step * part if step <= LARGEST else low * (1 - part) + high * part


def bottlenecks(every: Mapping[str, Series]) -> tuple[Bottleneck, ...]:
    """The share of each name with a unit of time, largest first."""
    total_ms: dict[str, float] = {}
    times_inside_ms: defaultdict[str | None, list[float]] = defaultdict(list)
    for name, series in every.items():
        if series.unit in TIMES_MS:
            times_ms = [clamped(value * TIMES_MS[series.unit]) for value in series.values]
            total_ms[name] = total(times_ms)
            for parent, time_ms in zip(series.inside, times_ms, strict=True):
                times_inside_ms[parent].append(time_ms)
    # Clamped at 0: clocks have limited resolution, and a recorded time may not have been spent inside the region.
    own_ms = {name: clamped(max(0.0, time_ms - total(times_inside_ms[name]))) for name, time_ms in total_ms.items()}
    shares = dict(zip(own_ms, shares_of(list(own_ms.values())), strict=True))
    found = [
        Bottleneck(name, len(every[name].values), total_ms[name], own, shares[name]) for name, own in own_ms.items()
    ]
    return tuple(sorted(found, key=lambda one: -one.share))


def shares_of(parts: Sequence[float]) -> list[float]:
    """The share of each part in the sum, all 0 if the sum is 0. Scaled first, since the sum may overflow a float."""
    largest = max(parts, default=0.0)
    if not largest:
        return [0.0 for _ in parts]
    scaled = [part / largest for part in parts]
    whole = math.fsum(scaled)
    return [part / whole for part in scaled]


def total(values: Sequence[float]) -> float:
    """The sum of finite values, clamped to the range of floats."""
    try:
        return math.fsum(values)
    except OverflowError:  # of a partial sum
        return clamped(sum(map(Fraction, values)))


def clamped(number: float | Fraction) -> float:
    """The number clamped to the range of floats."""
    return float(max(-LARGEST, min(LARGEST, number)))
