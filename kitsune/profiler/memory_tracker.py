"""MemoryTracker: peak memory of a block of code. As a command, of a whole script."""

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

import torch

from kitsune.cli import output
from kitsune.cli.exit_codes import ExitCode
from kitsune.device.backend import pick_device
from kitsune.errors import SettingsError, UnfitError
from kitsune.profiler.gauge import Gauge, MemoryWatch, gauge_of
from kitsune.profiler.script import read_script, run_script

USAGE: Final = "usage: python -m kitsune.profiler.memory_tracker SCRIPT [ARGS...]"
MIB: Final = 1024**2


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Memory at one moment of a block, in bytes: allocated then, and the peak since the block began."""

    label: str
    allocated_bytes: int
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class Change:
    """The difference of two snapshots, in bytes; negative where memory was freed."""

    before: str
    after: str
    allocated_bytes: int
    peak_bytes: int


class MemoryTracker:
    """Tracks the memory of a device over a block: `with MemoryTracker() as tracker: ...`.

    On a GPU it counts the bytes of tensors in torch's allocator, without waiting for the GPU. On a CPU, where torch
    counts nothing, it uses the resident memory of this process; `source` says which. Trackers may be nested. Each
    resets the peak of torch.cuda.max_memory_allocated, so do not combine it with other code that does.

    `device` is a device or its name; by default the current GPU, or the CPU. Raises UnfitError when it does not exist.
    """

    def __init__(self, device: torch.device | str | None = None) -> None:
        self.device = pick_device(device)
        self.snapshots: dict[str, Snapshot] = {}
        self._gauge: Gauge = gauge_of(self.device)
        self._watch: MemoryWatch | None = None
        self._is_open = False
        self._end_bytes = 0

    def __enter__(self) -> Self:
        if self._is_open:
            raise SettingsError("this tracker is active already; use another MemoryTracker for the inner block")
        self.snapshots = {}
        self._watch = self._gauge.begin()
        self._is_open = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end_bytes = self._gauge.end(self._seen())
        self._is_open = False

    @property
    def source(self) -> str:
        """A description of the memory that is tracked."""
        return self._gauge.source

    @property
    def peak_bytes(self) -> int:
        """Peak bytes in the block, including what was allocated before it. Inside the block: until now."""
        self._level_bytes()
        return self._seen().highest_bytes

    @property
    def allocated_bytes(self) -> int:
        """Growth in bytes over the block, negative where memory was freed. Inside the block: until now."""
        return self._level_bytes() - self._seen().begin_bytes

    def snapshot(self, label: str) -> Snapshot:
        """Stores the memory at this moment under a label, replacing an older one. Works only inside the block."""
        if not self._is_open:
            raise SettingsError(f"snapshot({label!r}) belongs into the block: with MemoryTracker() as tracker: ...")
        now = self._gauge.read()
        self.snapshots[label] = Snapshot(label, now, self._seen().highest_bytes)
        return self.snapshots[label]

    def compare(self, before: str, after: str) -> Change:
        """The difference of two snapshots. Raises SettingsError for a label without a snapshot."""
        first, second = self._taken(before), self._taken(after)
        return Change(
            before, after, second.allocated_bytes - first.allocated_bytes, second.peak_bytes - first.peak_bytes
        )

    def _level_bytes(self) -> int:
        return self._gauge.read() if self._is_open else self._end_bytes

    def _seen(self) -> MemoryWatch:
        if self._watch is None:
            raise SettingsError("nothing was tracked yet; use: with MemoryTracker() as tracker: ...")
        return self._watch

    def _taken(self, label: str) -> Snapshot:
        if label not in self.snapshots:
            there = ", ".join(map(repr, self.snapshots)) or "none"
            raise SettingsError(f"there is no snapshot {label!r}; there is {there}")
        return self.snapshots[label]


# The command ----------------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str]) -> None:
    """Runs a script, then prints a table of its memory on stdout. Raises what the script raises, including SystemExit.

    CUDA is not initialised before the script does it: the script may still choose its GPUs or fork.
    """
    if not arguments or arguments[0].startswith("-"):
        is_help = bool(arguments) and arguments[0] in ("-h", "--help")
        (sys.stdout if is_help else sys.stderr).write(f"{USAGE}\n")
        raise SystemExit(ExitCode.OK if is_help else ExitCode.USAGE)
    try:
        source = read_script(arguments[0])
    except SettingsError as error:
        raise SystemExit(output.fail("SettingsError", str(error), ExitCode.USAGE, as_json=False)) from error
    process = os.getpid()
    host = gauge_of(torch.device("cpu"))
    watch = host.begin()
    try:
        run_script(source, arguments)
    finally:
        if os.getpid() == process:  # not in a child that the script forked
            end_bytes = host.end(watch)
            _tell([*_on_gpus()] or [_row(host.source, watch.highest_bytes, watch.begin_bytes, end_bytes)])


def _on_gpus() -> Iterator[tuple[str, ...]]:
    """A row for each GPU on which the script had tensors."""
    for index in range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0):
        gauge = gauge_of(torch.device("cuda", index))
        end_bytes = gauge.read()
        if gauge.highest_bytes:
            yield _row(gauge.source, gauge.highest_bytes, 0, end_bytes)


def _row(source: str, peak_bytes: int, begin_bytes: int, end_bytes: int) -> tuple[str, ...]:
    return source, *(f"{nbytes / MIB:,.1f} MiB" for nbytes in (peak_bytes, begin_bytes, end_bytes))


def _tell(rows: Sequence[tuple[str, ...]]) -> None:
    """Prints the table. A stdout that cannot be written does not change the script's exit code."""
    numbers = ("peak", "before the script", "after it")
    try:
        output.stdout().print(output.table("memory", *numbers, rows=rows, right=frozenset(numbers)))
    except (UnfitError, ValueError) as error:  # ValueError: the script closed it
        output.note(f"the memory of the script cannot be printed: {error}")


if __name__ == "__main__":
    main(sys.argv[1:])
