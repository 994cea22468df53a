"""A block of code in, the most memory that it held out; as a command, the same for a whole script."""

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
from kitsune.profiler.gauge import Gauge, Watch, gauge_of
from kitsune.profiler.script import read_script, run_script

USAGE: Final = "usage: python -m kitsune.profiler.memory_tracker SCRIPT [ARGS...]"
MIB: Final = 1024**2


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The memory at one moment of a block, in bytes: the level then, and the highest from the block's beginning on."""

    label: str
    allocated_bytes: int
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class Change:
    """What changed from one snapshot to another, in bytes; negative where memory was given back."""

    before: str
    after: str
    allocated_bytes: int
    peak_bytes: int


class MemoryTracker:
    """Follows the memory of a device over a block: `with MemoryTracker() as tracker: ...`.

    On a GPU it counts the bytes in tensors, as torch's allocator does, without waiting for the GPU. On a CPU, where
    torch counts nothing, it takes the resident memory of this process; `source` says which. Trackers may be nested.
    Each sets the peak that torch.cuda.max_memory_allocated tells back, and so may not be mixed with others that do.

    `device` is a device or its name; without it the current GPU, or the CPU. Raises UnfitError when it is not there.
    """

    def __init__(self, device: torch.device | str | None = None) -> None:
        self.device = pick_device(device)
        self.snapshots: dict[str, Snapshot] = {}
        self._gauge: Gauge = gauge_of(self.device)
        self._watch: Watch | None = None
        self._is_open = False
        self._end_bytes = 0

    def __enter__(self) -> Self:
        if self._is_open:
            raise SettingsError("this tracker follows a block already; make another MemoryTracker for the inner one")
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
        """Which memory is tracked, and how, in words."""
        return self._gauge.source

    @property
    def peak_bytes(self) -> int:
        """The most bytes there were at once in the block, those from before it included. In the block: until now."""
        self._level_bytes()
        return self._seen().highest_bytes

    @property
    def allocated_bytes(self) -> int:
        """By how many bytes the memory grew over the block, negative where it shrank. In the block: until now."""
        return self._level_bytes() - self._seen().begin_bytes

    def snapshot(self, label: str) -> Snapshot:
        """Keeps the memory of this moment under a label; the newest of a label counts. Only in the block."""
        if not self._is_open:
            raise SettingsError(f"snapshot({label!r}) belongs into the block: with MemoryTracker() as tracker: ...")
        now = self._gauge.read()
        self.snapshots[label] = Snapshot(label, now, self._seen().highest_bytes)
        return self.snapshots[label]

    def compare(self, before: str, after: str) -> Change:
        """What changed between the snapshots of two labels. Raises SettingsError for a label that none has."""
        first, second = self._taken(before), self._taken(after)
        return Change(
            before, after, second.allocated_bytes - first.allocated_bytes, second.peak_bytes - first.peak_bytes
        )

    def _level_bytes(self) -> int:
        return self._gauge.read() if self._is_open else self._end_bytes

    def _seen(self) -> Watch:
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
    """Runs a script, then prints a table of its memory on stdout. Raises what the script raises, SystemExit too.

    CUDA is not touched before the script does: it may still choose its GPUs or fork.
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
    """A stdout that takes nothing more changes nothing about the script's own exit code."""
    numbers = ("peak", "before the script", "after it")
    try:
        output.stdout().print(output.table("memory", *numbers, rows=rows, right=frozenset(numbers)))
    except (UnfitError, ValueError) as error:  # ValueError: the script closed it
        output.note(f"the memory of the script cannot be told: {error}")


if __name__ == "__main__":
    main(sys.argv[1:])
