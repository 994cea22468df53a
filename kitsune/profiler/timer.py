"""CUDATimer: times named regions of a loop on the device."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from kitsune.errors import SettingsError
from kitsune.profiler.clock import Clock, Mark


class CUDATimer:
    """Times regions with CUDA events on the current stream, or with the host's clock on a CPU.

    Measuring does not wait for the GPU: only `get_elapsed`, `samples_ms`, `time` and `time_iterations` do, once for
    each call. `device` is a device or its name; by default the current GPU, or the CPU. Raises UnfitError when it does
    not exist. Regions may be nested and repeated. A region that raises gives no sample. Not thread-safe.
    """

    def __init__(self, device: torch.device | str | None = None) -> None:
        self._clock = Clock(device)
        self._samples: dict[str, list[float]] = {}
        self._started: dict[str, list[Mark]] = {}

    @property
    def device(self) -> torch.device:
        """The device that is timed."""
        return self._clock.device

    @property
    def names(self) -> tuple[str, ...]:
        """The names of regions that have ended at least once, in the order of their first end."""
        return tuple(self._samples)

    @contextlib.contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Times the block under this name."""
        begin = self._clock.mark()
        yield
        self._end(name, begin)

    def start(self, name: str) -> None:
        """Begins a region that `stop` ends. A name may be started again before: the last one ends first."""
        self._started.setdefault(name, []).append(self._clock.mark())

    def stop(self, name: str) -> None:
        """Ends the region started last under this name. Raises SettingsError without a matching `start`."""
        if not self._started.get(name):
            raise SettingsError(f"the timer was not started for {name!r}; call start({name!r}) before stop({name!r})")
        self._end(name, self._started[name].pop())

    def get_elapsed(self, name: str) -> float:
        """Milliseconds of the last region of this name. Raises SettingsError for an unknown name."""
        return self._of(name)[-1]

    def samples_ms(self, name: str) -> tuple[float, ...]:
        """Milliseconds of all regions of this name, in order. Raises SettingsError for an unknown name."""
        return tuple(self._of(name))

    def time(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> float:
        """Milliseconds of one call, without warm-up. The time is not stored."""
        return self._calls_ms(lambda: function(*arguments, **named), 1)[0]

    def time_iterations(self, function: Callable[[], Any], count: int) -> tuple[float, ...]:
        """Milliseconds of each of `count` calls, issued back to back without waiting.

        The first ones may be slower, since there is no warm-up. The times are not stored. Raises SettingsError when
        `count` is not a positive integer.
        """
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise SettingsError(f"count is {count!r}; it must be a whole number of at least 1")
        return self._calls_ms(function, count)

    def _calls_ms(self, function: Callable[[], Any], count: int) -> tuple[float, ...]:
        found: list[float] = []
        for _ in range(count):
            begin = self._clock.mark()
            function()
            self._clock.keep(begin, self._clock.mark(), found.append)
        self._clock.settle()
        return tuple(found)

    def _end(self, name: str, begin: Mark) -> None:
        end = self._clock.mark()
        self._clock.keep(begin, end, self._samples.setdefault(name, []).append)

    def _of(self, name: str) -> list[float]:
        self._clock.settle()
        if name not in self._samples:
            if self._started.get(name):
                raise SettingsError(f"{name!r} was started and not stopped; call stop({name!r}) first")
            raise SettingsError(
                f"nothing was timed as {name!r}; there is {', '.join(map(repr, self.names)) or 'nothing'}"
            )
        return self._samples[name]
